"""Budgeted selection: the best clusters whose tokens fit the budget, as a list of blocks.

Clusters are taken in descending score, ties by ascending cluster number, for as long as their tokens fit the token
budget and their blocks fit the block budget; the first one that does not fit ends the selection. A block is a run of up
to ``block_size`` tokens of one cluster, contiguous in the host store.

On the GPU one program serves a row. A cluster has at least one token and takes at least one block, so no more than
``min(token_budget, max_blocks)`` clusters can be taken, and only that many best ones matter. So: find a threshold that
leaves about as many candidates, list them, sort them (512 instead of 8192), cut where a budget breaks, and write the
blocks out. The threshold is searched from a hint, the one that would have been best in the step before: where the
scores have moved little, a single count is enough. Any hint gives the same selection.
A row longer than ``ROW_TILE`` is first narrowed piece by piece, by a program each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. A row's scores stay in registers: 8704 of them are 36 a thread with 8 warps. They are a power of two and a
# rest that is rounded up to one by itself, to LEAST_COLUMNS at the least: 8704 take 9216 places, not 16384.
ROW_TILE = 16384
PIECE_TILE = 4096
LEAST_COLUMNS = 1024
NUM_WARPS = 8


class Selection(NamedTuple):
    """What a row attends to besides sinks and window. Blocks are listed best cluster first, then padded.

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
def _count_from(key, rest, least, HAS_REST: tl.constexpr):
    """How many keys of ``[columns, chunks]`` and of the rest ``[columns]`` are at least ``least``."""
    count = tl.sum((key >= least).to(tl.int32), axis=1)
    if HAS_REST:
        count += (rest >= least).to(tl.int32)
    return tl.sum(count, axis=0)


@triton.jit
def _extremes(key, rest, HAS_REST: tl.constexpr):
    """Smallest and largest key of those that exist."""
    smallest = tl.min(tl.where(key > -0x80000000, key, 0x7FFFFFFF), axis=1)
    largest = tl.max(key, axis=1)
    if HAS_REST:
        smallest = tl.minimum(smallest, tl.where(rest > -0x80000000, rest, 0x7FFFFFFF))
        largest = tl.maximum(largest, rest)
    return tl.min(smallest, axis=0), tl.max(largest, axis=0)


@triton.jit
def _threshold(key, rest, hint, wanted, LIMIT: tl.constexpr, HAS_REST: tl.constexpr):
    """The lowest key to list, how many keys there are from it on, and how many above it if those are too many to list.

    At least ``wanted`` (or all) and at most ``LIMIT`` when keys differ. The search interpolates at first, as if the
    logarithm of the count fell with the value in a straight line, which suits the upper tail of scores; then it bisects
    by key, which ends after 32 rounds whatever they are.
    """
    low = tl.maximum(hint, -0x7FFFFFFF)
    low_count = _count_from(key, rest, low, HAS_REST)
    above = 0
    if (low_count < wanted) | (low_count > LIMIT):
        middle, count = low, low_count
        low, high = _extremes(key, rest, HAS_REST)
        low_count = _count_from(key, rest, -0x7FFFFFFF, HAS_REST)  # the keys from low on; always enough, or all
        high_count = 0  # the keys from high on; always too few
        high += 1
        target = tl.log((wanted + LIMIT) * 0.5)
        rounds = 0
        while (low_count > LIMIT) & (high > low + 1):
            if (rounds > 0) | (middle <= low) | (middle >= high):
                low_log, high_log = tl.log(low_count + 0.0), tl.log(tl.maximum(high_count, 0.5))
                share = (low_log - target) / (low_log - high_log)
                by_value = _key_of(_value_of(low) * (1.0 - share) + _value_of(high) * share)
                middle = (low & high) + ((low ^ high) >> 1)
                middle = tl.where((rounds < 12) & (by_value > low) & (by_value < high), by_value, middle)
                count = _count_from(key, rest, middle, HAS_REST)
            is_enough = count >= wanted
            low, low_count = tl.where(is_enough, middle, low), tl.where(is_enough, count, low_count)
            high, high_count = tl.where(is_enough, high, middle), tl.where(is_enough, high_count, count)
            rounds += 1
        above = high_count
    return low, low_count, above


