"""Counters on the device: what decode steps selected and recalled, without a word to the host."""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton

COUNTERS = (
    "lookups",
    "selected_clusters",
    "selected_tokens",
    "selected_blocks",
    "missed_blocks",
    "recalled_tokens",
)

TILE = 4096
"""Clusters a program looks at in one go; untuned."""


@triton.jit
def count_kernel(
    counter_ptr, chosen_ptr, length_ptr, missed_ptr, clusters, max_blocks, TILE: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """One row adds what it selected and missed, in the order of ``COUNTERS``."""
    row = tl.program_id(0).to(tl.int64)
    num_chosen = 0
    for first in range(0, clusters, TILE):
        cluster = first + tl.arange(0, TILE)
        chosen = tl.load(chosen_ptr + row * clusters + cluster, mask=cluster < clusters, other=0)
        num_chosen += tl.sum(chosen.to(tl.int32), axis=0)
    block = tl.arange(0, BLOCKS)
    length = tl.load(length_ptr + row * max_blocks + block, mask=block < max_blocks, other=0)
    missed = tl.load(missed_ptr + row * max_blocks + block, mask=block < max_blocks, other=0).to(tl.int32)
    tl.atomic_add(counter_ptr, 1)
    tl.atomic_add(counter_ptr + 1, num_chosen.to(tl.int64))
    tl.atomic_add(counter_ptr + 2, tl.sum(length, axis=0).to(tl.int64))
    tl.atomic_add(counter_ptr + 3, tl.sum((length > 0).to(tl.int32), axis=0).to(tl.int64))
    tl.atomic_add(counter_ptr + 4, tl.sum(missed, axis=0).to(tl.int64))
    tl.atomic_add(counter_ptr + 5, tl.sum(missed * length, axis=0).to(tl.int64))


def new_counters(device: torch.device) -> torch.Tensor:
    """``[len(COUNTERS)]`` int64 zeros; a lookup is one row of one step."""
    return torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)


def count_step(counters: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, missed: torch.Tensor) -> None:
    """Add one step of one layer to ``counters``.

    Args:
        counters: ``[len(COUNTERS)]`` int64, updated in place.
        chosen: ``[rows, clusters]`` bool clusters selected.
        lengths: ``[rows, max_blocks]`` int32 tokens of the selected blocks, 0 in the padding.
        missed: ``[rows, max_blocks]`` bool blocks recalled.
    """
    if not use_triton(counters):
        count_step_reference(counters, chosen, lengths, missed)
        return
    rows, clusters = chosen.shape
    max_blocks = lengths.shape[1]
    count_kernel[(rows,)](
        counters, chosen.view(torch.uint8), lengths, missed.view(torch.uint8), clusters, max_blocks,
        TILE=min(TILE, triton.next_power_of_2(clusters)), BLOCKS=triton.next_power_of_2(max_blocks),
    )  # fmt: skip


def count_step_reference(counters, chosen, lengths, missed) -> None:
    """The same in plain torch."""
    rows = torch.full((), chosen.shape[0], dtype=torch.int64, device=counters.device)
    recalled = torch.where(missed, lengths, 0)
    counters += torch.stack([rows, chosen.sum(), lengths.sum(), (lengths > 0).sum(), missed.sum(), recalled.sum()])
