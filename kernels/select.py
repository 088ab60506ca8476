"""Budgeted selection: the best clusters whose tokens fit the budget, as a list of blocks.

Clusters are taken in descending score, ties by ascending cluster number, for as long as their tokens fit the token
budget and their blocks fit the block budget; the first one that does not fit ends the selection. A block is a run of up
to ``block_size`` tokens of one cluster, contiguous in the host store.

On the GPU one program serves a row. A cluster has at least one token and takes at least one block, so no more than
``min(token_budget, max_blocks)`` clusters can be taken, and only that many best ones matter. So: find a threshold that
leaves about as many candidates (by bisection, which stops as soon as they fit the sort), list them in cluster order,
sort them (512 instead of 8192), cut where a budget breaks, and write the blocks out.
A row longer than ``ROW_TILE`` is first narrowed piece by piece, by a program each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. A row's scores stay in registers: 8192 of them are 16 a thread with 16 warps.
ROW_TILE = 16384
NUM_WARPS = 16


class Selection(NamedTuple):
    """What a row attends to besides sinks and window. Blocks are listed in cluster order, then padded.

    Attributes:
        chosen: ``[rows, clusters]`` bool, the clusters taken.
        blocks: ``[rows, max_blocks]`` int32 block number within the row, -1 in the padding.
        starts: ``[rows, max_blocks]`` int32 first token of the block in the host store.
        lengths: ``[rows, max_blocks]`` int32 tokens in the block, 0 in the padding.
    """

    chosen: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@triton.jit
def _key_of(value):
    """Integers that order like the floats: int32, -0.0 like 0.0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow(key, exists, cluster, list_ptr, wanted, LIMIT: tl.constexpr):
    """List in their order at least the ``wanted`` best of a row and at most ``LIMIT``: their numbers, then their keys.

    Bisection by value at first, which suits scores, then by key, which ends after 32 rounds whatever they are.
    """
    low = tl.min(tl.where(exists, key, 0x7FFFFFFF), axis=0)
    low_count = tl.sum(exists.to(tl.int32), axis=0)  # the keys from low on; always enough, or all
    high = tl.max(tl.where(exists, key, -0x7FFFFFFF), axis=0) + 1
    high_count = 0  # the keys from high on; always too few
    rounds = 0
    while (low_count > LIMIT) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        by_value = _key_of(0.5 * _value_of(low) + 0.5 * _value_of(high))
        middle = tl.where((rounds < 12) & (by_value > low) & (by_value < high), by_value, middle)
        count = tl.sum((key >= middle).to(tl.int32), axis=0)
        is_enough = count >= wanted
        low, low_count = tl.where(is_enough, middle, low), tl.where(is_enough, count, low_count)
        high, high_count = tl.where(is_enough, high, middle), tl.where(is_enough, high_count, count)
        rounds += 1

    taken = exists & (key >= low)
    if low_count > LIMIT:  # so many share the lowest key: the first of them
        is_tie = exists & (key == low)
        rank = tl.cumsum(is_tie.to(tl.int32), axis=0)
        taken = (exists & (key > low)) | (is_tie & (rank <= LIMIT - high_count))
    place = tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(list_ptr + place, cluster, mask=taken)
    tl.store(list_ptr + LIMIT + place, key, mask=taken)
    return tl.minimum(low_count, LIMIT)


@triton.jit
def _narrow_scores(score_ptr, chosen_ptr, list_ptr, first, clusters, wanted, LIMIT: tl.constexpr, TILE: tl.constexpr):
    """Narrow one piece of a row, and clear its part of ``chosen``."""
    cluster = first + tl.arange(0, TILE)
    in_row = cluster < clusters
    score = tl.load(score_ptr + cluster, mask=in_row, other=float("-inf"))
    tl.store(chosen_ptr + cluster, tl.zeros([TILE], tl.uint8), mask=in_row)
    return _narrow(_key_of(score), score > float("-inf"), cluster, list_ptr, wanted, LIMIT)


