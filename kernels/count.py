"""Counters on the device: what decode steps selected and recalled, without a word to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton

if TYPE_CHECKING:
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


@triton.jit
def count_row(counter_ptr, clusters, tokens, blocks, missed_blocks, missed_tokens):
    """Add what one row selected and missed, int64 each, in the order of ``COUNTERS``."""
    tl.atomic_add(counter_ptr, 1, sem="relaxed")
    tl.atomic_add(counter_ptr + 1, clusters, sem="relaxed")
    tl.atomic_add(counter_ptr + 2, tokens, sem="relaxed")
    tl.atomic_add(counter_ptr + 3, blocks, sem="relaxed")
    tl.atomic_add(counter_ptr + 4, missed_blocks, sem="relaxed")
    tl.atomic_add(counter_ptr + 5, missed_tokens, sem="relaxed")


def new_counters(device: torch.device, names: tuple[str, ...] = COUNTERS) -> torch.Tensor:
    """``[len(names)]`` int64 zeros; a lookup, or a guess, is one row of one step."""
    return torch.zeros(len(names), dtype=torch.int64, device=device)


def count_step(counters: torch.Tensor, selection: Selection, missed: torch.Tensor) -> None:
    """Add one step of one layer to ``counters``, in plain torch; on the GPU the lookup does it by :func:`count_row`.

    Args:
        counters: ``[len(COUNTERS)]`` int64, updated in place.
        selection: What was selected.
        missed: ``[rows, max_blocks]`` bool blocks recalled.
    """
    rows = torch.full((), len(missed), dtype=torch.int64, device=counters.device)
    lengths, recalled = selection.lengths, torch.where(missed, selection.lengths, 0)
    selected = selection.chosen.sum(), lengths.sum(), (lengths > 0).sum()
    counters += torch.stack([rows, *selected, missed.sum(), recalled.sum()])


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
