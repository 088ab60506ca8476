"""Cluster order: tokens by cluster and then by position, and clusters cut into pieces of bounded size.

A counting sort, stable by construction. A program owns ``BLOCK_C`` neighbouring clusters of a row; it knows from the
counts where they start, reads the row's assignment once and deals places to its tokens. For 8 rows of 8192 tokens that
is two short kernels; a stable ``torch.sort`` of the same is a radix sort of many launches.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton

# Untuned guesses. Tokens a program counts; clusters a program owns and tokens it places at a time.
COUNT_TOKENS = 512
PLACE_CLUSTERS = 16
PLACE_TOKENS = 256
PLACE_STAGES = 3
WARPS = 4


@triton.jit
def _count_kernel(assignment, counts, num_tokens, num_clusters, BLOCK_T: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    in_row = token < num_tokens
    cluster = tl.load(assignment + row * num_tokens + token, mask=in_row, other=0)
    cluster = tl.minimum(cluster, num_clusters)
    one = tl.full([BLOCK_T], 1, tl.int32)
    tl.atomic_add(counts + row * (num_clusters + 1) + cluster, one, mask=in_row, sem="relaxed")


@triton.jit
def _place_kernel(
    assignment, counts, order, sizes, offsets, num_tokens, num_clusters, cap, pieces,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_C
    own = first + tl.arange(0, BLOCK_C)
    assignment += row * num_tokens
    counts += row * (num_clusters + 1)
    order += row * num_tokens
    sizes += row * pieces
    offsets += row * pieces

    scan = tl.arange(0, BLOCK_N)
    tokens_before = tl.zeros([BLOCK_N], tl.int32)
    pieces_before = tl.zeros([BLOCK_N], tl.int32)
    for start in range(0, first, BLOCK_N):
        size = tl.load(counts + start + scan, mask=start + scan < first, other=0)
        tokens_before += size
        pieces_before += (size + cap - 1) // cap
    size = tl.load(counts + own, mask=own <= num_clusters, other=0)
    own_pieces = tl.where(own < num_clusters, (size + cap - 1) // cap, 0)
    begin = tl.sum(tokens_before, 0) + tl.cumsum(size, 0) - size
    first_piece = tl.sum(pieces_before, 0) + tl.cumsum(own_pieces, 0) - own_pieces

    for i in range(0, tl.max(own_pieces, 0)):
        is_piece = i < own_pieces
        tl.store(sizes + first_piece + i, tl.minimum(size - i * cap, cap), mask=is_piece)
        tl.store(offsets + first_piece + i, begin + i * cap, mask=is_piece)
    if first + BLOCK_C > num_clusters:  # the last program also writes the pieces that do not exist
        clustered = tl.sum(tokens_before, 0) + tl.sum(tl.where(own < num_clusters, size, 0), 0)
        for start in range(tl.sum(pieces_before, 0) + tl.sum(own_pieces, 0), pieces, BLOCK_N):
            tl.store(sizes + start + scan, tl.zeros([BLOCK_N], tl.int32), mask=start + scan < pieces)
            tl.store(offsets + start + scan, tl.zeros([BLOCK_N], tl.int32) + clustered, mask=start + scan < pieces)

    next_place = begin
    for start in tl.range(0, num_tokens, BLOCK_T, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_T)
        in_row = token < num_tokens
        cluster = tl.minimum(tl.load(assignment + token, mask=in_row, other=0), num_clusters)
        is_member = (cluster[:, None] == own[None, :]) & in_row[:, None]
        rank = tl.cumsum(is_member.to(tl.int32), 0)
        place = tl.sum(tl.where(is_member, next_place[None, :] + rank - 1, 0), 1)
        is_own = (cluster >= first) & (cluster < first + BLOCK_C) & in_row
        tl.store(order + place, token.to(tl.int64), mask=is_own)
        next_place += tl.sum(is_member.to(tl.int32), 0)


def order_by_cluster(
    assignment: torch.Tensor, num_clusters: int, cap: int, pieces: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order tokens by cluster and position, cut clusters every ``cap`` tokens, and number the pieces without gaps.

    Args:
        assignment: ``[rows, tokens]`` int32; numbers of ``num_clusters`` and above are in no cluster and come last.
        num_clusters: Clusters a row.
        cap: Most tokens of a piece.
        pieces: Room for pieces; at least ``num_clusters + tokens // cap`` always suffices.

    Returns:
        ``order`` ``[rows, tokens]`` int64 the token at each place, and ``sizes`` and ``offsets`` ``[rows, pieces]``
        int32, the tokens and the first place of each piece; pieces that do not exist have size 0 and come last.
    """
    if not use_triton(assignment):
        return order_by_cluster_reference(assignment, num_clusters, cap, pieces)
    rows, num_tokens = assignment.shape
    device, assignment = assignment.device, assignment.contiguous()
    counts = torch.zeros(rows, num_clusters + 1, dtype=torch.int32, device=device)
    block_t = min(COUNT_TOKENS, triton.next_power_of_2(num_tokens))
    _count_kernel[triton.cdiv(num_tokens, block_t), rows](
        assignment, counts, num_tokens, num_clusters, BLOCK_T=block_t, num_warps=WARPS
    )
    order = torch.empty(rows, num_tokens, dtype=torch.int64, device=device)
    sizes = torch.empty(rows, pieces, dtype=torch.int32, device=device)
    offsets = torch.empty_like(sizes)
    _place_kernel[triton.cdiv(num_clusters + 1, PLACE_CLUSTERS), rows](
        assignment, counts, order, sizes, offsets, num_tokens, num_clusters, cap, pieces,
        BLOCK_C=PLACE_CLUSTERS, BLOCK_T=min(PLACE_TOKENS, triton.next_power_of_2(num_tokens)),
        BLOCK_N=min(1024, triton.next_power_of_2(num_clusters)), STAGES=PLACE_STAGES, num_warps=WARPS,
    )  # fmt: skip
    return order, sizes, offsets


def order_by_cluster_reference(
    assignment: torch.Tensor, num_clusters: int, cap: int, pieces: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in plain torch: a stable sort, and the pieces counted."""
    cluster, order = torch.sort(assignment.clamp(max=num_clusters), dim=1, stable=True)
    place = torch.arange(cluster.shape[1], device=cluster.device).expand_as(cluster)
    is_first = torch.ones_like(cluster, dtype=torch.bool)
    is_first[:, 1:] = cluster[:, 1:] != cluster[:, :-1]
    start = torch.where(is_first, place, 0).cummax(1).values
    piece = ((place - start) % cap == 0).cumsum(1) - 1
    piece = torch.where(cluster < num_clusters, piece, pieces)
    counts = torch.zeros(cluster.shape[0], pieces + 1, dtype=torch.int32, device=cluster.device)
    sizes = counts.scatter_add_(1, piece, torch.ones_like(cluster))[:, :pieces].contiguous()
    return order, sizes, sizes.cumsum(1, dtype=torch.int32) - sizes
