"""Sparse decode attention: sinks and window, the selected clusters, and the estimate of everything else.

A cluster that is not attended counts as ``size`` tokens of logit ``logits`` and its mean value:

          Σ_attended exp(s_i)·v_i + Σ_rest size_c·exp(l_c)·v̄_c
    out = ─────────────────────────────────────────────────────────
          Σ_attended exp(s_i) + Σ_rest size_c·exp(l_c) + exp(sink)

computed in pieces merged by log-sum-exp. ``attention_sinks`` are gpt-oss's learned logits: weight without value.

On the GPU a row's tiles (of blocks, then of sinks and window, then of clusters) are cut into runs of equal length, a
program each (split over the sequence as in Flash-Decoding). A tile of 64 tokens gathers 8 blocks: the matrix products
are full although a block has 8 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. A tile of tokens is 32 KiB (64 of them at head_dim 128 in bf16), one of int8 mean values 8 KiB (64 clusters).
# With 4 warps and 168 registers three programs fit a multiprocessor of 132: one wave of programs, and each streams
# several tiles (984 programs of one tile each took 24 µs on an H200, where these bytes take 4.5).
TILE_BYTES = 32768
ESTIMATE_TILE_BYTES = 8192
PROGRAMS = 396
MAX_PIECES = 128
NUM_WARPS = 4
NUM_STAGES = 3
MERGE_DIMS = 32
MERGE_WARPS = 4


class Recent(NamedTuple):
    """Sinks and window of a layer, in one buffer.

    Attributes:
        tokens: ``[rows, sink_capacity + window_capacity, width]`` sinks first; a token is its key and value in a row.
        num_sinks: ``[rows]`` int32 sinks present.
        window_start: ``[rows]`` int32 first valid place of the window (left padding before it).
        window_length: ``[1]`` int32 places of the window in use.
        sink_capacity: Places for sinks.
    """

    tokens: torch.Tensor
    num_sinks: torch.Tensor
    window_start: torch.Tensor
    window_length: torch.Tensor
    sink_capacity: int


class Attended(NamedTuple):
    """The selected clusters as blocks in the GPU cluster cache.

    Attributes:
        cache: ``[rows, slots, block_size, width]``.
        slots: ``[rows, max_blocks]`` int32, -1 in the padding.
        lengths: ``[rows, max_blocks]`` int32, 0 in the padding.
    """

    cache: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


class Estimated(NamedTuple):
    """The clusters of the index, of which those not chosen are estimated.

    Attributes:
        logits: ``[rows, group, clusters]`` float32 log-weight of one token.
        sizes: ``[rows, clusters]`` int32.
        chosen: ``[rows, clusters]`` bool, attended exactly.
        mean_values: ``[rows, clusters, value_dim]`` int8 or floating.
        value_scales: ``[rows, clusters]`` float32.
    """

    logits: torch.Tensor
    sizes: torch.Tensor
    chosen: torch.Tensor
    mean_values: torch.Tensor
    value_scales: torch.Tensor


@triton.jit
def _add_tile(logits, values, sizes, value_scales, maximum, sums, out, IS_ESTIMATE: tl.constexpr):
    """Online softmax; ``logits`` and ``sums`` ``[heads, tile]``, base 2, -inf for no token; values ``[tile, dim]``."""
    new_maximum = tl.maximum(maximum, tl.max(logits, axis=1))
    decay = tl.exp2(maximum - new_maximum)[:, None]
    weights = tl.exp2(logits - new_maximum[:, None])
    if IS_ESTIMATE:
        # Scales go into the weights, one product a cluster; relative to the largest, so that fp16 holds them. The
        # largest goes into the values: a factor that was reduced also keeps the conversion of int8 with the load, where
        # it takes whole words (left to itself the compiler reads the tile byte by byte in the order of the product).
        weights = weights * sizes.to(tl.float32)[None, :]
        sums = sums * decay + weights
        largest = tl.maximum(tl.max(value_scales, axis=0), 6.2e-5).to(values.dtype)
        weights = weights * (value_scales / largest.to(tl.float32))[None, :]
        values = values * largest
    else:
        sums = sums * decay + weights
    out = tl.dot(weights.to(values.dtype), values, out * decay, input_precision="ieee")
    return new_maximum, sums, out


@triton.jit
def _add_tokens(
    query, token_ptr, valid, maximum, sums, out, scale, softcap,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to a tile of tokens: ``token_ptr`` ``[tile]`` points at their keys, values beside them."""
    key_dim = tl.arange(0, KEY_PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    key_mask = valid[:, None] & (key_dim < KEY_DIM)[None, :]
    value_mask = valid[:, None] & (value_dim < VALUE_DIM)[None, :]
    keys = tl.load(token_ptr[:, None] + key_dim[None, :], mask=key_mask, other=0.0)
    values = tl.load(token_ptr[:, None] + (KEY_DIM + value_dim)[None, :], mask=value_mask, other=0.0)
    logits = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(logits * (2.0 / softcap)) - 1.0)  # tanh
    logits = tl.where(valid[None, :], logits * 1.4426950408889634, float("-inf"))
    return _add_tile(logits, values, None, None, maximum, sums, out, IS_ESTIMATE=False)