@triton.jit
def _narrow(key, rest, cluster, rest_cluster, hint, list_ptr, wanted, LIMIT: tl.constexpr, HAS_REST: tl.constexpr):
    """List at least the ``wanted`` best of a row (or all of it) and at most ``LIMIT``, in any order; returns how many.

    An entry is a number that sorts by descending key, then by ascending cluster.
    """
    low, count, above = _threshold(key, rest, hint, wanted, LIMIT, HAS_REST)
    end = 0x7FFFFFFF
    if count > LIMIT:  # so many share the lowest key: the first of them, up to the cluster that leaves LIMIT
        start = 0
        while end > start + 1:
            middle = (start + end) // 2
            ties = tl.sum(((key == low) & (cluster < middle)).to(tl.int32), axis=1)
            if HAS_REST:
                ties += ((rest == low) & (rest_cluster < middle)).to(tl.int32)
            is_few = above + tl.sum(ties, axis=0) <= LIMIT
            start, end = tl.where(is_few, middle, start), tl.where(is_few, end, middle)
        end = start
        count = LIMIT

    # Columns are numbered across threads, what is in a column within a thread.
    taken = (key > low) | ((key == low) & (cluster < end))
    in_column = tl.sum(taken.to(tl.int32), axis=1)
    if HAS_REST:
        rest_taken = (rest > low) | ((rest == low) & (rest_cluster < end))
        in_column += rest_taken.to(tl.int32)
    column_end = tl.cumsum(in_column, axis=0)
    place = (column_end - in_column)[:, None] + tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(list_ptr + place, _entry_of(key, cluster), mask=taken)
    if HAS_REST:
        tl.store(list_ptr + column_end - 1, _entry_of(rest, rest_cluster), mask=rest_taken)
    return count


@triton.jit
def _entry_of(key, cluster):
    return ((0x7FFFFFFF - key.to(tl.int64)) << 31) | cluster


@triton.jit
def _key_in(entry):
    return (0x7FFFFFFF - (entry >> 31)).to(tl.int32)


@triton.jit
def _load_keys(score_ptr, cluster, clusters):
    """The keys of some clusters, the least integer where none exists."""
    # Held back from wider loads: scattered stores take one number a thread, and numbers would change threads for each.
    score_at = tl.multiple_of(score_ptr + cluster, [4] * len(cluster.shape))
    score = tl.load(score_at, mask=cluster < clusters, other=float("-inf"))
    return tl.where(score > float("-inf"), _key_of(score), -0x80000000)


