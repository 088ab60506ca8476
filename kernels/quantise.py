"""Symmetric int8 with one scale a cluster.

For a vector x of a cluster:

    scale = max|x| / 127,    q = round(x / scale)  (half to even),    x ≈ q · scale,

and scale = 1 for a vector of zeros. Variances, which are never negative, use the same scheme. Centroids, mean values and
variances kept like this lost nothing measurable at half the memory (DESIGN.md, "More of the same simulation").
"""

from __future__ import annotations

import torch

LARGEST = 127


def quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each cluster's vector to int8.

    Args:
        x: ``[rows, clusters, dim]`` floating and finite.

    Returns:
        ``[rows, clusters, dim]`` int8 and ``[rows, clusters]`` float32 scales, never 0.
    """
    return quantise_int8_reference(x)


def quantise_int8_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    x = x.float()
    scales = x.abs().amax(2) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)
    return torch.round(x / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.int8), scales
