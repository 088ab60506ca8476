"""Sparse decode attention: sinks and window, the selected clusters, and the estimate of everything else.

A cluster that is not attended counts as ``size`` tokens of logit ``logits`` and its mean value:

    out = (Σ_attended exp(s_i)·v_i + Σ_rest size_c·exp(l_c)·v̄_c) / (Σ_attended exp(s_i) + Σ_rest size_c·exp(l_c) + exp(sink))

computed in pieces that are merged by log-sum-exp. ``attention_sinks`` are gpt-oss's learned logits: weight without a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Recent(NamedTuple):
    """Sinks and window of a layer, in one buffer.

    Attributes:
        tokens: ``[rows, sink_capacity + window_capacity, width]`` sinks first; a token is its key and value side by side.
        num_sinks: ``[rows]`` int32 sinks present.
        window_start: ``[rows]`` int32 first valid place of the window (left padding before it).
        window_length: ``[1]`` int32 places of the window in use.
        sink_capacity: Places for sinks.
    """

    tokens: torch.Tensor
    num_sinks: torch.Tensor
    window_start: torch.Tensor
    window_length: torch.Tensor
    sink_capacity: int


class Attended(NamedTuple):
    """The selected clusters as blocks in the GPU cluster cache.

    Attributes:
        cache: ``[rows, slots, block_size, width]``.
        slots: ``[rows, max_blocks]`` int32, -1 in the padding.
        lengths: ``[rows, max_blocks]`` int32, 0 in the padding.
    """

    cache: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor


class Estimated(NamedTuple):
    """The clusters of the index, of which those not chosen are estimated.

    Attributes:
        logits: ``[rows, group, clusters]`` float32 log-weight of one token.
        sizes: ``[rows, clusters]`` int32.
        chosen: ``[rows, clusters]`` bool, attended exactly.
        mean_values: ``[rows, clusters, value_dim]`` int8 or floating.
        value_scales: ``[rows, clusters]`` float32.
    """

    logits: torch.Tensor
    sizes: torch.Tensor
    chosen: torch.Tensor
    mean_values: torch.Tensor
    value_scales: torch.Tensor


def attend(
    query: torch.Tensor,
    recent: Recent,
    attended: Attended | None,
    estimated: Estimated | None,
    *,
    scale: float,
    softcap: float | None = None,
    attention_sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per row group.

    Args:
        query: ``[rows, group, head_dim]``.
        recent: Sinks and window.
        attended: Selected clusters, or ``None`` when nothing is clustered.
        estimated: The index, or ``None`` for no estimate.
        scale: Factor of q·k.
        softcap: Bound of the logits by tanh, when given.
        attention_sinks: ``[rows, group]`` float32 learned logits, when given.

    Returns:
        ``[rows, group, value_dim]`` in the query's dtype.
    """
    return attend_reference(
        query, recent, attended, estimated, scale=scale, softcap=softcap, attention_sinks=attention_sinks
    )


def attend_reference(query, recent, attended, estimated, *, scale, softcap=None, attention_sinks=None) -> torch.Tensor:
    """The same in plain torch and float32, in one softmax."""
    q, head_dim = query.float(), query.shape[-1]
    tokens, valid = recent.tokens, _recent_mask(recent)
    if attended is not None:
        tokens, valid = _append_blocks(tokens, valid, attended)
    tokens = torch.where(valid[..., None], tokens, 0).float()  # what is not valid may be anything, NaN too
    keys, values = tokens[..., :head_dim], tokens[..., head_dim:]
    logits = torch.matmul(q, keys.transpose(1, 2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~valid[:, None], float("-inf"))
    if estimated is not None:
        rest = (estimated.sizes > 0) & ~estimated.chosen
        weight = estimated.logits + estimated.sizes.clamp(min=1).float().log()[:, None]
        logits = torch.cat([logits, weight.masked_fill(~rest[:, None], float("-inf"))], dim=2)
        values = torch.cat([values, estimated.mean_values.float() * estimated.value_scales[..., None]], dim=1)
    if attention_sinks is not None:
        logits = torch.cat([logits, attention_sinks.float()[..., None]], dim=2)
        values = torch.cat([values, values.new_zeros(values.shape[0], 1, values.shape[2])], dim=1)
    return torch.matmul(torch.softmax(logits, dim=2), values).to(query.dtype)


def _recent_mask(recent: Recent) -> torch.Tensor:
    place = torch.arange(recent.tokens.shape[1], device=recent.tokens.device)[None]
    in_window = place - recent.sink_capacity
    is_sink = (in_window < 0) & (place < recent.num_sinks[:, None])
    return is_sink | ((in_window >= recent.window_start[:, None]) & (in_window >= 0) & (in_window < recent.window_length))


def _append_blocks(tokens, valid, attended: Attended):
    row = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    blocks = attended.cache[row, attended.slots.clamp(min=0).long()]
    inside = torch.arange(blocks.shape[2], device=tokens.device)
    block_valid = inside < attended.lengths[..., None]
    return torch.cat([tokens, blocks.flatten(1, 2)], 1), torch.cat([valid, block_valid.flatten(1, 2)], 1)