@triton.jit
def _narrow_scores(
    score_ptr, chosen_ptr, list_ptr, first, clusters, hint, wanted,
    LIMIT: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Narrow one piece of a row, and clear its part of ``chosen``."""
    column = tl.arange(0, COLUMNS)
    cluster = first + column[:, None] + tl.arange(0, CHUNKS)[None, :] * COLUMNS
    rest_cluster = first + CHUNKS * COLUMNS + column
    key = _load_keys(score_ptr, cluster, clusters)
    rest = _load_keys(score_ptr, rest_cluster, clusters) if HAS_REST else rest_cluster
    places: tl.constexpr = (2 if HAS_REST else 1) * CHUNKS * COLUMNS
    place = first + tl.arange(0, places)
    tl.store(chosen_ptr + place, tl.zeros([places], tl.uint8), mask=place < clusters)
    return _narrow(key, rest, cluster, rest_cluster, hint, list_ptr, wanted, LIMIT, HAS_REST)


@triton.jit
def narrow_kernel(
    score_ptr, chosen_ptr, list_ptr, count_ptr, clusters, wanted,
    LIMIT: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first pass over a long row: a list for each piece of ``CHUNKS`` × ``COLUMNS`` clusters."""
    row = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    list_ptr += (row * (tl.num_programs(0) + 1) + piece) * LIMIT
    at = row * clusters
    first = piece * CHUNKS * COLUMNS
    count = _narrow_scores(
        score_ptr + at, chosen_ptr + at, list_ptr, first, clusters, -0x7FFFFFFF, wanted, LIMIT, CHUNKS, COLUMNS, False
    )
    tl.store(count_ptr + row * tl.num_programs(0) + piece, count)


@triton.jit
def select_row(
    score_ptr, size_ptr, start_ptr, first_block_ptr, hint_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
    list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS_PADDED: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_REST: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr,
    HAS_HINTS: tl.constexpr,
):  # fmt: skip
    """Select for the row of this program; its lists come narrowed when there are several pieces.

    Returns the number of clusters (int32), and of tokens and blocks (int64) selected.
    """
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * clusters
    size_ptr += row * clusters
    start_ptr += row * clusters
    first_block_ptr += row * clusters
    chosen_ptr += row * clusters
    block_ptr += row * max_blocks
    block_start_ptr += row * max_blocks
    block_length_ptr += row * max_blocks
    hint = tl.load(hint_ptr + row) if HAS_HINTS else -0x7FFFFFFF
    if PIECES == 1:
        list_ptr += row * LIMIT
        count = _narrow_scores(
            score_ptr, chosen_ptr, list_ptr, 0, clusters, hint, wanted, LIMIT, CHUNKS, COLUMNS, HAS_REST
        )
    else:
        list_ptr += row * (PIECES + 1) * LIMIT
        piece = tl.arange(0, PIECES_PADDED)[None, :]
        place = tl.arange(0, LIMIT)[:, None]
        exists = place < tl.load(count_ptr + row * PIECES + piece, mask=piece < PIECES, other=0)
        entry = tl.load(list_ptr + piece * LIMIT + place, mask=exists, other=0)
        key = tl.where(exists, _key_in(entry), -0x80000000)
        cluster = (entry & 0x7FFFFFFF).to(tl.int32)
        list_ptr += PIECES * LIMIT
        count = _narrow(key, place, cluster, place, hint, list_ptr, wanted, LIMIT, False)
    tl.debug_barrier()  # the list goes from thread to thread through memory; so does the clearing of chosen

    place = tl.arange(0, LIMIT)
    listed = place < count
    # Sorted with neighbours in a thread, which spares exchanges between threads; then scattered, one number a thread.
    neighbours = tl.arange(0, LIMIT // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    entry = tl.load(list_ptr + neighbours, mask=neighbours < count, other=0x7FFFFFFFFFFFFFFF)
    entry = tl.gather(tl.sort(tl.reshape(entry, [LIMIT])), place, 0)
    cluster = (entry & 0x7FFFFFFF).to(tl.int32)
    size = tl.load(size_ptr + cluster, mask=listed, other=0)
    start = tl.load(start_ptr + cluster, mask=listed, other=0)
    first_block = tl.load(first_block_ptr + cluster, mask=listed, other=0)
    if HAS_HINTS:  # the key that would have left a list of middling length
        is_hint = place == tl.minimum(count, (wanted + LIMIT) // 2) - 1
        tl.store(hint_ptr + row + tl.zeros_like(place), _key_in(entry), mask=is_hint)

    num_blocks = (size + BLOCK_SIZE - 1) // BLOCK_SIZE
    sums = tl.cumsum((num_blocks.to(tl.int64) << 32) | size, axis=0)  # blocks and tokens in one
    fits = listed & ((sums & 0xFFFFFFFF) <= token_budget) & ((sums >> 32) <= max_blocks)
    tl.store(chosen_ptr + cluster, tl.full([LIMIT], 1, tl.uint8), mask=fits)
    all_sums = tl.max(tl.where(fits, sums, 0), axis=0)
    all_tokens, all_blocks = all_sums & 0xFFFFFFFF, all_sums >> 32

    place = (sums >> 32).to(tl.int32) - num_blocks
    num_blocks = tl.where(fits, num_blocks, 0)
    for block in range(0, tl.max(num_blocks, axis=0)):
        within = block < num_blocks
        tl.store(block_ptr + place + block, first_block + block, mask=within)
        tl.store(block_start_ptr + place + block, start + block * BLOCK_SIZE, mask=within)
        tl.store(block_length_ptr + place + block, tl.minimum(size - block * BLOCK_SIZE, BLOCK_SIZE), mask=within)
    padding = tl.arange(0, MAX_BLOCKS_PADDED)
    is_padding = (padding >= all_blocks) & (padding < max_blocks)
    nothing = tl.zeros([MAX_BLOCKS_PADDED], tl.int32)
    tl.store(tl.multiple_of(block_ptr + padding, 4), nothing - 1, mask=is_padding)
    tl.store(tl.multiple_of(block_start_ptr + padding, 4), nothing, mask=is_padding)
    tl.store(tl.multiple_of(block_length_ptr + padding, 4), nothing, mask=is_padding)
    return tl.sum(fits.to(tl.int32), axis=0), all_tokens, all_blocks


@triton.jit
def select_kernel(
    score_ptr, size_ptr, start_ptr, first_block_ptr, hint_ptr, chosen_ptr, block_ptr, block_start_ptr, block_length_ptr,
    list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
    BLOCK_SIZE: tl.constexpr, MAX_BLOCKS_PADDED: tl.constexpr, LIMIT: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_REST: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr,
    HAS_HINTS: tl.constexpr,
):  # fmt: skip
    select_row(
        score_ptr, size_ptr, start_ptr, first_block_ptr, hint_ptr, chosen_ptr, block_ptr, block_start_ptr,
        block_length_ptr, list_ptr, count_ptr, clusters, wanted, token_budget, max_blocks,
        BLOCK_SIZE, MAX_BLOCKS_PADDED, LIMIT, CHUNKS, COLUMNS, HAS_REST, PIECES, PIECES_PADDED, HAS_HINTS,
    )  # fmt: skip


def select_clusters(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    hints: torch.Tensor | None = None,
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
        hints: ``[rows]`` int32 where to begin the search for a threshold, updated in place for the next step. Anything
            at first; it changes time, never the selection.
        token_budget: Most tokens a row may take.
        max_blocks: Most blocks a row may take; the length of the lists.
        block_size: Tokens a block.
    """
    budget = {"token_budget": token_budget, "max_blocks": max_blocks, "block_size": block_size}
    if not use_triton(scores):
        return select_clusters_reference(scores, sizes, starts, first_blocks, **budget)
    selection, arguments, constants = prepare_selection(scores, sizes, starts, first_blocks, hints, **budget)
    select_kernel[(scores.shape[0],)](*arguments, **constants, num_warps=NUM_WARPS)
    return selection


def prepare_selection(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    hints: torch.Tensor | None,
    *,
    token_budget: int,
    max_blocks: int,
    block_size: int,
) -> tuple[Selection, list, dict[str, int]]:
    """Everything before the launch of :func:`select_row`: outputs, the first pass over long rows, and its arguments."""
    check_contiguous(scores=scores, sizes=sizes, starts=starts, first_blocks=first_blocks, hints=hints)
    rows, clusters = scores.shape
    wanted = min(token_budget, max_blocks)
    limit = max(16, min(triton.next_power_of_2(wanted + wanted // 4), triton.next_power_of_2(clusters)))
    chunks, columns, has_rest = _row_shape(clusters)
    pieces = 1
    if clusters > ROW_TILE:
        tile = max(PIECE_TILE, 2 * limit, triton.next_power_of_2(triton.cdiv(clusters * limit, ROW_TILE)))
        pieces = triton.cdiv(clusters, tile)
        columns = min(LEAST_COLUMNS, tile)
        chunks, has_rest = tile // columns, False
    chosen = torch.empty(rows, clusters, dtype=torch.bool, device=scores.device)
    blocks, block_starts, block_lengths = torch.empty(3, rows, max_blocks, dtype=torch.int32, device=scores.device)
    lists = torch.empty(rows, pieces + (pieces > 1), limit, dtype=torch.int64, device=scores.device)
    counts = None
    if pieces > 1:
        counts = torch.empty(rows, pieces, dtype=torch.int32, device=scores.device)
        narrow_kernel[(pieces, rows)](
            scores, chosen.view(torch.uint8), lists, counts, clusters, wanted,
            LIMIT=limit, CHUNKS=chunks, COLUMNS=columns, num_warps=NUM_WARPS,
        )  # fmt: skip
    arguments = [
        scores, sizes, starts, first_blocks, hints, chosen.view(torch.uint8), blocks, block_starts, block_lengths,
        lists, counts, clusters, wanted, token_budget, max_blocks,
    ]  # fmt: skip
    constants = {
        "BLOCK_SIZE": block_size,
        "MAX_BLOCKS_PADDED": triton.next_power_of_2(max_blocks),
        "LIMIT": limit,
        "CHUNKS": chunks,
        "COLUMNS": columns,
        "HAS_REST": has_rest,
        "PIECES": pieces,
        "PIECES_PADDED": triton.next_power_of_2(pieces),
        "HAS_HINTS": hints is not None,
    }
    return Selection(chosen, blocks, block_starts, block_lengths), arguments, constants


def _row_shape(clusters: int) -> tuple[int, int, bool]:
    """A row as chunks × columns, and whether as many columns again take the rest."""
    main = 1 << (max(16, clusters).bit_length() - 1)
    rest = clusters - main
    columns = min(main, max(LEAST_COLUMNS, triton.next_power_of_2(rest) if rest > 0 else 0))
    return main // columns, columns, rest > 0


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

    ends = (cluster_blocks.gather(1, order) * fits).cumsum(1)
    place = torch.arange(max_blocks, device=scores.device).expand(scores.shape[0], -1).contiguous()
    rank = torch.searchsorted(ends, place, right=True).clamp(max=scores.shape[1] - 1)
    cluster = order.gather(1, rank)
    within = place - ends.gather(1, rank) + cluster_blocks.gather(1, cluster)
    is_padding = place >= ends[:, -1:]
    offset = within * block_size
    length = (sizes.gather(1, cluster) - offset).clamp(max=block_size).masked_fill(is_padding, 0)
    blocks = (first_blocks.gather(1, cluster) + within).masked_fill(is_padding, -1)
    start = (starts.gather(1, cluster) + offset).masked_fill(is_padding, 0)
    return Selection(chosen, blocks.int(), start.int(), length.int())
