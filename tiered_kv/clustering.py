"""Cluster a segment: group the keys of each KV head that point the same way (ClusterKV, arXiv 2412.03213, section III-B).

Departures from the paper: small clusters of free size (16 tokens on average, cut above a cap) instead of 80; keys are
centred first; segments are clustered one by one, so that the cost is linear in the context; and the same code serves
prompts, decode segments and re-clustering.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import normalize

from tiered_kv.config import TieredKVConfig
from tiered_kv.kernels.kmeans import assign_clusters, sum_by_cluster
from tiered_kv.kernels.pack import pack_tokens


@dataclass(frozen=True)
class ClusteredSegment:
    """A segment in cluster order. Rows are KV heads of sequences; tokens that are not valid come last in no cluster.

    Attributes:
        tokens: ``[rows, tokens, head_dim + value_dim]`` key and value side by side, in cluster order.
        order: ``[rows, tokens]`` int64 place within the segment that each token had.
        sizes: ``[rows, clusters]`` int32, 0 for clusters that do not exist (always the last ones).
        offsets: ``[rows, clusters]`` int32 first token of each cluster within the segment.
        centroids: ``[rows, clusters, head_dim]`` float32 mean key.
        mean_values: ``[rows, clusters, value_dim]`` float32.
        variances: ``[rows, clusters, head_dim]`` float32 population variance of the keys, per channel.
    """

    tokens: torch.Tensor
    order: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    centroids: torch.Tensor
    mean_values: torch.Tensor
    variances: torch.Tensor


def num_clusters(num_tokens: int, config: TieredKVConfig) -> int:
    """Clusters k-means looks for among ``num_tokens`` tokens."""
    return -(-num_tokens // config.tokens_per_cluster)


def max_clusters(num_tokens: int, config: TieredKVConfig) -> int:
    """Clusters a segment can end with: those of k-means, and one more for every ``max_cluster_tokens`` tokens cut off."""
    return num_clusters(num_tokens, config) + num_tokens // config.max_cluster_tokens


def cluster_segment(
    keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, config: TieredKVConfig
) -> ClusteredSegment:
    """Cluster the tokens of a segment, each row on its own.

    Args:
        keys: ``[rows, tokens, head_dim]`` after RoPE.
        values: ``[rows, tokens, value_dim]``.
        valid: ``[rows, tokens]`` bool, the tokens to cluster; ``None`` for all.
        config: Cluster size, cap, iterations, centring.
    """
    clusters, pieces = num_clusters(keys.shape[1], config), max_clusters(keys.shape[1], config)
    assignment = assign_by_direction(keys, valid, clusters, config)
    order, piece = _cut_at_cap(assignment, clusters, config.max_cluster_tokens, pieces)
    tokens = pack_tokens(keys, values, order)
    return _summarise(tokens, order, piece, pieces, keys.shape[2])


def assign_by_direction(
    keys: torch.Tensor, valid: torch.Tensor | None, clusters: int, config: TieredKVConfig
) -> torch.Tensor:
    """Spherical k-means with an evenly spaced start.

    Returns:
        ``[rows, tokens]`` int32 cluster of each token, ``clusters`` for tokens that are not valid.
    """
    directions = _directions(keys, valid, config.center_keys)
    centroids = _evenly_spaced(directions, valid, clusters)
    for _ in range(config.kmeans_iterations):
        sums = sum_by_cluster(directions, _masked(assign_clusters(directions, centroids), valid, clusters), clusters)
        is_empty = (sums == 0).all(2, keepdim=True)
        centroids = torch.where(is_empty, centroids, normalize(sums, dim=2).to(centroids.dtype))
    return _masked(assign_clusters(directions, centroids), valid, clusters)


def _directions(keys: torch.Tensor, valid: torch.Tensor | None, center: bool) -> torch.Tensor:
    """Keys less their mean, of unit length, in the keys' dtype."""
    x = keys.float()
    if center:
        weight = torch.ones_like(x[..., :1]) if valid is None else valid[..., None].float()
        x = x - (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
    return normalize(x, dim=2).to(keys.dtype)


def _evenly_spaced(directions: torch.Tensor, valid: torch.Tensor | None, clusters: int) -> torch.Tensor:
    """Every (tokens / clusters)-th valid token as a first centroid; a row with fewer tokens than clusters repeats some."""
    rows, tokens, dim = directions.shape
    step = torch.arange(clusters, device=directions.device)
    if valid is None:
        return directions[:, (step * tokens) // clusters]
    count = valid.sum(1, keepdim=True)
    by_validity = torch.sort((~valid).int(), dim=1, stable=True).indices
    place = by_validity.gather(1, (step[None] * count) // clusters)
    return directions.gather(1, place[..., None].expand(-1, -1, dim))


def _masked(assignment: torch.Tensor, valid: torch.Tensor | None, clusters: int) -> torch.Tensor:
    return assignment if valid is None else assignment.masked_fill(~valid, clusters)


def _cut_at_cap(assignment: torch.Tensor, clusters: int, cap: int, pieces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order tokens by cluster and position, cut clusters every ``cap`` tokens, and number the pieces without gaps.

    Returns:
        ``order`` ``[rows, tokens]`` int64 and the piece of each token in that order, int32; ``pieces``, the most there
        can be, for tokens in no cluster.
    """
    cluster, order = torch.sort(assignment.long(), dim=1, stable=True)
    place = torch.arange(cluster.shape[1], device=cluster.device).expand_as(cluster)
    is_first = torch.ones_like(cluster, dtype=torch.bool)
    is_first[:, 1:] = cluster[:, 1:] != cluster[:, :-1]
    start = torch.where(is_first, place, 0).cummax(1).values
    is_valid = cluster < clusters
    piece = ((place - start) % cap == 0).cumsum(1) - 1
    return order, torch.where(is_valid, piece, pieces).int()


def _summarise(
    tokens: torch.Tensor, order: torch.Tensor, piece: torch.Tensor, pieces: int, head_dim: int
) -> ClusteredSegment:
    """Sizes, offsets and moments of the pieces, in float32; the variance is taken around the mean, in a second pass."""
    counts = torch.zeros(piece.shape[0], pieces + 1, dtype=torch.int32, device=piece.device)
    sizes = counts.scatter_add_(1, piece.long(), torch.ones_like(piece))[:, :pieces]
    divisor = sizes.clamp(min=1)[..., None].float()
    means = sum_by_cluster(tokens, piece, pieces) / divisor
    centroids, mean_values = means[..., :head_dim], means[..., head_dim:]
    member_of = piece.clamp(max=pieces - 1).long()[..., None].expand(-1, -1, head_dim)
    deviation = tokens[..., :head_dim].float() - centroids.gather(1, member_of)
    variances = sum_by_cluster(deviation * deviation, piece, pieces) / divisor
    offsets = sizes.cumsum(1, dtype=torch.int32) - sizes
    return ClusteredSegment(tokens, order, sizes, offsets, centroids, mean_values, variances)