@triton.jit
def attend_kernel(
    query_ptr, recent_ptr, num_sinks_ptr, window_start_ptr, window_length_ptr, cache_ptr, slot_ptr, length_ptr,
    logit_ptr, size_ptr, chosen_ptr, mean_ptr, mean_scale_ptr, out_ptr, lse_ptr,
    recent_capacity, sink_capacity, num_slots, max_blocks, clusters, scale, softcap,
    block_tiles, recent_tiles, tiles,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    CLUSTER_TILE: tl.constexpr, HAS_ATTENDED: tl.constexpr, HAS_ESTIMATED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One piece of one row: its share of the row's ``tiles``, which are of blocks, then recent, then of clusters."""
    row = tl.program_id(1).to(tl.int64)
    piece, pieces = tl.program_id(0), tl.num_programs(0)
    head = tl.arange(0, GROUP_PADDED)
    in_group = head < GROUP
    key_dim = tl.arange(0, KEY_PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    width: tl.constexpr = KEY_DIM + VALUE_DIM
    query_at = query_ptr + (row * GROUP + head[:, None]) * KEY_DIM + key_dim[None, :]
    query = tl.load(query_at, mask=in_group[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)
    maximum = tl.full([GROUP_PADDED], -1.0e30, tl.float32)  # finite, so that no difference is NaN
    sums = tl.zeros([GROUP_PADDED, TILE], tl.float32)  # summed up at the end: no reduction a tile
    out = tl.zeros([GROUP_PADDED, VALUE_PADDED], tl.float32)
    first, last = piece * tiles // pieces, (piece + 1) * tiles // pieces

    if HAS_ATTENDED:
        slot_ptr += row * max_blocks
        length_ptr += row * max_blocks
        cache_ptr += row * num_slots * (BLOCK_SIZE * width)
        for tile in tl.range(first, tl.minimum(last, block_tiles), num_stages=NUM_STAGES):
            token = tile * TILE + tl.arange(0, TILE)
            block = token // BLOCK_SIZE
            length = tl.load(length_ptr + block, mask=block < max_blocks, other=0)
            slot = tl.load(slot_ptr + block, mask=block < max_blocks, other=0)
            place = slot * BLOCK_SIZE + token % BLOCK_SIZE
            maximum, sums, out = _add_tokens(
                query, cache_ptr + place * width, token % BLOCK_SIZE < length, maximum, sums, out, scale, softcap,
                KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, HAS_SOFTCAP,
            )  # fmt: skip

    num_sinks = tl.load(num_sinks_ptr + row)
    window_start = sink_capacity + tl.maximum(tl.load(window_start_ptr + row), 0)
    window_end = tl.minimum(sink_capacity + tl.load(window_length_ptr), recent_capacity)
    recent_end = tl.where(window_start < window_end, window_end, num_sinks)
    recent_ptr += row * recent_capacity * width
    last_recent = tl.minimum(last - block_tiles, tl.cdiv(recent_end, TILE))
    for tile in tl.range(tl.maximum(first - block_tiles, 0), last_recent, num_stages=NUM_STAGES):
        token = tile * TILE + tl.arange(0, TILE)
        is_sink = (token < num_sinks) & (token < sink_capacity)
        valid = is_sink | ((token >= window_start) & (token < window_end))
        maximum, sums, out = _add_tokens(
            query, recent_ptr + token * width, valid, maximum, sums, out, scale, softcap,
            KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, HAS_SOFTCAP,
        )  # fmt: skip

    total = tl.sum(sums, axis=1)
    if HAS_ESTIMATED:
        size_ptr += row * clusters
        chosen_ptr += row * clusters
        logit_ptr += row * GROUP * clusters
        mean_ptr += row * clusters * VALUE_DIM
        mean_scale_ptr += row * clusters
        sums = tl.where((tl.arange(0, CLUSTER_TILE) == 0)[None, :], total[:, None], 0.0)
        before = block_tiles + recent_tiles
        for tile in tl.range(tl.maximum(first - before, 0), last - before, num_stages=NUM_STAGES):
            cluster = tile * CLUSTER_TILE + tl.arange(0, CLUSTER_TILE)
            in_row = cluster < clusters
            size = tl.load(size_ptr + cluster, mask=in_row, other=0)
            chosen = tl.load(chosen_ptr + cluster, mask=in_row, other=1)
            valid = (size > 0) & (chosen == 0)
            logit_at = logit_ptr + head[:, None] * clusters + cluster[None, :]
            logits = tl.load(logit_at, mask=in_group[:, None] & in_row[None, :], other=0.0)
            logits = tl.where(valid[None, :], logits * 1.4426950408889634, float("-inf"))
            is_number = in_row if mean_ptr.dtype.element_ty == tl.int8 else valid
            mean_mask = is_number[:, None] & (value_dim < VALUE_DIM)[None, :]
            mean = tl.load(mean_ptr + cluster[:, None] * VALUE_DIM + value_dim[None, :], mask=mean_mask, other=0)
            mean_scale = tl.load(mean_scale_ptr + cluster, mask=in_row, other=0.0)
            mean_scale = tl.where(valid, mean_scale, 0.0)
            if mean.dtype != tl.float32:
                mean = mean.to(query_ptr.dtype.element_ty)
            maximum, sums, out = _add_tile(logits, mean, size, mean_scale, maximum, sums, out, IS_ESTIMATE=True)
        total = tl.sum(sums, axis=1)

    piece_at = (row * pieces + piece) * GROUP + head
    is_something = in_group & (total > 0)  # a piece of nothing leaves its output unwritten
    total = tl.where(is_something, total, 1.0)
    lse = tl.where(is_something, maximum + tl.log2(total), float("-inf"))
    tl.store(lse_ptr + piece_at, lse, mask=in_group)
    out_mask = is_something[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(out_ptr + piece_at[:, None] * VALUE_DIM + value_dim[None, :], out / total[:, None], mask=out_mask)


@triton.jit
def merge_kernel(
    piece_ptr, lse_ptr, sink_ptr, out_ptr, pieces,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, PIECES_PADDED: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one query head by log-sum-exp (base 2), a few channels a program."""
    row_head = tl.program_id(0).to(tl.int64)
    row, head = row_head // GROUP, row_head % GROUP
    piece = tl.arange(0, PIECES_PADDED)
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    place = (row * pieces + piece) * GROUP + head
    lse = tl.load(lse_ptr + place, mask=piece < pieces, other=float("-inf"))
    mask = (lse > float("-inf"))[:, None] & (dim < VALUE_DIM)[None, :]
    outs = tl.load(piece_ptr + place[:, None] * VALUE_DIM + dim[None, :], mask=mask, other=0.0)
    maximum = tl.max(lse, axis=0)
    if HAS_SINK:
        sink = tl.load(sink_ptr + row_head) * 1.4426950408889634
        maximum = tl.maximum(maximum, sink)
    weights = tl.exp2(lse - maximum)
    total = tl.sum(weights, axis=0)
    if HAS_SINK:
        total += tl.exp2(sink - maximum)
    out = tl.sum(outs * weights[:, None], axis=0) / total
    tl.store(out_ptr + row_head * VALUE_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < VALUE_DIM)


def attend(
    query: torch.Tensor,
    recent: Recent,
    attended: Attended | None,
    estimated: Estimated | None,
    *,
    scale: float,
    softcap: float | None = None,
    attention_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per row group.

    Args:
        query: ``[rows, group, head_dim]``.
        recent: Sinks and window.
        attended: Selected clusters, or ``None`` when nothing is clustered.
        estimated: The index, or ``None`` for no estimate.
        scale: Factor of q·k.
        softcap: Bound of the logits by tanh, when given.
        attention_sinks: ``[rows, group]`` float32 learned logits, when given.

    Returns:
        ``[rows, group, value_dim]`` in the query's dtype.
    """
    if not use_triton(query):
        return attend_reference(
            query, recent, attended, estimated, scale=scale, softcap=softcap, attention_sinks=attention_sinks
        )
    check_contiguous(query=query, attention_sinks=attention_sinks, tokens=recent.tokens)
    rows, group, key_dim = query.shape
    value_dim = recent.tokens.shape[2] - key_dim
    key_padded, value_padded = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    tile = _tile(TILE_BYTES, 2 * max(key_padded, value_padded) * query.element_size())
    cache = slots = lengths = logits = sizes = chosen = means = mean_scales = None
    num_slots = max_blocks = clusters = cluster_tile = 0
    block_size = 1
    if attended is not None:
        cache, slots, lengths = attended
        check_contiguous(cache=cache, slots=slots, lengths=lengths)
        num_slots, block_size, max_blocks = cache.shape[1], cache.shape[2], slots.shape[1]
    if estimated is not None:
        logits, sizes, chosen, means, mean_scales = estimated
        check_contiguous(logits=logits, sizes=sizes, chosen=chosen, mean_values=means, value_scales=mean_scales)
        clusters, chosen = sizes.shape[1], chosen.view(torch.uint8)
        cluster_tile = _tile(ESTIMATE_TILE_BYTES, value_padded * means.element_size())

    block_tiles = triton.cdiv(max_blocks * block_size, tile)
    recent_tiles = triton.cdiv(recent.tokens.shape[1], tile)
    tiles = block_tiles + recent_tiles + triton.cdiv(clusters, max(1, cluster_tile))
    pieces = max(1, min(PROGRAMS // rows, MAX_PIECES, tiles))
    parts = torch.empty(rows, pieces, group, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, pieces, group, dtype=torch.float32, device=query.device)
    out = torch.empty(rows, group, value_dim, dtype=query.dtype, device=query.device)
    attend_kernel[(pieces, rows)](
        query, recent.tokens, recent.num_sinks, recent.window_start, recent.window_length, cache, slots, lengths,
        logits, sizes, chosen, means, mean_scales, parts, lse,
        recent.tokens.shape[1], recent.sink_capacity, num_slots, max_blocks, clusters, scale, softcap or 1.0,
        block_tiles, recent_tiles, tiles,
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)), KEY_DIM=key_dim, KEY_PADDED=key_padded,
        VALUE_DIM=value_dim, VALUE_PADDED=value_padded, BLOCK_SIZE=block_size, TILE=tile,
        CLUSTER_TILE=max(16, cluster_tile), HAS_ATTENDED=attended is not None, HAS_ESTIMATED=estimated is not None,
        HAS_SOFTCAP=softcap is not None, NUM_STAGES=NUM_STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
    merge_kernel[(rows * group, triton.cdiv(value_dim, MERGE_DIMS))](
        parts, lse, attention_sinks, out, pieces,
        GROUP=group, VALUE_DIM=value_dim, DIMS=MERGE_DIMS, PIECES_PADDED=triton.next_power_of_2(pieces),
        HAS_SINK=attention_sinks is not None, num_warps=MERGE_WARPS,
    )  # fmt: skip
    return out


def _tile(tile_bytes: int, item_bytes: int) -> int:
    """Items of a tile, a power of two of at least 16 because tl.dot takes no fewer."""
    return max(16, tile_bytes // item_bytes)


def attend_reference(query, recent, attended, estimated, *, scale, softcap=None, attention_sinks=None) -> torch.Tensor:
    """The same in plain torch and float32, in one softmax."""
    q, head_dim = query.float(), query.shape[-1]
    tokens, valid = recent.tokens, _recent_mask(recent)
    if attended is not None:
        tokens, valid = _append_blocks(tokens, valid, attended)
    tokens = torch.where(valid[..., None], tokens, 0).float()  # what is not valid may be anything, NaN too
    keys, values = tokens[..., :head_dim], tokens[..., head_dim:]
    logits = torch.matmul(q, keys.transpose(1, 2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    if estimated is not None:
        rest = (estimated.sizes > 0) & ~estimated.chosen
        weight = estimated.logits + estimated.sizes.clamp(min=1).float().log()[:, None]
        logits = torch.cat([logits, weight.masked_fill(~rest[:, None], float("-inf"))], dim=2)
        means = estimated.mean_values.float() * estimated.value_scales[..., None]
        values = torch.cat([values, torch.where(rest[..., None], means, 0)], dim=1)
    if attention_sinks is not None:
        logits = torch.cat([logits, attention_sinks.float()[..., None]], dim=2)
        values = torch.cat([values, values.new_zeros(values.shape[0], 1, values.shape[2])], dim=1)
    return torch.matmul(torch.softmax(logits, dim=2), values).to(query.dtype)


def _recent_mask(recent: Recent) -> torch.Tensor:
    place = torch.arange(recent.tokens.shape[1], device=recent.tokens.device)[None]
    in_window = place - recent.sink_capacity
    is_sink = (in_window < 0) & (place < recent.num_sinks[:, None])
    from_start = (in_window >= 0) & (in_window >= recent.window_start[:, None])
    return is_sink | (from_start & (in_window < recent.window_length))


def _append_blocks(tokens, valid, attended: Attended):
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    blocks = attended.cache[row, attended.slots.clamp(min=0).long()]
    inside = torch.arange(blocks.shape[2], device=tokens.device)
    block_valid = inside < attended.lengths[..., None]
    return torch.cat([tokens, blocks.flatten(1, 2)], 1), torch.cat([valid, block_valid.flatten(1, 2)], 1)