@triton.jit
def narrow_kernel(
    score_ptr, chosen_ptr, list_ptr, count_ptr, clusters, wanted, LIMIT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The first pass over a long row: a list for each piece of ``TILE`` clusters."""
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    list_ptr += (row * (tl.num_programs(0) + 1) + piece) * (2 * LIMIT)
    at = row * clusters
    count = _narrow_scores(score_ptr + at, chosen_ptr + at, list_ptr, piece * TILE, clusters, wanted, LIMIT, TILE)
    tl.store(count_ptr + row * tl.num_programs(0) + piece, count)


@triton.jit
def select_row(
    score_ptr, size_ptr, start_ptr, first_block_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
    list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS_PADDED: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
    PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr,
):  # fmt: skip
    """Select for the row of this program; its lists come narrowed when there are several pieces."""
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * clusters
    size_ptr += row * clusters
    start_ptr += row * clusters
    first_block_ptr += row * clusters
    chosen_ptr += row * clusters
    block_ptr += row * max_blocks
    block_start_ptr += row * max_blocks
    block_length_ptr += row * max_blocks
    if PIECES == 1:
        list_ptr += row * (2 * LIMIT)
        count = _narrow_scores(score_ptr, chosen_ptr, list_ptr, 0, clusters, wanted, LIMIT, TILE)
    else:
        list_ptr += row * ((PIECES + 1) * 2 * LIMIT)
        entry = tl.arange(0, PIECES_PADDED * LIMIT)
        piece = entry // LIMIT
        listed = tl.load(count_ptr + row * PIECES + piece, mask=piece < PIECES, other=0)
        exists = entry % LIMIT < listed
        at = list_ptr + piece * (2 * LIMIT) + entry % LIMIT
        cluster = tl.load(at, mask=exists, other=0)
        key = tl.load(at + LIMIT, mask=exists, other=-0x7FFFFFFF)
        list_ptr += PIECES * 2 * LIMIT
        count = _narrow(key, exists, cluster, list_ptr, wanted, LIMIT)
    tl.debug_barrier()  # the list goes from thread to thread through memory; so does the clearing of chosen

    entry = tl.arange(0, LIMIT)
    listed = entry < count
    cluster = tl.load(list_ptr + entry, mask=listed, other=0)
    key = tl.load(list_ptr + LIMIT + entry, mask=listed, other=0)
    size = tl.load(size_ptr + cluster, mask=listed, other=0)
    start = tl.load(start_ptr + cluster, mask=listed, other=0)
    first_block = tl.load(first_block_ptr + cluster, mask=listed, other=0)

    # The list is in cluster order, so its places break ties.
    order = (0x7FFFFFFF - key.to(tl.int64)) * LIMIT + entry
    order = tl.where(listed, order, 0x7FFFFFFFFFFFFFFF)
    best_first = tl.sort(order)
    sorted_size = tl.gather(size, (best_first & (LIMIT - 1)).to(tl.int32), 0)
    fits = best_first < 0x7FFFFFFFFFFFFFFF
    sorted_size = tl.where(fits, sorted_size, 0)
    fits &= tl.cumsum(sorted_size, axis=0) <= token_budget
    fits &= tl.cumsum((sorted_size + BLOCK_SIZE - 1) // BLOCK_SIZE, axis=0) <= max_blocks
    last = tl.max(tl.where(fits, best_first, -1), axis=0)
    chosen = order <= last
    tl.store(chosen_ptr + cluster, tl.full([LIMIT], 1, tl.uint8), mask=chosen)

    num_blocks = tl.where(chosen, (size + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    place = tl.cumsum(num_blocks, axis=0) - num_blocks
    for block in range(0, tl.max(num_blocks, axis=0)):
        within = block < num_blocks
        tl.store(block_ptr + place + block, first_block + block, mask=within)
        tl.store(block_start_ptr + place + block, start + block * BLOCK_SIZE, mask=within)
        tl.store(block_length_ptr + place + block, tl.minimum(size - block * BLOCK_SIZE, BLOCK_SIZE), mask=within)
    padding = tl.arange(0, MAX_BLOCKS_PADDED)
    is_padding = (padding >= tl.sum(num_blocks, axis=0)) & (padding < max_blocks)
    nothing = tl.zeros([MAX_BLOCKS_PADDED], tl.int32)
    tl.store(block_ptr + padding, nothing - 1, mask=is_padding)
    tl.store(block_start_ptr + padding, nothing, mask=is_padding)
    tl.store(block_length_ptr + padding, nothing, mask=is_padding)


@triton.jit
def select_kernel(
    score_ptr, size_ptr, start_ptr, first_block_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
    list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS_PADDED: tl.constexpr, LIMIT: tl.constexpr, TILE: tl.constexpr,
    PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr,
):  # fmt: skip
    select_row(
        score_ptr, size_ptr, start_ptr, first_block_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
        list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
        BLOCK_SIZE, MAX_BLOCKS_PADDED, LIMIT, TILE, PIECES, PIECES_PADDED,
    )  # fmt: skip


def select_clusters(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    *,
    token_budget: int,
    max_blocks: int,
    block_size: int,
) -> Selection:
    """Choose clusters by score within the budget.

    Args:
        scores: ``[rows, clusters]`` float32, -inf where no cluster exists.
        sizes: ``[rows, clusters]`` int32 tokens a cluster.
        starts: ``[rows, clusters]`` int32 first token of the cluster in the host store.
        first_blocks: ``[rows, clusters]`` int32 number of the cluster's first block.
        token_budget: Most tokens a row may take.
        max_blocks: Most blocks a row may take; the length of the lists.
        block_size: Tokens a block.
    """
    if not use_triton(scores):
        return select_clusters_reference(
            scores, sizes, starts, first_blocks, token_budget=token_budget, max_blocks=max_blocks, block_size=block_size
        )
    selection, arguments, constants = prepare_selection(
        scores, sizes, starts, first_blocks, token_budget=token_budget, max_blocks=max_blocks, block_size=block_size
    )
    select_kernel[(scores.shape[0],)](*arguments, **constants, num_warps=NUM_WARPS)
    return selection


def prepare_selection(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    *,
    token_budget: int,
    max_blocks: int,
    block_size: int,
) -> tuple[Selection, list, dict[str, int]]:
    """Everything before the launch of :func:`select_row`: outputs, the first pass over long rows, and its arguments."""
    check_contiguous(scores=scores, sizes=sizes, starts=starts, first_blocks=first_blocks)
    rows, clusters = scores.shape
    wanted = min(token_budget, max_blocks)
    tile = min(ROW_TILE, max(16, triton.next_power_of_2(clusters)))
    pieces = triton.cdiv(clusters, tile)
    limit = max(16, triton.next_power_of_2(wanted + wanted // 4))
    if pieces == 1:
        limit = min(limit, tile)
    chosen = torch.empty(rows, clusters, dtype=torch.bool, device=scores.device)
    blocks, block_starts, block_lengths = torch.empty(3, rows, max_blocks, dtype=torch.int32, device=scores.device)
    lists = torch.empty(rows, pieces + (pieces > 1), 2, limit, dtype=torch.int32, device=scores.device)
    counts = None
    if pieces > 1:
        counts = torch.empty(rows, pieces, dtype=torch.int32, device=scores.device)
        narrow_kernel[(pieces, rows)](
            scores, chosen.view(torch.uint8), lists, counts, clusters, wanted,
            LIMIT=limit, TILE=tile, num_warps=NUM_WARPS,
        )  # fmt: skip
    arguments = [
        scores, sizes, starts, first_blocks, chosen.view(torch.uint8), blocks, block_starts, block_lengths,
        lists, counts, clusters, wanted, token_budget, max_blocks,
    ]  # fmt: skip
    constants = {
        "BLOCK_SIZE": block_size,
        "MAX_BLOCKS_PADDED": triton.next_power_of_2(max_blocks),
        "LIMIT": limit,
        "TILE": tile,
        "PIECES": pieces,
        "PIECES_PADDED": triton.next_power_of_2(pieces),
    }
    return Selection(chosen, blocks, block_starts, block_lengths), arguments, constants


def select_clusters_reference(
    scores, sizes, starts, first_blocks, *, token_budget: int, max_blocks: int, block_size: int
) -> Selection:
    """The same in plain torch: sort, cumulate, cut."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    cluster_blocks = (sizes + block_size - 1) // block_size
    fits = sizes.gather(1, order).cumsum(1) <= token_budget
    fits &= cluster_blocks.gather(1, order).cumsum(1) <= max_blocks
    fits &= scores.gather(1, order) > float("-inf")
    chosen = torch.zeros_like(fits).scatter_(1, order, fits)

    ends = (cluster_blocks * chosen).cumsum(1)
    place = torch.arange(max_blocks, device=scores.device).expand(scores.shape[0], -1).contiguous()
    cluster = torch.searchsorted(ends, place, right=True).clamp(max=scores.shape[1] - 1)
    within = place - (ends - cluster_blocks * chosen).gather(1, cluster)
    is_padding = place >= ends[:, -1:]
    offset = within * block_size
    length = (sizes.gather(1, cluster) - offset).clamp(max=block_size).masked_fill(is_padding, 0)
    blocks = (first_blocks.gather(1, cluster) + within).masked_fill(is_padding, -1)
    start = (starts.gather(1, cluster) + offset).masked_fill(is_padding, 0)
    return Selection(chosen, blocks.int(), start.int(), length.int())
