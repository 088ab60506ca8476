"""Centroid scores: how much attention a cluster is likely to receive.

For a query q and a cluster of n keys with mean μ and per-channel variance v,

    mean over the cluster of exp(scale·q·k)  ≈  exp(scale·q·μ + ½·scale²·Σ_d q_d²·v_d).

``spread`` is the share of the second-order term that is used (one half beats both none and all of it, DESIGN.md
"Spread"). The score that ranks clusters is the maximum over the query heads that share a KV head; the logit that weighs
the estimate is per query head, with the second-order term bounded by ``spread_limit``.

An int8 index is multiplied as it lies in memory, by int8 tensor cores: the query goes in two int8 digits, each a column
of the product, so that q_d is right to 1/64516 of the largest |q_d|. That is 250 times finer than the index itself.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. A tile of 64 clusters × 128 channels is 8 KiB of int8 for the means and as much for the variances; a program
# goes through several with NUM_STAGES of them in flight: 4 programs fit a multiprocessor of 132.
TILE_ELEMENTS = 64 * 128
PROGRAMS = 528
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit
def _digits(x, digit):
    """Rows of ``x`` as x ≈ unit · (first + second / 254); a row gives the digit that ``digit`` (0 or 1) asks for."""
    unit = tl.maximum(tl.max(tl.abs(x), axis=1), 1.0e-30) / 127.0
    x = x / unit[:, None]
    first = tl.floor(x + 0.5)
    second = tl.floor((x - first) * 254.0 + 0.5)
    return tl.where(digit[:, None] == 0, first, second).to(tl.int8), unit


@triton.jit
def _join_digits(product, unit, TILE: tl.constexpr, HEADS: tl.constexpr):
    """``[TILE, 2 · HEADS]`` int32 products of the digits to ``[TILE, HEADS]`` float32."""
    first, second = tl.split(tl.reshape(product.to(tl.float32), [TILE, HEADS, 2]))
    unit, _ = tl.split(tl.reshape(unit, [HEADS, 2]))
    return (first + second * (1.0 / 254.0)) * unit[None, :]


@triton.jit
def score_kernel(
    query_ptr, centroid_ptr, centroid_scale_ptr, variance_ptr, variance_scale_ptr, size_ptr, logit_ptr, score_ptr,
    clusters, scale, softcap, second_order, spread_limit, tiles,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_VARIANCE: tl.constexpr, IN_DIGITS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """A share of the ``tiles`` of one row; clusters × heads: the large operand streams, the query stays."""
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    in_group = head < GROUP
    centroid_ptr += row * clusters * HEAD_DIM
    centroid_scale_ptr += row * clusters
    if HAS_VARIANCE:
        variance_ptr += row * clusters * HEAD_DIM
        variance_scale_ptr += row * clusters
    size_ptr += row * clusters
    score_ptr += row * clusters
    logit_ptr += row * GROUP * clusters

    column = tl.arange(0, 2 * GROUP_PADDED if IN_DIGITS else GROUP_PADDED)
    digit = column % 2
    of_head = column // 2 if IN_DIGITS else column
    query_at = query_ptr + (row * GROUP + of_head[:, None]) * HEAD_DIM + dim[None, :]
    query = tl.load(query_at, mask=(of_head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    scaled = query.to(tl.float32) * scale  # squares are of the scaled query, so that fp16 holds them
    square = scaled * scaled
    if IN_DIGITS:
        query, unit = _digits(scaled, digit)
        square, square_unit = _digits(square, digit)
    else:
        # The square goes in two parts, so that half precision loses nothing of it.
        if centroid_ptr.dtype.element_ty == tl.float32:
            query = query.to(tl.float32)
        high = square.to(query.dtype)
        low = (square - high.to(tl.float32)).to(query.dtype)

    piece, pieces = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(piece * tiles // pieces, (piece + 1) * tiles // pieces, num_stages=NUM_STAGES):
        cluster = tile * TILE + tl.arange(0, TILE)
        in_row = cluster < clusters
        vector = cluster[:, None] * HEAD_DIM + dim[None, :]
        vector_mask = in_row[:, None] & (dim < HEAD_DIM)[None, :]
        exists = tl.load(size_ptr + cluster, mask=in_row, other=0) > 0
        centroid_scale = tl.load(centroid_scale_ptr + cluster, mask=in_row, other=0.0)
        centroid = tl.load(centroid_ptr + vector, mask=vector_mask, other=0)
        if HAS_VARIANCE:
            variance_scale = tl.load(variance_scale_ptr + cluster, mask=in_row, other=0.0)
            variance = tl.load(variance_ptr + vector, mask=vector_mask, other=0)
        if IN_DIGITS:
            logits = _join_digits(tl.dot(centroid, tl.trans(query)), unit, TILE, GROUP_PADDED)
            logits = logits * centroid_scale[:, None]
        else:
            logits = tl.dot(centroid.to(query.dtype), tl.trans(query), input_precision="ieee")
            logits = logits * (centroid_scale * scale)[:, None]
        if HAS_SOFTCAP:
            logits = softcap * (2.0 * tl.sigmoid(logits * (2.0 / softcap)) - 1.0)  # tanh
        ranking = logits
        if HAS_VARIANCE:
            if IN_DIGITS:
                second = _join_digits(tl.dot(variance, tl.trans(square)), square_unit, TILE, GROUP_PADDED)
            else:
                second = tl.dot(variance.to(query.dtype), tl.trans(high), input_precision="ieee")
                if query.dtype != tl.float32:
                    second = tl.dot(variance.to(query.dtype), tl.trans(low), second, input_precision="ieee")
            second = second * (variance_scale * second_order)[:, None]
            ranking = logits + second
            logits = logits + tl.minimum(second, spread_limit)
        ranking = tl.where(in_group[None, :] & exists[:, None], ranking, float("-inf"))
        tl.store(score_ptr + cluster, tl.max(ranking, axis=1), mask=in_row)
        logit_at = logit_ptr + head[None, :] * clusters + cluster[:, None]
        tl.store(logit_at, tl.where(exists[:, None], logits, 0.0), mask=in_group[None, :] & in_row[:, None])


def score_clusters(
    query: torch.Tensor,
    centroids: torch.Tensor,
    centroid_scales: torch.Tensor,
    variances: torch.Tensor | None,
    variance_scales: torch.Tensor | None,
    sizes: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    spread: float = 0.5,
    spread_limit: float = 1.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score every cluster against every query head.

    Args:
        query: ``[rows, group, head_dim]``; a row is one KV head of one sequence, its group the query heads sharing it.
        centroids: ``[rows, clusters, head_dim]``, int8 or floating; times ``centroid_scales`` the mean key.
        centroid_scales: ``[rows, clusters]`` float32.
        variances: ``[rows, clusters, head_dim]`` or ``None`` for no second-order term.
        variance_scales: ``[rows, clusters]`` float32, with ``variances``.
        sizes: ``[rows, clusters]`` int32 tokens a cluster; 0 marks a cluster that does not exist.
        scale: Factor of q·k (usually ``head_dim ** -0.5``).
        softcap: ``softcap · tanh(x / softcap)`` is applied to the first-order logit when given.

    Returns:
        ``logits`` ``[rows, group, clusters]`` float32, the log-weight of one token of the cluster, and ``scores``
        ``[rows, clusters]`` float32, the ranking. Where no cluster exists they are 0 and -inf, whatever is stored.
    """
    if not use_triton(query):
        return score_clusters_reference(
            query, centroids, centroid_scales, variances, variance_scales, sizes,
            scale=scale, softcap=softcap, spread=spread, spread_limit=spread_limit,
        )  # fmt: skip
    check_contiguous(
        query=query, centroids=centroids, centroid_scales=centroid_scales, variances=variances,
        variance_scales=variance_scales, sizes=sizes,
    )  # fmt: skip
    rows, group, head_dim = query.shape
    clusters = sizes.shape[1]
    dim_padded = max(32, triton.next_power_of_2(head_dim))
    # Without half precision there are no tensor cores: products come from registers, of smaller tiles. Those of int8
    # take 64 clusters at once straight from shared memory.
    in_digits = query.dtype != torch.float32 and centroids.dtype == torch.int8
    is_float32 = torch.float32 in (query.dtype, centroids.dtype)
    tile = max(64 if in_digits else 16, TILE_ELEMENTS // dim_padded // (4 if is_float32 else 1))
    tiles = triton.cdiv(clusters, tile)
    logits = torch.empty(rows, group, clusters, dtype=torch.float32, device=query.device)
    scores = torch.empty(rows, clusters, dtype=torch.float32, device=query.device)
    score_kernel[(max(1, min(PROGRAMS // rows, tiles)), rows)](
        query, centroids, centroid_scales, variances, variance_scales, sizes, logits, scores,
        clusters, scale, softcap or 1.0, 0.5 * spread, spread_limit, tiles,
        GROUP=group, GROUP_PADDED=max(8 if in_digits else 16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, TILE=tile, HAS_SOFTCAP=softcap is not None,
        HAS_VARIANCE=variances is not None, IN_DIGITS=in_digits, NUM_STAGES=NUM_STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logits, scores


def score_clusters_reference(
    query, centroids, centroid_scales, variances, variance_scales, sizes, *, scale, softcap, spread, spread_limit
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, in float32."""
    q = query.float()
    exists = sizes > 0
    logits = torch.matmul(q, centroids.float().transpose(1, 2)) * (centroid_scales[:, None] * scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ranking = logits
    if variances is not None:
        second = torch.matmul(q * q, variances.float().transpose(1, 2)) * variance_scales[:, None]
        second = second * (0.5 * spread * scale * scale)
        ranking = logits + second
        logits = logits + second.clamp(max=spread_limit)
    scores = ranking.amax(1).masked_fill(~exists, float("-inf"))
    return logits.masked_fill(~exists[:, None], 0), scores
