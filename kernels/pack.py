"""Pack a segment into cluster order, key and value of a token side by side."""

from __future__ import annotations

import torch


def pack_tokens(keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Gather tokens in ``order`` with K and V interleaved.

    Args:
        keys: ``[rows, tokens, head_dim]``.
        values: ``[rows, tokens, value_dim]`` same dtype.
        order: ``[rows, tokens]`` int64 which token comes where.

    Returns:
        ``[rows, tokens, head_dim + value_dim]`` contiguous.
    """
    return pack_tokens_reference(keys, values, order)


def pack_tokens_reference(keys: torch.Tensor, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    row = torch.arange(keys.shape[0], device=keys.device)[:, None]
    return torch.cat([keys[row, order], values[row, order]], dim=-1)
