"""Cluster-cache lookup: which selected blocks are on the GPU, and which slots the missing ones get.

A hit keeps its slot. Misses, in list order, get the slots of lowest priority (see ``policies/replacement.py``), empty slots
first; nothing selected in this step is evicted. Tables are updated in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiered_kv.policies.replacement import MAX_USES, aged_uses, eviction_priority


class SlotTables(NamedTuple):
    """What the GPU cluster cache knows of its slots; fixed addresses, updated in place.

    Attributes:
        slot_of: ``[rows, blocks]`` int32 slot of a block, -1 when it is not on the GPU.
        block_in: ``[rows, slots]`` int32 block in a slot, -1 when empty.
        last_used: ``[rows, slots]`` int32 step of the last use.
        uses: ``[rows, slots]`` int32 uses, aged to ``last_used``.
        step: ``[rows]`` int32 lookups so far.
    """

    slot_of: torch.Tensor
    block_in: torch.Tensor
    last_used: torch.Tensor
    uses: torch.Tensor
    step: torch.Tensor


def assign_slots(tables: SlotTables, blocks: torch.Tensor, *, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the selected blocks and give the missing ones slots.

    Args:
        tables: Updated in place; has at least as many slots as ``blocks`` has columns.
        blocks: ``[rows, max_blocks]`` int32 distinct block numbers in a row, -1 in the padding.
        policy: ``"lru"``, ``"lfu"`` or ``"lru_lfu"``.

    Returns:
        ``slots`` ``[rows, max_blocks]`` int32 (-1 in the padding) and ``missed`` ``[rows, max_blocks]`` bool.
    """
    return assign_slots_reference(tables, blocks, policy=policy)


def assign_slots_reference(
    tables: SlotTables, blocks: torch.Tensor, *, policy: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch: sort the slots by priority, deal them to the misses."""
    num_slots = tables.block_in.shape[1]
    tables.step.add_(1)
    step = tables.step[:, None]
    wanted = blocks >= 0
    slots = torch.where(wanted, tables.slot_of.gather(1, blocks.clamp(min=0).long()), -1)
    hit = slots >= 0
    missed = wanted & ~hit

    priority = eviction_priority(policy, tables.uses, tables.last_used, step)
    priority = priority.masked_fill(tables.block_in < 0, -1)
    in_use = _scatter(torch.zeros_like(tables.block_in, dtype=torch.bool), slots, hit, True)
    priority = priority.masked_fill(in_use, torch.iinfo(torch.int64).max)
    victims = torch.sort(priority, dim=1, stable=True).indices.int()

    rank = (missed.cumsum(1) - 1).clamp(0, num_slots - 1)
    slots = torch.where(missed, victims.gather(1, rank), slots)
    evicted = tables.block_in.gather(1, slots.clamp(min=0).long())
    fresh_uses = torch.where(hit, _uses_now(tables, slots, step), 0) + 1
    tables.slot_of.copy_(_scatter(tables.slot_of, evicted, missed & (evicted >= 0), -1))
    tables.slot_of.copy_(_scatter(tables.slot_of, blocks, missed, slots))
    tables.block_in.copy_(_scatter(tables.block_in, slots, missed, blocks))
    tables.last_used.copy_(_scatter(tables.last_used, slots, wanted, step.expand_as(slots)))
    tables.uses.copy_(_scatter(tables.uses, slots, wanted, fresh_uses.clamp(max=MAX_USES).int()))
    return slots, missed


def _uses_now(tables: SlotTables, slots: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    at = slots.clamp(min=0).long()
    return aged_uses(tables.uses.gather(1, at), tables.last_used.gather(1, at), step)


def _scatter(table: torch.Tensor, index: torch.Tensor, where: torch.Tensor, source: torch.Tensor | int | bool):
    """``table`` with ``source`` written at ``index`` in each row, where ``where`` holds; the rest goes to a spare column."""
    width = table.shape[1]
    padded = torch.cat([table, table.new_zeros(table.shape[0], 1)], dim=1)
    at = torch.where(where, index, width).long()
    if not isinstance(source, torch.Tensor):
        return padded.scatter(1, at, source)[:, :width]
    return padded.scatter(1, at, source.to(table.dtype))[:, :width]
