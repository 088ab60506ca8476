"""Cluster-cache lookup: which selected blocks are on the GPU, and which slots the missing ones get.

A hit keeps its slot. Misses, in list order, get the slots of lowest priority (see ``policies/replacement.py``), empty
slots first; nothing selected in this step is evicted. Tables are updated in place.

On the GPU one program serves a row, a lane a block and then a lane a slot. What one lane writes for another to read is
``last_used``: the slots of the hits are stamped with the present step, which no other slot can bear, and behind a
barrier that stamp says which slots are in use. Only a step with misses sorts the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiered_kv.kernels.count import count_row, count_step
from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton
from tiered_kv.kernels.select import NUM_WARPS as SELECT_WARPS
from tiered_kv.kernels.select import Selection, prepare_selection, select_clusters_reference, select_row
from tiered_kv.policies import replacement
from tiered_kv.policies.replacement import MAX_USES, aged_uses, eviction_priority

# Untuned.
NUM_WARPS = 8


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


@triton.jit
def _aged(uses, last_used, step, AGING_PERIOD: tl.constexpr):
    periods = step // AGING_PERIOD - last_used // AGING_PERIOD
    return uses >> tl.minimum(tl.maximum(periods, 0), 31)


@triton.jit
def _slots_to_evict(
    block_in_ptr, last_used_ptr, uses_ptr, step, num_slots,
    POLICY: tl.constexpr, AGING_PERIOD: tl.constexpr, FREQUENCY_BONUS: tl.constexpr, SLOTS_PADDED: tl.constexpr,
):  # fmt: skip
    """The slots of a row as they go: empty ones, then by priority; those in use are last."""
    # Neighbours in a thread: see select_row.
    slot = tl.arange(0, SLOTS_PADDED // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    is_slot = slot < num_slots
    resident = tl.load(block_in_ptr + slot, mask=is_slot, other=0)
    last_used = tl.load(last_used_ptr + slot, mask=is_slot, other=0)
    priority = last_used.to(tl.int64)
    if POLICY != 0:
        uses = tl.load(uses_ptr + slot, mask=is_slot, other=0)
        frequency = _aged(uses, last_used, step, AGING_PERIOD).to(tl.int64)
        priority += (frequency << 32) if POLICY == 1 else FREQUENCY_BONUS * frequency
    priority = tl.where(resident < 0, 0, priority + 1)
    may_go = is_slot & ((resident < 0) | (last_used < step))
    order = tl.where(may_go, priority * SLOTS_PADDED + slot, 0x7FFFFFFFFFFFFFFF)
    return (tl.sort(tl.reshape(order, [SLOTS_PADDED])) & (SLOTS_PADDED - 1)).to(tl.int32)


@triton.jit
def assign_row(
    slot_of_ptr, block_in_ptr, last_used_ptr, uses_ptr, step_ptr, block_ptr, length_ptr, slot_ptr, missed_ptr,
    num_blocks, num_slots, max_blocks,
    POLICY: tl.constexpr, AGING_PERIOD: tl.constexpr, FREQUENCY_BONUS: tl.constexpr, MAX_USES: tl.constexpr,
    MAX_BLOCKS_PADDED: tl.constexpr, SLOTS_PADDED: tl.constexpr, HAS_COUNTERS: tl.constexpr,
):  # fmt: skip
    """Look up the blocks of this program's row. A barrier stands between reads and writes of the same table.

    Returns the number of blocks missed and, with ``HAS_COUNTERS``, of their tokens, int64.
    """
    row = tl.program_id(0).to(tl.int64)
    slot_of_ptr += row * num_blocks
    block_in_ptr += row * num_slots
    last_used_ptr += row * num_slots
    uses_ptr += row * num_slots
    place = row * max_blocks + tl.arange(0, MAX_BLOCKS_PADDED)
    in_list = tl.arange(0, MAX_BLOCKS_PADDED) < max_blocks

    step = tl.load(step_ptr + row) + 1
    # Single numbers, not vectors: what follows is scattered (see select.py).
    block = tl.load(tl.multiple_of(block_ptr + place, 4), mask=in_list, other=-1)
    wanted = block >= 0
    slot = tl.load(slot_of_ptr + block, mask=wanted, other=-1)
    hit = slot >= 0
    missed = wanted & (slot < 0)
    uses = tl.load(uses_ptr + slot, mask=hit, other=0)
    last_used = tl.load(last_used_ptr + slot, mask=hit, other=0)
    uses = tl.minimum(_aged(uses, last_used, step, AGING_PERIOD) + 1, MAX_USES)
    now = tl.zeros([MAX_BLOCKS_PADDED], tl.int32) + step
    num_missed = missed.to(tl.int64)
    if HAS_COUNTERS:  # blocks and tokens in one sum
        length = tl.load(tl.multiple_of(length_ptr + place, 4), mask=missed, other=0)
        num_missed += length.to(tl.int64) << 32
    num_missed = tl.sum(num_missed, axis=0)
    tl.debug_barrier()
    tl.store(last_used_ptr + slot, now, mask=hit)
    tl.store(uses_ptr + slot, uses, mask=hit)
    tl.store(step_ptr + row, step)

    if num_missed > 0:
        tl.debug_barrier()
        victims = _slots_to_evict(
            block_in_ptr, last_used_ptr, uses_ptr, step, num_slots, POLICY, AGING_PERIOD, FREQUENCY_BONUS, SLOTS_PADDED
        )
        rank = tl.cumsum(missed.to(tl.int32), axis=0) - 1
        victim = tl.gather(victims, tl.maximum(rank, 0), 0)
        evicted = tl.load(block_in_ptr + victim, mask=missed, other=-1)
        tl.debug_barrier()
        # An evicted block is not among the selected ones, so no address is written twice.
        tl.store(slot_of_ptr + evicted, tl.full([MAX_BLOCKS_PADDED], -1, tl.int32), mask=missed & (evicted >= 0))
        tl.store(slot_of_ptr + block, victim, mask=missed)
        tl.store(block_in_ptr + victim, block, mask=missed)
        tl.store(last_used_ptr + victim, now, mask=missed)
        tl.store(uses_ptr + victim, tl.full([MAX_BLOCKS_PADDED], 1, tl.int32), mask=missed)
        slot = tl.where(missed, victim, slot)

    tl.store(tl.multiple_of(slot_ptr + place, 4), slot, mask=in_list)
    tl.store(tl.multiple_of(missed_ptr + place, 1), missed.to(tl.uint8), mask=in_list)
    return num_missed & 0xFFFFFFFF, num_missed >> 32


@triton.jit
def assign_kernel(
    slot_of_ptr, block_in_ptr, last_used_ptr, uses_ptr, step_ptr, block_ptr, slot_ptr, missed_ptr,
    num_blocks, num_slots, max_blocks,
    POLICY: tl.constexpr, AGING_PERIOD: tl.constexpr, FREQUENCY_BONUS: tl.constexpr, MAX_USES: tl.constexpr,
    MAX_BLOCKS_PADDED: tl.constexpr, SLOTS_PADDED: tl.constexpr,
):  # fmt: skip
    assign_row(
        slot_of_ptr, block_in_ptr, last_used_ptr, uses_ptr, step_ptr, block_ptr, None, slot_ptr, missed_ptr,
        num_blocks, num_slots, max_blocks,
        POLICY, AGING_PERIOD, FREQUENCY_BONUS, MAX_USES, MAX_BLOCKS_PADDED, SLOTS_PADDED, False,
    )  # fmt: skip


@triton.jit
def select_and_assign_kernel(
    score_ptr, size_ptr, start_ptr, first_block_ptr, hint_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
    list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
    slot_of_ptr, block_in_ptr, last_used_ptr, uses_ptr, step_ptr, slot_ptr, missed_ptr, counter_ptr,
    num_blocks, num_slots,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS_PADDED: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_REST: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr,
    HAS_HINTS: tl.constexpr, POLICY: tl.constexpr, AGING_PERIOD: tl.constexpr, FREQUENCY_BONUS: tl.constexpr,
    MAX_USES: tl.constexpr, SLOTS_PADDED: tl.constexpr, HAS_COUNTERS: tl.constexpr,
):  # fmt: skip
    clusters, tokens, blocks = select_row(
        score_ptr, size_ptr, start_ptr, first_block_ptr, hint_ptr, chosen_ptr, block_ptr, block_start_ptr,
        block_length_ptr, list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
        BLOCK_SIZE, MAX_BLOCKS_PADDED, LIMIT, CHUNKS, COLUMNS, HAS_REST, PIECES, PIECES_PADDED, HAS_HINTS,
    )  # fmt: skip
    tl.debug_barrier()  # the list of blocks goes from thread to thread through memory
    missed_blocks, missed_tokens = assign_row(
        slot_of_ptr, block_in_ptr, last_used_ptr, uses_ptr, step_ptr, block_ptr, block_length_ptr, slot_ptr, missed_ptr,
        num_blocks, num_slots, max_blocks,
        POLICY, AGING_PERIOD, FREQUENCY_BONUS, MAX_USES, MAX_BLOCKS_PADDED, SLOTS_PADDED, HAS_COUNTERS,
    )  # fmt: skip
    if HAS_COUNTERS:
        count_row(counter_ptr, clusters.to(tl.int64), tokens, blocks, missed_blocks, missed_tokens)


def assign_slots(tables: SlotTables, blocks: torch.Tensor, *, policy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Look up the selected blocks and give the missing ones slots.

    Args:
        tables: Updated in place; has at least as many slots as ``blocks`` has columns.
        blocks: ``[rows, max_blocks]`` int32 distinct block numbers in a row, -1 in the padding.
        policy: ``"lru"``, ``"lfu"`` or ``"lru_lfu"``.

    Returns:
        ``slots`` ``[rows, max_blocks]`` int32 (-1 in the padding) and ``missed`` ``[rows, max_blocks]`` bool.
    """
    if not use_triton(blocks):
        return assign_slots_reference(tables, blocks, policy=policy)
    check_contiguous(blocks=blocks, **tables._asdict())
    slots, missed = _new_assignment(blocks)
    assign_kernel[(blocks.shape[0],)](
        *tables, blocks, slots, missed.view(torch.uint8), tables.slot_of.shape[1], tables.block_in.shape[1],
        blocks.shape[1], MAX_BLOCKS_PADDED=triton.next_power_of_2(blocks.shape[1]),
        **_policy_constants(tables, policy), num_warps=NUM_WARPS,
    )  # fmt: skip
    return slots, missed


