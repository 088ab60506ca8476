"""One attention layer of the research cache: the prompt's keys and values once, each method's own continuation.

The batch rows of a decode step are the methods under test (one row a budget), all fed the same token. They share the
prompt's keys and values; what they append differs, because their hidden states do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import CacheLayerMixin

from benchmarks.quality.methods.base import Method, Prompt, dot, mix

KEPT_QUERIES = 256
"""Last queries of the prompt that methods may look at."""

ROWS_AT_ONCE = 256
"""Queries whose whole attention is held at once where attention is summed or cannot be left to torch."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How logits become weights: factor, bound by tanh, and learned sink logits ``[query_heads]`` without a value."""

    scale: float
    softcap: float | None = None
    attention_sinks: torch.Tensor | None = None


@dataclass
class Share:
    """A method's batch rows and what it keeps about this layer."""

    method: Method
    rows: slice
    state: Any = None


class ResearchLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Args:
        sliding_window: Tokens a query sees, itself included; ``None`` for full attention, where the methods act.
        collect_sums: Sum the attention that every prompt token receives (needs every pair: slow on a CPU).
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False

    def __init__(self, sliding_window: int | None, collect_sums: bool) -> None:
        super().__init__()
        self.window, self.collect_sums = sliding_window, collect_sums and sliding_window is None
        self.seen = 0
        self.offset = 0
        self.shares: list[Share] = []
        self.decoding = False
        self.unseen: torch.Tensor
        """``[kept + capacity]`` bool, positions that no row may attend to in this step; set by the cache."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.queries: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Store ``[batch, heads, tokens, dim]`` and return it tagged with this layer, for the attention function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.decoding:
            self.tail_keys.index_copy_(2, self.place, key_states.transpose(0, 1))
            self.tail_values.index_copy_(2, self.place, value_states.transpose(0, 1))
        else:
            self.keys = torch.cat([self.keys, key_states], dim=2)
            self.values = torch.cat([self.values, value_states], dim=2)
        self.seen += key_states.shape[2]
        key_states = key_states.view_as(key_states)
        key_states.research_layer = self
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # Prefill: one sequence, exact causal attention.

    def attend_chunk(self, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Exact attention of ``[1, query_heads, tokens, head_dim]``, the newest tokens, to all they may see."""
        group = query.shape[1] // self.keys.shape[1]
        self.scoring = scoring
        earlier = query if self.queries is None else torch.cat([self.queries, query], dim=2)
        self.queries = earlier[:, :, -KEPT_QUERIES:].clone()
        if self.collect_sums:
            self._add_sums(query, scoring)
        if scoring.softcap is not None or scoring.attention_sinks is not None:
            return self._attend_plainly(query, scoring)
        first = 0 if self.window is None else max(0, self.seen - query.shape[2] - self.window + 1)
        keys, values = (x[:, :, first:].repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        if query.shape[2] == self.seen and self.window is None:
            return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scoring.scale)
        mask = self._sees(query.shape[2], 0)[:, first:]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scoring.scale)

    def _sees(self, queries: int, behind: int) -> torch.Tensor:
        """``[queries, tokens]`` bool: what queries see of all tokens; the last of them is ``behind`` tokens old."""
        last = self.seen - behind
        query = torch.arange(last - queries, last, device=self.keys.device)[:, None]
        token = torch.arange(self.seen, device=self.keys.device)[None]
        sees = token <= query
        return sees if self.window is None else sees & (token > query - self.window)

    def _weights(self, query: torch.Tensor, behind: int, scoring: Scoring) -> torch.Tensor:
        """``[heads, group, queries, tokens]`` probabilities of ``[1, query_heads, queries, head_dim]``."""
        heads, count = self.keys.shape[1], query.shape[2]
        q = query[0].unflatten(0, (heads, -1)).float()
        logits = _bounded(dot(q, self.keys[0]) * scoring.scale, scoring.softcap)
        logits = logits.masked_fill(~self._sees(count, behind), float("-inf"))
        if scoring.attention_sinks is None:
            return logits.softmax(-1)
        sink = scoring.attention_sinks.float().view(heads, -1, 1, 1).expand(-1, -1, count, 1)
        return torch.cat([logits, sink], dim=3).softmax(-1)[..., :-1]

    def _attend_plainly(self, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        out, behind = [], query.shape[2]
        for some in query.split(ROWS_AT_ONCE, dim=2):
            behind -= some.shape[2]
            weights = self._weights(some, behind, scoring)
            out.append(mix(weights, self.values[0]).flatten(0, 1))
        return torch.cat(out, dim=1)[None].to(query.dtype)

    def _add_sums(self, query: torch.Tensor, scoring: Scoring) -> None:
        received = torch.zeros(self.keys.shape[1], self.seen, device=query.device)
        if self.sums is not None:
            received[:, : self.sums.shape[1]] = self.sums
        behind = query.shape[2]
        for some in query.split(ROWS_AT_ONCE, dim=2):
            behind -= some.shape[2]
            received += self._weights(some, behind, scoring).sum((1, 2))
        self.sums = received

    # Decode: one row a method and budget.

    def start_decoding(self, methods: list[Method], first: int, last: int, place: torch.Tensor, capacity: int) -> None:
        """Let methods see the prompt, of which ``[first, last)`` are candidates.

        Args:
            place: ``[1]`` int64 place of the newest token after the prompt, kept up to date by the session.
            capacity: Tokens that will follow the prompt.
        """
        self.decoding, self.place, self.capacity = True, place, capacity
        self.candidates = (first, last)
        rows = sum(method.rows for method in methods)
        if self.window is not None:
            self.offset = max(0, self.seen - self.window + 1)
        self.prompt_keys, self.prompt_values = self.keys[0, :, self.offset :], self.values[0, :, self.offset :]
        heads, self.kept = self.prompt_keys.shape[:2]
        self.tail_keys = self.keys.new_zeros(heads, rows, capacity, self.keys.shape[3])
        self.tail_values = self.values.new_zeros(heads, rows, capacity, self.values.shape[3])
        if self.window is None:
            self.shares = self._shares(methods)

    def _shares(self, methods: list[Method]) -> list[Share]:
        prompt, row, shares = self._prompt(methods), 0, []
        for method in methods:
            shares.append(Share(method, slice(row, row + method.rows), method.start(prompt)))
            row += method.rows
        return shares

    def _prompt(self, methods: list[Method]) -> Prompt:
        assert self.queries is not None
        first, last = self.candidates
        attention = None
        if any(method.needs_attention for method in methods):
            attention = self._weights(self.queries[:, :, -64:], 0, self.scoring)[..., first:last]
        queries = self.queries[0].unflatten(0, (self.keys.shape[1], -1))
        return Prompt(
            self.prompt_keys[:, first:last], self.prompt_values[:, first:last], queries, attention, self.sums,
            first, self.seen + self.capacity, self.scoring.scale,
        )  # fmt: skip

    def absorb(self, last: int) -> None:
        """The window now starts at position ``last``; what left it becomes candidates."""
        begin, self.candidates = self.candidates[1], (self.candidates[0], last)
        for share in self.shares:
            keys, values = (self._gathered(x, share, begin, last) for x in ("keys", "values"))
            replaced = share.method.absorb(share.state, keys, values)
            if replaced is not None:
                share.state = self._replace(share, begin, *replaced)

    def _gathered(self, what: str, share: Share, begin: int, end: int) -> torch.Tensor:
        """``[heads, rows, tokens, dim]`` of positions ``[begin, end)`` in the share's rows."""
        prompt, tail = getattr(self, f"prompt_{what}"), getattr(self, f"tail_{what}")[:, share.rows]
        from_prompt = prompt[:, None, begin : min(end, self.kept)].expand(-1, tail.shape[1], -1, -1)
        return torch.cat([from_prompt, tail[:, :, max(0, begin - self.kept) : max(0, end - self.kept)]], dim=2)

    def _replace(self, share: Share, begin: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Write back what a method of one row made of absorbed tokens; returns its prompt, longer by those in it."""
        in_prompt = max(0, self.kept - begin)
        at = max(0, begin - self.kept)
        end = at + keys.shape[2] - in_prompt
        self.tail_keys[:, share.rows, at:end] = keys[:, :, in_prompt:]
        self.tail_values[:, share.rows, at:end] = values[:, :, in_prompt:]
        own_keys, own_values = share.method.own_prompt(share.state)  # type: ignore[misc]
        return (
            torch.cat([own_keys, keys[:, 0, :in_prompt]], dim=1),
            torch.cat([own_values, values[:, 0, :in_prompt]], dim=1),
        )

    def attend_token(self, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attention of each row's newest token, ``[rows, query_heads, 1, head_dim]``."""
        q = query.unflatten(1, (self.prompt_keys.shape[0], -1))[:, :, :, 0].transpose(0, 1).float()
        logits = torch.cat([self._prompt_logits(q), dot(q, self.tail_keys)], dim=3)
        logits = _bounded(logits * scoring.scale, scoring.softcap).masked_fill_(self.unseen, float("-inf"))
        first, last = self.candidates
        for share in self.shares:
            open_logits = logits[:, share.rows, :, first:last]
            if last > first and (chosen := share.method.select(share.state, q[:, share.rows], open_logits)) is not None:
                open_logits.masked_fill_(~chosen, float("-inf"))
        total = logits.logsumexp(3, keepdim=True)
        weights = logits.sub_(total).exp_()
        out = self._prompt_values(weights[..., : self.kept]) + mix(weights[..., self.kept :], self.tail_values)
        for share in self.shares:
            self._finish(share, q, weights, total, out)
        if scoring.attention_sinks is not None:
            sinks = scoring.attention_sinks.float().view(q.shape[0], 1, -1, 1)
            out = out * torch.sigmoid(total - sinks)
        return out.transpose(0, 1).flatten(1, 2)[:, :, None].to(query.dtype)

    def _finish(
        self, share: Share, q: torch.Tensor, weights: torch.Tensor, total: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Show the method its attention, and merge its estimate into the rows' output."""
        share.method.observe(share.state, weights[:, share.rows])
        first, last = self.candidates
        rest = share.method.rest(share.state, q[:, share.rows]) if last > first else None
        if rest is not None:
            both = torch.logaddexp(total[:, share.rows], rest[0])
            exact = out[:, share.rows] * (total[:, share.rows] - both).exp()
            out[:, share.rows] = exact + rest[1] * (rest[0] - both).exp()
            total[:, share.rows] = both

    def _prompt_logits(self, q: torch.Tensor) -> torch.Tensor:
        logits = dot(q, self.prompt_keys)
        first, last = self.candidates
        for share in self.shares:
            own = share.method.own_prompt(share.state)
            if own is not None:
                logits[:, share.rows, :, first : min(last, self.kept)] = dot(q[:, share.rows], own[0])
        return logits

    def _prompt_values(self, weights: torch.Tensor) -> torch.Tensor:
        out = mix(weights, self.prompt_values)
        first, last = self.candidates
        for share in self.shares:
            own = share.method.own_prompt(share.state)
            if own is not None:
                at = slice(first, min(last, self.kept))
                change = own[1].float() - self.prompt_values[:, at].float()
                out[:, share.rows] += mix(weights[:, share.rows, :, at], change)
        return out


def _bounded(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
