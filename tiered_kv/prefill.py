"""Exact attention of a prompt's chunk: to itself, and to everything before it, piece by piece.

Left padding is skipped by slicing, one sequence at a time, so that no piece ever needs a mask and flash kernels serve
all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tiered_kv.kernels.flash import attend_piece, merge_pieces


@dataclass(frozen=True)
class Piece:
    """Earlier tokens, all visible to the chunk.

    Attributes:
        tokens: ``[batch, kv_heads, tokens, head_dim + value_dim]``.
        spans: For each sequence, its first token and one past its last.
    """

    tokens: torch.Tensor
    spans: list[tuple[int, int]]


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    earlier: Iterable[Piece],
    padding: list[int] | None,
    *,
    scale: float,
    softcap: float | None = None,
    attention_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a chunk's queries.

    Args:
        query: ``[batch, query_heads, queries, head_dim]``.
        key: ``[batch, kv_heads, queries, head_dim]`` of the chunk itself.
        value: ``[batch, kv_heads, queries, value_dim]``.
        earlier: What came before the chunk.
        padding: Padding tokens at the chunk's beginning, for each sequence, whose output is zero; ``None`` when no
            sequence is padded anywhere.
        attention_sinks: ``[query_heads]`` learned logits of gpt-oss, when given.

    Returns:
        ``[batch, query_heads, queries, value_dim]`` in the query's dtype.
    """
    groups = _groups(query, padding)
    options = {"scale": scale, "softcap": softcap}
    parts = [attend_piece(_of(query, g), _of(key, g), _of(value, g), causal=True, **options) for g in groups]
    for piece in earlier:
        for i, group in enumerate(groups):
            earlier_key, earlier_value = _span(piece, group, query.shape[-1])
            if earlier_key.shape[2]:
                other = attend_piece(_of(query, group), earlier_key, earlier_value, causal=False, **options)
                parts[i] = merge_pieces(*parts[i], *other)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for group, (part, lse) in zip(groups, parts, strict=True):
        _of(out, group).copy_(_discount(part, lse, attention_sinks))
    return out


@dataclass(frozen=True)
class _Group:
    """Sequences attended together: all of them, or a padded one by itself."""

    sequences: slice
    padding: int


def _groups(query: torch.Tensor, padding: list[int] | None) -> list[_Group]:
    if padding is None:
        return [_Group(slice(None), 0)]
    return [_Group(slice(b, b + 1), pad) for b, pad in enumerate(padding) if pad < query.shape[2]]


def _of(x: torch.Tensor, group: _Group) -> torch.Tensor:
    """A group's part of ``[batch, heads, tokens, dim]``, without the padding."""
    return x[group.sequences, :, group.padding :]


def _span(piece: Piece, group: _Group, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a group's tokens in a piece."""
    first, last = piece.spans[group.sequences.start or 0]
    tokens = piece.tokens[group.sequences, :, first : max(first, last)]
    return tokens[..., :head_dim], tokens[..., head_dim:]


def _discount(out: torch.Tensor, lse: torch.Tensor, attention_sinks: torch.Tensor | None) -> torch.Tensor:
    """Take the share of the learned sink logits off: out · exp(lse) / (exp(lse) + exp(sink))."""
    if attention_sinks is None:
        return out
    share = torch.sigmoid(lse - attention_sinks.float()[:, None])
    return out * share[..., None]
