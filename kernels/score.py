"""Centroid scores: how much attention a cluster is likely to receive.

For a query q and a cluster of n keys with mean μ and per-channel variance v,

    mean over the cluster of exp(scale·q·k)  ≈  exp(scale·q·μ + ½·scale²·Σ_d q_d²·v_d).

``spread`` is the share of the second-order term that is used (one half beats both none and all of it, DESIGN.md
"Spread"). The score that ranks clusters is the maximum over the query heads that share a KV head; the logit that weighs
the estimate is per query head, with the second-order term bounded by ``spread_limit``.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. A tile of 64 clusters × 128 channels is 8 KiB of int8 for the means and as much for the variances: 8 rows
# × 8192 clusters are 1024 programs with 16 KiB each in flight.
TILE_ELEMENTS = 64 * 128
NUM_WARPS = 4
# Whether a program looks at the sizes of its tile before it loads the rest: saves the bytes of spare capacity (at most
# 512 clusters) and costs every other program a second round trip to memory before its first useful byte.
SKIP_EMPTY = False


@triton.jit
def score_kernel(
    query_ptr, centroid_ptr, centroid_scale_ptr, variance_ptr, variance_scale_ptr, size_ptr, logit_ptr, score_ptr,
    clusters, scale, softcap, second_order, spread_limit,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_VARIANCE: tl.constexpr, SKIP_EMPTY: tl.constexpr,
):  # fmt: skip
    """One tile of clusters of one row; clusters × heads, so that the large operand streams and the query stays."""
    row = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head = tl.arange(0, GROUP_PADDED)
    dim = tl.arange(0, DIM_PADDED)
    in_row, in_group, in_dim = cluster < clusters, head < GROUP, dim < HEAD_DIM
    place = row * clusters + cluster
    logit_at = logit_ptr + (row * GROUP + head[None, :]) * clusters + cluster[:, None]
    logit_mask = in_group[None, :] & in_row[:, None]

    exists = tl.load(size_ptr + place, mask=in_row, other=0) > 0
    if SKIP_EMPTY:  # noqa: SIM102  a compile-time condition
        if tl.max(exists.to(tl.int32), axis=0) == 0:
            tl.store(score_ptr + place, tl.full([TILE], float("-inf"), tl.float32), mask=in_row)
            tl.store(logit_at, tl.zeros([TILE, GROUP_PADDED], tl.float32), mask=logit_mask)
            return

    vector = place[:, None] * HEAD_DIM + dim[None, :]
    vector_mask = in_row[:, None] & in_dim[None, :]
    centroid = tl.load(centroid_ptr + vector, mask=vector_mask, other=0)
    if HAS_VARIANCE:
        variance = tl.load(variance_ptr + vector, mask=vector_mask, other=0)
        variance_scale = tl.load(variance_scale_ptr + place, mask=in_row, other=0.0)
    centroid_scale = tl.load(centroid_scale_ptr + place, mask=in_row, other=0.0)
    query_at = query_ptr + (row * GROUP + head[None, :]) * HEAD_DIM + dim[:, None]
    query = tl.load(query_at, mask=in_group[None, :] & in_dim[:, None], other=0.0)
    if centroid_ptr.dtype.element_ty == tl.float32:
        query = query.to(tl.float32)

    logits = tl.dot(centroid.to(query.dtype), query, input_precision="ieee") * (centroid_scale * scale)[:, None]
    if HAS_SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(logits * (2.0 / softcap)) - 1.0)  # tanh
    ranking = logits
    if HAS_VARIANCE:
        # The square goes in two parts, so that half precision loses nothing of it, and scaled, so that fp16 holds it.
        scaled = query.to(tl.float32) * scale
        square = scaled * scaled
        high = square.to(query.dtype)
        factor = variance.to(query.dtype)
        second = tl.dot(factor, high, input_precision="ieee")
        if query.dtype != tl.float32:
            low = (square - high.to(tl.float32)).to(query.dtype)
            second = tl.dot(factor, low, second, input_precision="ieee")
        second = second * (variance_scale * second_order)[:, None]
        ranking = logits + second
        logits = logits + tl.minimum(second, spread_limit)
    ranking = tl.where(in_group[None, :] & exists[:, None], ranking, float("-inf"))
    tl.store(score_ptr + place, tl.max(ranking, axis=1), mask=in_row)
    tl.store(logit_at, tl.where(exists[:, None], logits, 0.0), mask=logit_mask)


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
    dim_padded = max(16, triton.next_power_of_2(head_dim))
    is_float32 = torch.float32 in (query.dtype, centroids.dtype)  # multiplied without tensor cores, from registers
    tile = max(16, TILE_ELEMENTS // dim_padded // (4 if is_float32 else 1))
    logits = torch.empty(rows, group, clusters, dtype=torch.float32, device=query.device)
    scores = torch.empty(rows, clusters, dtype=torch.float32, device=query.device)
    score_kernel[(triton.cdiv(clusters, tile), rows)](
        query, centroids, centroid_scales, variances, variance_scales, sizes, logits, scores,
        clusters, scale, softcap or 1.0, 0.5 * spread, spread_limit,
        GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, DIM_PADDED=dim_padded, TILE=tile,
        HAS_SOFTCAP=softcap is not None, HAS_VARIANCE=variances is not None, SKIP_EMPTY=SKIP_EMPTY, num_warps=NUM_WARPS,
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
