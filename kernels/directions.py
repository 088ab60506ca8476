"""Where spherical k-means starts: keys as directions, and an evenly spaced choice of them as first centroids.

    x_t = (k_t - k̄) / |k_t - k̄|        μ_c = x at the ⌊c·n/clusters⌋-th of the n valid tokens

k̄ is the mean of the valid keys. It is summed in float32 in two fixed steps, tiles of tokens and then the tiles, so that
the same keys give the same bits; no float32 copy of the keys is ever in memory.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from tiered_kv.kernels.dispatch import tl, triton, use_triton

# Untuned guesses. Tokens a program sums, tokens a program turns, tokens looked at together in a search for valid ones.
SUM_TOKENS = 256
TURN_TILE = 8192
SEARCH_TOKENS = 256
SEARCH_CLUSTERS = 16
WARPS = 4


@triton.jit
def _key_sum_kernel(
    keys, valid, sums, counts, num_tokens, row_stride, token_stride,
    HAS_VALID: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tile = row * tl.num_programs(0) + tl.program_id(0)
    channel = tl.arange(0, BLOCK_D)
    in_dim = channel < DIM
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    count = tl.zeros([BLOCK_T], tl.int32)
    for step in tl.static_range(STEPS):
        token = (tl.program_id(0) * STEPS + step) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_valid = token < num_tokens
        if HAS_VALID:
            is_valid &= tl.load(valid + row * num_tokens + token, mask=is_valid, other=0) != 0
        at = row * row_stride + token.to(tl.int64)[:, None] * token_stride + channel[None, :]
        total += tl.load(keys + at, mask=is_valid[:, None] & in_dim[None, :], other=0.0).to(tl.float32)
        count += is_valid.to(tl.int32)
    tl.store(sums + tile * DIM + channel, tl.sum(total, 0), mask=in_dim)
    tl.store(counts + tile, tl.sum(count, 0))


@triton.jit
def _direction_kernel(
    keys, sums, counts, out, num_tokens, num_tiles, row_stride, token_stride,
    CENTER: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.arange(0, BLOCK_D)
    in_dim = channel < DIM
    mask = (token < num_tokens)[:, None] & in_dim[None, :]
    at = row * row_stride + token.to(tl.int64)[:, None] * token_stride + channel[None, :]
    x = tl.load(keys + at, mask=mask, other=0.0).to(tl.float32)
    if CENTER:
        tile = tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        count = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, num_tiles, BLOCK_N):
            in_tiles = start + tile < num_tiles
            n = row * num_tiles + start + tile
            total += tl.load(
                sums + n[:, None] * DIM + channel[None, :], mask=in_tiles[:, None] & in_dim[None, :], other=0.0
            )
            count += tl.load(counts + n, mask=in_tiles, other=0)
        mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float32)
        x = x - mean[None, :]
    length = tl.sqrt(tl.sum(x * x, 1))
    x = x / tl.maximum(length, 1e-12)[:, None]
    tl.store(out + (row * num_tokens + token)[:, None] * DIM + channel[None, :], x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _evenly_spaced_kernel(
    directions, valid, out, num_tokens, num_clusters,
    HAS_VALID: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    if HAS_VALID:
        token = tl.arange(0, BLOCK_T)
        valid += row * num_tokens
        flags = tl.zeros([BLOCK_T], tl.int32)
        for start in range(0, num_tokens, BLOCK_T):
            is_valid = tl.load(valid + start + token, mask=start + token < num_tokens, other=0)
            flags += (is_valid != 0).to(tl.int32)
        target = ((cluster.to(tl.int64) * tl.sum(flags, 0)) // num_clusters).to(tl.int32)
        # The valid token with ``target`` valid ones before it comes after all tokens whose running count is <= target.
        place = tl.zeros([BLOCK_C], tl.int32)
        seen = 0
        for start in range(0, num_tokens, BLOCK_T):
            in_row = start + token < num_tokens
            is_valid = tl.load(valid + start + token, mask=in_row, other=0)
            running = seen + tl.cumsum((is_valid != 0).to(tl.int32), 0)
            is_before = (running[None, :] <= target[:, None]) & in_row[None, :]
            place += tl.sum(is_before.to(tl.int32), 1)
            seen += tl.sum((is_valid != 0).to(tl.int32), 0)
        place = tl.where(place < num_tokens, place, 0)
    else:
        place = ((cluster.to(tl.int64) * num_tokens) // num_clusters).to(tl.int32)
    channel = tl.arange(0, BLOCK_D)
    mask = (cluster < num_clusters)[:, None] & (channel < DIM)[None, :]
    x = tl.load(directions + (row * num_tokens + place)[:, None] * DIM + channel[None, :], mask=mask, other=0.0)
    tl.store(out + (row * num_clusters + cluster)[:, None] * DIM + channel[None, :], x, mask=mask)


def key_directions(keys: torch.Tensor, valid: torch.Tensor | None, center: bool) -> torch.Tensor:
    """Keys less their mean, of unit length.

    Args:
        keys: ``[rows, tokens, head_dim]`` floating.
        valid: ``[rows, tokens]`` bool, the tokens that count in the mean; ``None`` for all.
        center: Subtract the mean.

    Returns:
        ``[rows, tokens, head_dim]`` in the keys' dtype, contiguous; anything for tokens that are not valid.
    """
    if not use_triton(keys):
        return key_directions_reference(keys, valid, center)
    rows, num_tokens, dim = keys.shape
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    block_d = triton.next_power_of_2(dim)
    block_t = max(1, TURN_TILE // block_d)
    steps = max(1, SUM_TOKENS // block_t)
    num_tiles = triton.cdiv(num_tokens, block_t * steps)
    sums = torch.empty(rows, num_tiles, dim, dtype=torch.float32, device=keys.device)
    counts = torch.empty(rows, num_tiles, dtype=torch.int32, device=keys.device)
    if center:
        _key_sum_kernel[num_tiles, rows](
            keys, None if valid is None else valid.contiguous(), sums, counts, num_tokens, *keys.stride()[:2],
            HAS_VALID=valid is not None, DIM=dim, BLOCK_D=block_d, BLOCK_T=block_t, STEPS=steps, num_warps=WARPS,
        )  # fmt: skip
    out = torch.empty(rows, num_tokens, dim, dtype=keys.dtype, device=keys.device)
    _direction_kernel[triton.cdiv(num_tokens, block_t), rows](
        keys, sums, counts, out, num_tokens, num_tiles, *keys.stride()[:2],
        CENTER=center, DIM=dim, BLOCK_D=block_d, BLOCK_T=block_t,
        BLOCK_N=min(32, triton.next_power_of_2(num_tiles)), num_warps=WARPS,
    )  # fmt: skip
    return out


def key_directions_reference(keys: torch.Tensor, valid: torch.Tensor | None, center: bool) -> torch.Tensor:
    """The same in plain torch."""
    x = keys.float()
    if center and valid is None:
        x = x - x.mean(1, keepdim=True)
    elif center and valid is not None:
        count = valid.sum(1).clamp(min=1)[:, None, None]
        x = x - torch.where(valid[..., None], x, 0).sum(1, keepdim=True) / count
    return normalize(x, dim=2).to(keys.dtype)


def evenly_spaced(directions: torch.Tensor, valid: torch.Tensor | None, clusters: int) -> torch.Tensor:
    """Every (tokens / clusters)-th valid token; a row with fewer valid tokens than clusters repeats some.

    Args:
        directions: ``[rows, tokens, head_dim]`` floating.
        valid: ``[rows, tokens]`` bool, the tokens to choose from; ``None`` for all.
        clusters: How many to choose, at least one.

    Returns:
        ``[rows, clusters, head_dim]``.
    """
    if not use_triton(directions):
        return evenly_spaced_reference(directions, valid, clusters)
    rows, num_tokens, dim = directions.shape
    out = torch.empty(rows, clusters, dim, dtype=directions.dtype, device=directions.device)
    _evenly_spaced_kernel[triton.cdiv(clusters, SEARCH_CLUSTERS), rows](
        directions.contiguous(), None if valid is None else valid.contiguous(), out, num_tokens, clusters,
        HAS_VALID=valid is not None, DIM=dim, BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_C=SEARCH_CLUSTERS, BLOCK_T=min(SEARCH_TOKENS, triton.next_power_of_2(num_tokens)), num_warps=WARPS,
    )  # fmt: skip
    return out


def evenly_spaced_reference(directions: torch.Tensor, valid: torch.Tensor | None, clusters: int) -> torch.Tensor:
    """The same in plain torch."""
    _, tokens, dim = directions.shape
    step = torch.arange(clusters, device=directions.device)
    if valid is None:
        return directions[:, (step * tokens) // clusters]
    running = valid.cumsum(1)
    target = (step[None] * running[:, -1:]) // clusters
    place = torch.searchsorted(running, target, right=True)
    place = place.masked_fill(place == tokens, 0)  # a row with no valid token
    return directions.gather(1, place[..., None].expand(-1, -1, dim))
