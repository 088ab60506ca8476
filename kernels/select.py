"""Budgeted selection: the best clusters whose tokens fit the budget, as a list of blocks.

Clusters are taken in descending score, ties by ascending cluster number, for as long as their tokens fit the token budget
and their blocks fit the block budget; the first one that does not fit ends the selection. A block is a run of up to
``block_size`` tokens of one cluster, contiguous in the host store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Selection(NamedTuple):
    """What a row attends to besides sinks and window. Blocks are listed in cluster order, then padded.

    Attributes:
        chosen: ``[rows, clusters]`` bool, the clusters taken.
        blocks: ``[rows, max_blocks]`` int32 block number within the row, -1 in the padding.
        starts: ``[rows, max_blocks]`` int32 first token of the block in the host store.
        lengths: ``[rows, max_blocks]`` int32 tokens in the block, 0 in the padding.
    """

    chosen: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


def select_clusters(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    first_blocks: torch.Tensor,
    *,
    token_budget: int,
    max_blocks: int,
    block_size: int,
) -> Selection:
    """Choose clusters by score within the budget.

    Args:
        scores: ``[rows, clusters]`` float32, -inf where no cluster exists.
        sizes: ``[rows, clusters]`` int32 tokens a cluster.
        starts: ``[rows, clusters]`` int32 first token of the cluster in the host store.
        first_blocks: ``[rows, clusters]`` int32 number of the cluster's first block.
        token_budget: Most tokens a row may take.
        max_blocks: Most blocks a row may take; the length of the lists.
        block_size: Tokens a block.
    """
    return select_clusters_reference(
        scores, sizes, starts, first_blocks, token_budget=token_budget, max_blocks=max_blocks, block_size=block_size
    )


def select_clusters_reference(
    scores, sizes, starts, first_blocks, *, token_budget: int, max_blocks: int, block_size: int
) -> Selection:
    """The same in plain torch: sort, cumulate, cut."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    cluster_blocks = (sizes + block_size - 1) // block_size
    fits = sizes.gather(1, order).cumsum(1) <= token_budget
    fits &= cluster_blocks.gather(1, order).cumsum(1) <= max_blocks
    fits &= scores.gather(1, order) > float("-inf")
    chosen = torch.zeros_like(fits).scatter_(1, order, fits)

    ends = (cluster_blocks * chosen).cumsum(1)
    place = torch.arange(max_blocks, device=scores.device).expand(scores.shape[0], -1).contiguous()
    cluster = torch.searchsorted(ends, place, right=True).clamp(max=scores.shape[1] - 1)
    within = place - (ends - cluster_blocks * chosen).gather(1, cluster)
    is_padding = place >= ends[:, -1:]
    offset = within * block_size
    length = (sizes.gather(1, cluster) - offset).clamp(max=block_size).masked_fill(is_padding, 0)
    blocks = (first_blocks.gather(1, cluster) + within).masked_fill(is_padding, -1)
    start = (starts.gather(1, cluster) + offset).masked_fill(is_padding, 0)
    return Selection(chosen, blocks.int(), start.int(), length.int())
