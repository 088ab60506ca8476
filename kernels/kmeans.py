"""Spherical k-means: assignment and centroid update (ClusterKV, arXiv 2412.03213, section III-B, with cosine distance).

For directions x_t and centroids μ_c, all of unit length:

    a_t = argmax_c x_t·μ_c        μ_c ← Σ_{a_t = c} x_t / |Σ_{a_t = c} x_t|

The assignment is a matrix product whose output never leaves the registers: a running maximum per column of the centroid
tile (three instructions an element), and one reduction across the columns at the end.

The update must give the same bits for the same input, since centroids decide tokens, so it has no float atomics. Each
program owns ``BLOCK_C`` neighbouring clusters of a row: it reads the row's assignment (32 KiB at 8192 tokens) twice,
lists the tokens of its clusters in their order, and sums just these as a product with their one-hot matrix. For 8 rows
of 8192 tokens, 512 clusters and head_dim 128 in bf16 that is each token once (17 MB), the assignment 64 times (17 MB
from L2) and 0.3 GFLOP, in one launch that also normalises. A one-hot product over all tokens would take 8.6 GFLOP, as
much as the assignment, 67 MB from L2 and a second pass over partial sums; sorting by cluster, several launches an
iteration.
"""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from tiered_kv.kernels.dispatch import tl, triton, use_triton

# Untuned; chosen by what the compiler reports for sm_90. Assignment: tokens x clusters a tile. 8 warps take 118
# registers a thread and 80 KiB of shared memory, so that two programs share a multiprocessor and hide each other's
# comparisons; 4 warps take 234 registers, and 128 clusters leave room for one program.
ASSIGN_TILE = (128, 64)
ASSIGN_WARPS = 8
ASSIGN_STAGES = 3
# Update: clusters a program, tokens listed at once, bytes of tokens gathered at once.
SUM_CLUSTERS = 16
SUM_LISTED = 2048
SUM_TILE_BYTES = 16384
SUM_WARPS = 4
SUM_STAGES = 5  # two tiles in flight, as each waits for its part of the list first
# Up to here one program takes all clusters of a row and reads the tokens as they come, without a list.
UNLISTED_CLUSTERS = 32


@triton.jit
def _assign_kernel(
    tokens, centroids, valid, assignment,
    num_tokens, num_clusters, token_row_stride, token_stride, centroid_row_stride, centroid_stride,
    HAS_VALID: tl.constexpr, IS_EVEN: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_C)
    channel = tl.arange(0, BLOCK_D)
    in_row = token < num_tokens
    in_dim = channel < DIM

    x_at = tokens + row * token_row_stride + token.to(tl.int64)[:, None] * token_stride + channel[None, :]
    x = tl.load(x_at, mask=in_row[:, None] & in_dim[None, :], other=0.0)
    centroids += row * centroid_row_stride + channel[:, None]
    best = tl.full([BLOCK_T, BLOCK_C], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK_T, BLOCK_C], tl.int32)
    for start in range(0, num_clusters, BLOCK_C):
        cluster = start + column
        mask = in_dim[:, None] if IS_EVEN else in_dim[:, None] & (cluster < num_clusters)[None, :]
        mu = tl.load(centroids + cluster.to(tl.int64)[None, :] * centroid_stride, mask=mask, other=0.0)
        score = tl.dot(x, mu, input_precision="ieee")
        if not IS_EVEN:
            score = tl.where((cluster < num_clusters)[None, :], score, float("-inf"))
        is_better = score > best  # strictly: a column keeps its first cluster among equals
        best = tl.where(is_better, score, best)
        best_tile = tl.where(is_better, start, best_tile)

    is_best = best == tl.max(best, 1)[:, None]
    nearest = tl.min(tl.where(is_best, best_tile + column[None, :], 2147483647), 1)
    nearest = tl.minimum(nearest, num_clusters - 1)
    if HAS_VALID:
        is_valid = tl.load(valid + row * num_tokens + token, mask=in_row, other=0)
        nearest = tl.where(is_valid != 0, nearest, num_clusters)
    tl.store(assignment + row * num_tokens + token, nearest, mask=in_row)


