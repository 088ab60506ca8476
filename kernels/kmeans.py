"""Spherical k-means: assignment and centroid update (ClusterKV, arXiv 2412.03213, section III-B, with cosine distance)."""

from __future__ import annotations

import torch


def assign_clusters(tokens: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The centroid with the largest dot product, for every token; the lowest number among equals.

    Args:
        tokens: ``[rows, tokens, head_dim]`` floating, of unit length.
        centroids: ``[rows, clusters, head_dim]`` same dtype, of unit length.

    Returns:
        ``[rows, tokens]`` int32.
    """
    return assign_clusters_reference(tokens, centroids)


def assign_clusters_reference(tokens: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The same in plain torch; holds a token × cluster matrix."""
    return torch.matmul(tokens.float(), centroids.float().transpose(1, 2)).argmax(2).int()


def sum_by_cluster(tokens: torch.Tensor, assignment: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """Sum the tokens of every cluster, in float32.

    Args:
        tokens: ``[rows, tokens, dim]`` floating.
        assignment: ``[rows, tokens]`` int32; numbers of ``num_clusters`` and above are left out.
        num_clusters: Clusters a row.

    Returns:
        ``[rows, num_clusters, dim]`` float32; zero for an empty cluster.
    """
    return sum_by_cluster_reference(tokens, assignment, num_clusters)


def sum_by_cluster_reference(tokens: torch.Tensor, assignment: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """The same in plain torch."""
    rows, _, dim = tokens.shape
    sums = torch.zeros(rows, num_clusters + 1, dim, dtype=torch.float32, device=tokens.device)
    at = assignment.clamp(max=num_clusters).long()[..., None].expand(-1, -1, dim)
    return sums.scatter_add_(1, at, tokens.float())[:, :num_clusters]