def select_and_assign(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    tables: SlotTables,
    hints: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    *,
    token_budget: int,
    max_blocks: int,
    block_size: int,
    policy: str,
) -> tuple[Selection, torch.Tensor, torch.Tensor]:
    """:func:`~tiered_kv.kernels.select.select_clusters` and :func:`assign_slots` of its blocks, in one launch.

    Args:
        counters: ``[len(COUNTERS)]`` int64 to which the step is added, see :mod:`tiered_kv.kernels.count`.

    Returns:
        The selection, ``slots`` and ``missed``.
    """
    budget = {"token_budget": token_budget, "max_blocks": max_blocks, "block_size": block_size}
    if not use_triton(scores):
        selection = select_clusters_reference(scores, sizes, starts, first_blocks, **budget)
        slots, missed = assign_slots_reference(tables, selection.blocks, policy=policy)
        if counters is not None:
            count_step(counters, selection, missed)
        return selection, slots, missed
    check_contiguous(**tables._asdict())
    selection, arguments, constants = prepare_selection(scores, sizes, starts, first_blocks, hints, **budget)
    slots, missed = _new_assignment(selection.blocks)
    select_and_assign_kernel[(scores.shape[0],)](
        *arguments, *tables, slots, missed.view(torch.uint8), counters,
        tables.slot_of.shape[1], tables.block_in.shape[1],
        **constants, **_policy_constants(tables, policy), HAS_COUNTERS=counters is not None, num_warps=SELECT_WARPS,
    )  # fmt: skip
    return selection, slots, missed


def _new_assignment(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(blocks), torch.empty(blocks.shape, dtype=torch.bool, device=blocks.device)


def _policy_constants(tables: SlotTables, policy: str) -> dict[str, int]:
    if policy not in replacement.POLICY_IDS:
        raise ValueError(f"policy: expected one of {', '.join(replacement.POLICY_IDS)}, got {policy!r}")
    return {
        "POLICY": replacement.POLICY_IDS[policy],
        "AGING_PERIOD": replacement.AGING_PERIOD,
        "FREQUENCY_BONUS": replacement.FREQUENCY_BONUS,
        "MAX_USES": MAX_USES,
        "SLOTS_PADDED": max(4, triton.next_power_of_2(tables.block_in.shape[1])),
    }


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
    """``table`` with ``source`` written at ``index`` of each row, where ``where`` holds; the rest goes astray."""
    width = table.shape[1]
    padded = torch.cat([table, table.new_zeros(table.shape[0], 1)], dim=1)
    at = torch.where(where, index, width).long()
    if not isinstance(source, torch.Tensor):
        return padded.scatter(1, at, source)[:, :width]
    return padded.scatter(1, at, source.to(table.dtype))[:, :width]
