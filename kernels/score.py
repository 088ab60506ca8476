"""Centroid scores: how much attention a cluster is likely to receive.

For a query q and a cluster of n keys with mean μ and per-channel variance v,

    mean over the cluster of exp(scale·q·k)  ≈  exp(scale·q·μ + ½·scale²·Σ_d q_d²·v_d).

``spread`` is the share of the second-order term that is used (one half beats both none and all of it, DESIGN.md "Spread").
The score that ranks clusters is the maximum over the query heads that share a KV head; the logit that weighs the estimate
is per query head, with the second-order term bounded by ``spread_limit``.
"""

from __future__ import annotations

import torch


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
        query: ``[rows, group, head_dim]``; a row is one KV head of one sequence, its group the query heads that share it.
        centroids: ``[rows, clusters, head_dim]``, int8 or floating; times ``centroid_scales`` the mean key.
        centroid_scales: ``[rows, clusters]`` float32.
        variances: ``[rows, clusters, head_dim]`` or ``None`` for no second-order term.
        variance_scales: ``[rows, clusters]`` float32, with ``variances``.
        sizes: ``[rows, clusters]`` int32 tokens a cluster; 0 marks a cluster that does not exist.
        scale: Factor of q·k (usually ``head_dim ** -0.5``).
        softcap: ``softcap · tanh(x / softcap)`` is applied to the first-order logit when given.

    Returns:
        ``logits`` ``[rows, group, clusters]`` float32, the log-weight of one token of the cluster, and ``scores``
        ``[rows, clusters]`` float32, the ranking, -inf where no cluster exists.
    """
    return score_clusters_reference(
        query, centroids, centroid_scales, variances, variance_scales, sizes,
        scale=scale, softcap=softcap, spread=spread, spread_limit=spread_limit,
    )  # fmt: skip


def score_clusters_reference(
    query, centroids, centroid_scales, variances, variance_scales, sizes, *, scale, softcap, spread, spread_limit
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, in float32."""
    q = query.float()
    logits = torch.matmul(q, centroids.float().transpose(1, 2)) * (centroid_scales[:, None] * scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ranking = logits
    if variances is not None:
        second = torch.matmul(q * q, variances.float().transpose(1, 2)) * variance_scales[:, None]
        second = second * (0.5 * spread * scale * scale)
        ranking = logits + second
        logits = logits + second.clamp(max=spread_limit)
    scores = ranking.amax(1).masked_fill(sizes == 0, float("-inf"))
    return logits, scores
