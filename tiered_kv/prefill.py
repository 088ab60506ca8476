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
    chunk = torch.cat([key, value], dim=-1)
    if padding is None:
        parts = _attend_pieces(query, chunk, ((p.tokens, p.spans[0]) for p in earlier), scale, softcap)
        return _discount(*parts, attention_sinks).to(query.dtype)
    pieces = list(earlier)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for b, pad in enumerate(padding):
        if pad < query.shape[2]:
            mine = ((p.tokens[b : b + 1], p.spans[b]) for p in pieces)
            part = _attend_pieces(query[b : b + 1, :, pad:], chunk[b : b + 1, :, pad:], mine, scale, softcap)
            out[b : b + 1, :, pad:] = _discount(*part, attention_sinks)
    return out


def _attend_pieces(
    query: torch.Tensor,
    chunk: torch.Tensor,
    earlier: Iterable[tuple[torch.Tensor, tuple[int, int]]],
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the chunk itself, causally, and to the given spans of earlier pieces, merged."""
    dim = query.shape[-1]
    part = attend_piece(query, chunk[..., :dim], chunk[..., dim:], causal=True, scale=scale, softcap=softcap)
    for tokens, (first, last) in earlier:
        if first < last:
            key, value = tokens[:, :, first:last, :dim], tokens[:, :, first:last, dim:]
            part = merge_pieces(*part, *attend_piece(query, key, value, causal=False, scale=scale, softcap=softcap))
    return part


def _discount(out: torch.Tensor, lse: torch.Tensor, attention_sinks: torch.Tensor | None) -> torch.Tensor:
    """Take the share of the learned sink logits off: out · exp(lse) / (exp(lse) + exp(sink))."""
    if attention_sinks is None:
        return out
    share = torch.sigmoid(lse - attention_sinks.float()[:, None])
    return out * share[..., None]
