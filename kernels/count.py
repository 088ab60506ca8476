"""Counters on the device: what decode steps selected and recalled, without a word to the host."""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton
from tiered_kv.kernels.lookup import SlotTables
from tiered_kv.kernels.select import Selection

COUNTERS = (
    "lookups",
    "selected_clusters",
    "selected_tokens",
    "selected_blocks",
    "missed_blocks",
    "recalled_tokens",
)

AHEAD_COUNTERS = ("guesses", "guessed_tokens", "prefetched_tokens", "used_prefetched_tokens")

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


def new_counters(device: torch.device, names: tuple[str, ...] = COUNTERS) -> torch.Tensor:
    """``[len(names)]`` int64 zeros; a lookup, or a guess, is one row of one step."""
    return torch.zeros(len(names), dtype=torch.int64, device=device)


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


@triton.jit
def count_ahead_kernel(
    counter_ptr, block_ptr, slot_ptr, missed_ptr, length_ptr, block_in_ptr, last_used_ptr, step_ptr,
    max_blocks, num_slots, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One row adds what was fetched ahead for it, in the order of ``AHEAD_COUNTERS``."""
    row = tl.program_id(0).to(tl.int64)
    place = row * max_blocks + tl.arange(0, BLOCKS)
    in_list = tl.arange(0, BLOCKS) < max_blocks
    length = tl.load(length_ptr + place, mask=in_list, other=0)
    fetched = tl.load(missed_ptr + place, mask=in_list, other=0) != 0
    slot = row * num_slots + tl.load(slot_ptr + place, mask=in_list & fetched, other=0)
    block = tl.load(block_ptr + place, mask=in_list, other=-1)
    is_there = tl.load(block_in_ptr + slot, mask=fetched, other=-1) == block
    used = fetched & is_there & (tl.load(last_used_ptr + slot, mask=fetched, other=-1) == tl.load(step_ptr + row))
    tl.atomic_add(counter_ptr, 1)
    tl.atomic_add(counter_ptr + 1, tl.sum(length, axis=0).to(tl.int64))
    tl.atomic_add(counter_ptr + 2, tl.sum(tl.where(fetched, length, 0), axis=0).to(tl.int64))
    tl.atomic_add(counter_ptr + 3, tl.sum(tl.where(used, length, 0), axis=0).to(tl.int64))


def count_ahead(
    counters: torch.Tensor, guess: Selection, slots: torch.Tensor, missed: torch.Tensor, tables: SlotTables
) -> None:
    """Add what a guess has fetched, and how much of it the step's own selection, looked up since, has used.

    Args:
        counters: ``[len(AHEAD_COUNTERS)]`` int64, updated in place.
        guess: What was selected for the guessed query.
        slots, missed: ``[rows, max_blocks]`` of the guess.
        tables: Slots as they are now.
    """
    if not use_triton(counters):
        count_ahead_reference(counters, guess, slots, missed, tables)
        return
    rows, max_blocks = slots.shape
    count_ahead_kernel[(rows,)](
        counters, guess.blocks, slots, missed.view(torch.uint8), guess.lengths, tables.block_in, tables.last_used,
        tables.step, max_blocks, tables.block_in.shape[1], BLOCKS=triton.next_power_of_2(max_blocks),
    )  # fmt: skip


def count_ahead_reference(counters, guess, slots, missed, tables) -> None:
    """The same in plain torch."""
    at = slots.clamp(min=0).long()
    is_there = tables.block_in.gather(1, at) == guess.blocks
    used = missed & is_there & (tables.last_used.gather(1, at) == tables.step[:, None])
    guesses = torch.full((), len(slots), dtype=torch.int64, device=counters.device)
    tokens = [torch.where(where, guess.lengths, 0).sum() for where in (slots >= 0, missed, used)]
    counters += torch.stack([guesses, *tokens])
