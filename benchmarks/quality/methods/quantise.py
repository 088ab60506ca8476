"""Asymmetric min-max quantisation in groups (KIVI, arXiv 2402.02750), rounded and restored at once."""

from __future__ import annotations

import torch

GROUP = 32
"""Numbers that share a scale and an offset, as KIVI has it."""


def quantised_keys(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., tokens, dim]`` per channel, in groups of ``GROUP`` tokens."""
    whole = keys.shape[-2] - keys.shape[-2] % GROUP
    parts = [_by_tokens(part, bits) for part in (keys[..., :whole, :], keys[..., whole:, :]) if part.shape[-2]]
    return torch.cat(parts, dim=-2) if parts else keys


def quantised_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., tokens, dim]`` per token, in groups of ``GROUP`` channels."""
    group = GROUP if values.shape[-1] % GROUP == 0 else values.shape[-1]
    return _rounded(values.unflatten(-1, (-1, group)), -1, bits).flatten(-2)


def _by_tokens(keys: torch.Tensor, bits: int) -> torch.Tensor:
    group = min(GROUP, keys.shape[-2])
    return _rounded(keys.unflatten(-2, (-1, group)), -2, bits).flatten(-3, -2)


def _rounded(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    low, high = x.float().aminmax(dim=dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-8)
    return (((x.float() - low) / step).round() * step + low).to(x.dtype)
