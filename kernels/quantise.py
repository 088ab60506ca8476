"""Symmetric int8 with one scale a cluster.

For a vector x of a cluster:

    scale = max|x| / 127,    q = round(x / scale)  (half to even),    x ≈ q · scale,

and scale = 1 for a vector of zeros. Variances, which are never negative, use the same scheme. Centroids, mean values
and variances kept like this lost nothing measurable at half the memory (DESIGN.md, "More of the same simulation").
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton

LARGEST = 127
# Untuned guesses: elements a program.
QUANTISE_TILE = 2048
QUANTISE_WARPS = 4


@triton.jit
def _quantise_kernel(
    x, out, scales, num_vectors,
    LARGEST: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    vector = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    channel = tl.arange(0, BLOCK_D)
    at = vector[:, None] * DIM + channel[None, :]
    in_range = vector < num_vectors
    mask = in_range[:, None] & (channel < DIM)[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.math.div_rn(tl.max(tl.abs(value), 1), tl.full([BLOCK_N], LARGEST, tl.float32))
    scale = tl.where(scale > 0, scale, 1.0)
    code = tl.math.div_rn(value, tl.broadcast_to(scale[:, None], [BLOCK_N, BLOCK_D]))
    code = (code + 12582912.0) - 12582912.0  # 1.5 · 2**23: adding it rounds to an integer, half to even
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST)
    tl.store(out + at, code.to(tl.int8), mask=mask)
    tl.store(scales + vector, scale, mask=in_range)


def quantise_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each cluster's vector to int8.

    Args:
        x: ``[rows, clusters, dim]`` floating and finite.

    Returns:
        ``[rows, clusters, dim]`` int8 and ``[rows, clusters]`` float32 scales, never 0.
    """
    if not use_triton(x):
        return quantise_int8_reference(x)
    rows, clusters, dim = x.shape
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, clusters, dtype=torch.float32, device=x.device)
    block_d = triton.next_power_of_2(dim)
    block_n = max(1, QUANTISE_TILE // block_d)
    _quantise_kernel[(triton.cdiv(rows * clusters, block_n),)](
        x.contiguous(), out, scales, rows * clusters,
        LARGEST=LARGEST, DIM=dim, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=QUANTISE_WARPS,
    )  # fmt: skip
    return out, scales


def quantise_int8_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    x = x.float()
    largest = torch.full((), LARGEST, dtype=x.dtype, device=x.device)  # a tensor: CUDA multiplies by a number's inverse
    scales = x.abs().amax(2) / largest
    scales = torch.where(scales > 0, scales, 1.0)
    return torch.round(x / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.int8), scales
