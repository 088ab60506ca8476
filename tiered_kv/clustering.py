"""Cluster a segment: group the keys of each KV head that point the same way (ClusterKV, arXiv 2412.03213, III-B).

Departures from the paper: small clusters of free size (16 tokens on average, cut above a cap) instead of 80; keys are
centred first; segments are clustered one by one, so that the cost is linear in the context; and the same code serves
prompts, decode segments and re-clustering.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tiered_kv.config import TieredKVConfig
from tiered_kv.kernels.directions import evenly_spaced, key_directions
from tiered_kv.kernels.kmeans import assign_clusters, update_centroids
from tiered_kv.kernels.order import order_by_cluster
from tiered_kv.kernels.pack import pack_tokens
from tiered_kv.kernels.summarise import summarise_clusters


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
    """Clusters a segment can end with: those of k-means, and one more for every ``max_cluster_tokens`` tokens."""
    return num_clusters(num_tokens, config) + num_tokens // config.max_cluster_tokens


def cluster_segment(
    keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None, config: TieredKVConfig
) -> ClusteredSegment:
    """Cluster the tokens of a segment, each row on its own, without waiting for the GPU; the same bits every time.

    Args:
        keys: ``[rows, tokens, head_dim]`` after RoPE.
        values: ``[rows, tokens, value_dim]``.
        valid: ``[rows, tokens]`` bool, the tokens to cluster; ``None`` for all.
        config: Cluster size, cap, iterations, centring.
    """
    clusters, pieces = num_clusters(keys.shape[1], config), max_clusters(keys.shape[1], config)
    assignment = assign_by_direction(keys, valid, clusters, config)
    order, sizes, offsets = order_by_cluster(assignment, clusters, config.max_cluster_tokens, pieces)
    tokens = pack_tokens(keys, values, order)
    centroids, mean_values, variances = summarise_clusters(tokens, offsets, sizes, keys.shape[2])
    return ClusteredSegment(tokens, order, sizes, offsets, centroids, mean_values, variances)


def assign_by_direction(
    keys: torch.Tensor, valid: torch.Tensor | None, clusters: int, config: TieredKVConfig
) -> torch.Tensor:
    """Spherical k-means with an evenly spaced start.

    Returns:
        ``[rows, tokens]`` int32 cluster of each token, ``clusters`` for tokens that are not valid.
    """
    directions = key_directions(keys, valid, config.center_keys)
    centroids = evenly_spaced(directions, valid, clusters)
    for _ in range(config.kmeans_iterations):
        centroids = update_centroids(directions, assign_clusters(directions, centroids, valid), centroids)
    return assign_clusters(directions, centroids, valid)
