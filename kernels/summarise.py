"""Moments of clusters whose tokens lie side by side.

For the n tokens of a cluster with keys k and values v:

    centroid = Σ k / n        mean value = Σ v / n        variance = Σ (k - centroid)² / n, per channel

in float32, the variance around the mean in a second pass, which finds the tokens in L1. One program a cluster: 8 rows
of 8192 tokens with head_dim 128 in bf16 are 34 MB read and 8 MB written, 10 µs at 4.3 TB/s.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton
from tiered_kv.kernels.kmeans import sum_by_cluster_reference

# Untuned guesses: tokens read at once; a cluster has 13 on average at 640 pieces of 8192 tokens.
SUMMARISE_TOKENS = 16
SUMMARISE_WARPS = 2


@triton.jit
def _summarise_kernel(
    tokens, offsets, sizes, centroids, mean_values, variances, num_clusters, row_stride, token_stride,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    cluster = tl.program_id(1).to(tl.int64) * num_clusters + tl.program_id(0)
    size = tl.load(sizes + cluster)
    first = tl.program_id(1).to(tl.int64) * row_stride + tl.load(offsets + cluster).to(tl.int64) * token_stride
    member, k, v = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    keys = tokens + first + k[None, :]
    values = tokens + first + HEAD_DIM + v[None, :]
    divisor = tl.maximum(size, 1).to(tl.float32)

    key_sum = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    value_sum = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for start in range(0, size, BLOCK_T):
        is_member = (start + member < size)[:, None]
        at = (start + member).to(tl.int64)[:, None] * token_stride
        key_sum += tl.load(keys + at, mask=is_member & (k < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        value_sum += tl.load(values + at, mask=is_member & (v < VALUE_DIM)[None, :], other=0.0).to(tl.float32)
    centroid = tl.sum(key_sum, 0) / divisor
    tl.store(centroids + cluster * HEAD_DIM + k, centroid, mask=k < HEAD_DIM)
    tl.store(mean_values + cluster * VALUE_DIM + v, tl.sum(value_sum, 0) / divisor, mask=v < VALUE_DIM)

    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, size, BLOCK_T):
        mask = (start + member < size)[:, None] & (k < HEAD_DIM)[None, :]
        at = (start + member).to(tl.int64)[:, None] * token_stride
        key = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(mask, key - centroid[None, :], 0.0)
        squares += deviation * deviation
    tl.store(variances + cluster * HEAD_DIM + k, tl.sum(squares, 0) / divisor, mask=k < HEAD_DIM)


def summarise_clusters(
    tokens: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean key, mean value and key variance of every cluster.

    Args:
        tokens: ``[rows, tokens, head_dim + value_dim]`` key and value side by side, in cluster order without gaps.
        offsets: ``[rows, clusters]`` int32 first token of a cluster.
        sizes: ``[rows, clusters]`` int32 tokens of a cluster.
        head_dim: Channels of a key.

    Returns:
        ``centroids`` ``[rows, clusters, head_dim]``, ``mean_values`` ``[rows, clusters, value_dim]`` and ``variances``
        ``[rows, clusters, head_dim]`` (population variance per channel), float32; zero for an empty cluster.
    """
    if not use_triton(tokens):
        return summarise_clusters_reference(tokens, offsets, sizes, head_dim)
    rows, clusters = sizes.shape
    value_dim = tokens.shape[2] - head_dim
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    centroids = torch.empty(rows, clusters, head_dim, dtype=torch.float32, device=tokens.device)
    mean_values = torch.empty(rows, clusters, value_dim, dtype=torch.float32, device=tokens.device)
    variances = torch.empty_like(centroids)
    _summarise_kernel[clusters, rows](
        tokens, offsets.contiguous(), sizes.contiguous(), centroids, mean_values, variances,
        clusters, *tokens.stride()[:2],
        HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_K=triton.next_power_of_2(head_dim), BLOCK_V=triton.next_power_of_2(value_dim), BLOCK_T=SUMMARISE_TOKENS,
        num_warps=SUMMARISE_WARPS,
    )  # fmt: skip
    return centroids, mean_values, variances


def summarise_clusters_reference(
    tokens: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    clusters = sizes.shape[1]
    place = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1).contiguous()
    member_of = torch.searchsorted((offsets + sizes).long(), place, right=True)  # ``clusters`` after the last one
    divisor = sizes.clamp(min=1)[..., None].float()
    means = sum_by_cluster_reference(tokens, member_of, clusters) / divisor
    centroids, mean_values = means[..., :head_dim].contiguous(), means[..., head_dim:].contiguous()
    own_centroid = member_of.clamp(max=clusters - 1)[..., None].expand(-1, -1, head_dim)
    deviation = tokens[..., :head_dim].float() - centroids.gather(1, own_centroid)
    variances = sum_by_cluster_reference(deviation * deviation, member_of, clusters) / divisor
    return centroids, mean_values, variances