@triton.jit
def _sum_kernel(
    tokens, assignment, previous, out, members,
    num_tokens, num_clusters, token_row_stride, token_stride,
    UPDATE: tl.constexpr, LISTED: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_C
    own = first + tl.arange(0, BLOCK_C)
    last = tl.minimum(first + BLOCK_C, num_clusters)
    channel = tl.arange(0, BLOCK_D)
    in_dim = channel < DIM
    tokens += row * token_row_stride
    assignment += row * num_tokens

    count = num_tokens
    if LISTED:
        # The list starts where this program's tokens would start in cluster order, so that programs never overlap.
        scan = tl.arange(0, BLOCK_S)
        before = tl.zeros([BLOCK_S], tl.int32)
        for start in tl.range(0, num_tokens, BLOCK_S, num_stages=3):
            cluster = tl.load(assignment + start + scan, mask=start + scan < num_tokens, other=num_clusters)
            before += (cluster < first).to(tl.int32)
        members += row * num_tokens + tl.sum(before, 0)
        count = 0
        for start in tl.range(0, num_tokens, BLOCK_S, num_stages=3):
            cluster = tl.load(assignment + start + scan, mask=start + scan < num_tokens, other=num_clusters)
            is_own = (cluster >= first) & (cluster < last)
            place = count + tl.cumsum(is_own.to(tl.int32), 0) - 1
            tl.store(members + place, (start + scan) * BLOCK_C + cluster - first, mask=is_own)  # token and cluster
            count += tl.sum(is_own.to(tl.int32), 0)
        tl.debug_barrier()  # the list goes from thread to thread through memory

    total = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        is_member = token < count
        if LISTED:
            member = tl.load(members + token, mask=is_member, other=0)
            token, cluster = member // BLOCK_C, first + member % BLOCK_C
        else:
            cluster = tl.load(assignment + token, mask=is_member, other=num_clusters)
            is_member = cluster < num_clusters
        mask = is_member[:, None] & in_dim[None, :]
        x = tl.load(tokens + token.to(tl.int64)[:, None] * token_stride + channel[None, :], mask=mask, other=0.0)
        one_hot = (cluster[None, :] == own[:, None]).to(x.dtype)
        total = tl.dot(one_hot, x, total, input_precision="ieee")

    at = (row * num_clusters + own)[:, None] * DIM + channel[None, :]
    mask = (own < num_clusters)[:, None] & in_dim[None, :]
    if UPDATE:
        length = tl.sqrt(tl.sum(total * total, 1))
        is_empty = tl.max(tl.abs(total), 1) == 0
        kept = tl.load(previous + at, mask=mask, other=0.0)
        direction = total / tl.maximum(length, 1e-12)[:, None]
        tl.store(out + at, tl.where(is_empty[:, None], kept, direction.to(kept.dtype)), mask=mask)
    else:
        tl.store(out + at, total, mask=mask)


def assign_clusters(tokens: torch.Tensor, centroids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """The centroid with the largest dot product, for every token; the lowest number among equals.

    Args:
        tokens: ``[rows, tokens, head_dim]`` floating, of unit length.
        centroids: ``[rows, clusters, head_dim]`` same dtype, of unit length.
        valid: ``[rows, tokens]`` bool; tokens that are not valid get the number ``clusters``. ``None``: all are.

    Returns:
        ``[rows, tokens]`` int32.
    """
    if not use_triton(tokens):
        return assign_clusters_reference(tokens, centroids, valid)
    rows, num_tokens, dim = tokens.shape
    num_clusters = centroids.shape[1]
    tokens, centroids = _with_dense_channels(tokens), _with_dense_channels(centroids)
    block_d = max(16, triton.next_power_of_2(dim))
    shrink = max(1, block_d * tokens.element_size() // 256)  # the tile is meant for tokens of up to 256 bytes
    block_t = max(32, ASSIGN_TILE[0] // shrink)
    block_c = max(16, min(ASSIGN_TILE[1], triton.next_power_of_2(num_clusters)))
    assignment = torch.empty(rows, num_tokens, dtype=torch.int32, device=tokens.device)
    _assign_kernel[triton.cdiv(num_tokens, block_t), rows](
        tokens, centroids, None if valid is None else valid.contiguous(), assignment,
        num_tokens, num_clusters, *tokens.stride()[:2], *centroids.stride()[:2],
        HAS_VALID=valid is not None, IS_EVEN=num_clusters % block_c == 0,
        DIM=dim, BLOCK_D=block_d, BLOCK_T=block_t, BLOCK_C=block_c,
        num_warps=max(4, ASSIGN_WARPS // shrink), num_stages=ASSIGN_STAGES if shrink == 1 else 2,
    )  # fmt: skip
    return assignment


def assign_clusters_reference(
    tokens: torch.Tensor, centroids: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch; holds a token × cluster matrix."""
    nearest = torch.matmul(tokens.float(), centroids.float().transpose(1, 2)).argmax(2).int()
    return nearest if valid is None else nearest.masked_fill(~valid, centroids.shape[1])


def sum_by_cluster(tokens: torch.Tensor, assignment: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """Sum the tokens of every cluster, in float32 and in a fixed order: the same input gives the same bits.

    Args:
        tokens: ``[rows, tokens, dim]`` floating.
        assignment: ``[rows, tokens]`` int32; numbers of ``num_clusters`` and above are left out.
        num_clusters: Clusters a row.

    Returns:
        ``[rows, num_clusters, dim]`` float32; zero for an empty cluster.
    """
    if not use_triton(tokens):
        return sum_by_cluster_reference(tokens, assignment, num_clusters)
    sums = torch.empty(tokens.shape[0], num_clusters, tokens.shape[2], dtype=torch.float32, device=tokens.device)
    _launch_sum(tokens, assignment, None, sums)
    return sums


def sum_by_cluster_reference(tokens: torch.Tensor, assignment: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """The same in plain torch."""
    if tokens.is_cuda:
        return sum_by_product(tokens, assignment, num_clusters)
    rows, _, dim = tokens.shape
    sums = torch.zeros(rows, num_clusters + 1, dim, dtype=torch.float32, device=tokens.device)
    at = assignment.clamp(max=num_clusters).long()[..., None].expand(-1, -1, dim)
    return sums.scatter_add_(1, at, tokens.float())[:, :num_clusters]


def sum_by_product(tokens: torch.Tensor, assignment: torch.Tensor, num_clusters: int) -> torch.Tensor:
    """The same as a one-hot product, for CUDA, where ``scatter_add_`` adds in another order every time."""
    is_member = assignment[:, None] == torch.arange(num_clusters, device=tokens.device)[:, None]
    kept = torch.where((assignment < num_clusters)[..., None], tokens.float(), 0)
    return torch.matmul(is_member.float(), kept)


def update_centroids(tokens: torch.Tensor, assignment: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The direction of every cluster's sum; where that is zero, as in an empty cluster, the centroid stays as it was.

    Args:
        tokens: ``[rows, tokens, head_dim]`` floating, of unit length.
        assignment: ``[rows, tokens]`` int32; numbers of ``clusters`` and above are left out.
        centroids: ``[rows, clusters, head_dim]`` same dtype.

    Returns:
        ``[rows, clusters, head_dim]`` in the centroids' dtype, summed in float32 and in a fixed order.
    """
    if not use_triton(tokens):
        return update_centroids_reference(tokens, assignment, centroids)
    updated = torch.empty(centroids.shape, dtype=centroids.dtype, device=centroids.device)
    _launch_sum(tokens, assignment, centroids.contiguous(), updated)
    return updated


def update_centroids_reference(tokens: torch.Tensor, assignment: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    sums = sum_by_cluster_reference(tokens, assignment, centroids.shape[1])
    is_empty = (sums == 0).all(2, keepdim=True)
    return torch.where(is_empty, centroids, normalize(sums, dim=2).to(centroids.dtype))


def _launch_sum(
    tokens: torch.Tensor, assignment: torch.Tensor, previous: torch.Tensor | None, out: torch.Tensor
) -> None:
    rows, num_tokens, dim = tokens.shape
    num_clusters = out.shape[1]
    tokens, assignment = _with_dense_channels(tokens), assignment.contiguous()
    is_listed = num_clusters > UNLISTED_CLUSTERS
    block_c = SUM_CLUSTERS if is_listed else max(16, triton.next_power_of_2(num_clusters))
    block_d = max(16, triton.next_power_of_2(dim))
    block_t = max(16, min(64, SUM_TILE_BYTES // (block_d * tokens.element_size())))
    _sum_kernel[triton.cdiv(num_clusters, block_c), rows](
        tokens, assignment, previous, out, torch.empty_like(assignment) if is_listed else None,
        num_tokens, num_clusters, *tokens.stride()[:2],
        UPDATE=previous is not None, LISTED=is_listed,
        DIM=dim, BLOCK_D=block_d, BLOCK_C=block_c, BLOCK_T=block_t,
        BLOCK_S=min(SUM_LISTED, max(16, triton.next_power_of_2(num_tokens))),
        num_warps=SUM_WARPS, num_stages=SUM_STAGES,
    )  # fmt: skip


def _with_dense_channels(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
