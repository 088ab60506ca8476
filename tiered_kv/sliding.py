"""The newest tokens of a sliding-window layer during decode, at a fixed address, so that a captured step can hold them.

transformers' own sliding layers grow by concatenation. Here a buffer has some room to spare; attention reads its last
``sliding_window`` tokens, and when the room is used up the buffer is shifted, between steps.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tiered_kv.kernels.append import append_token
from tiered_kv.kernels.attend import Recent, attend
from tiered_kv.window import WindowClock, lasting

ROOM = 256
"""Tokens a buffer takes between two shifts."""


_births = itertools.count(1)


class SlidingBuffer:
    """Keys and values of the newest tokens, ``[rows, sliding_window + ROOM, width]``.

    Args:
        key: ``[batch, kv_heads, tokens, head_dim]`` of the newest tokens so far, at most ``sliding_window``.
        value: ``[batch, kv_heads, tokens, value_dim]``.
        sliding_window: Tokens a query attends to, itself included.
        seen: Tokens of the sequence so far.
        padding: Left padding of each sequence, or ``None``.
        clock: Places of the buffer in use, shared with the other sliding layers.
    """

    @lasting
    def __init__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sliding_window: int,
        seen: int,
        padding: list[int] | None,
        clock: WindowClock,
    ) -> None:
        self.batch, self.kv_heads, self.length, self.head_dim = key.shape
        self.sliding_window, self.seen, self.clock = sliding_window, seen, clock
        self.rebuilt = next(_births)
        rows, width = self.batch * self.kv_heads, self.head_dim + value.shape[3]
        self.tokens = key.new_zeros(rows, sliding_window + ROOM, width)
        self.tokens[:, : self.length] = torch.cat([key, value], dim=3).flatten(0, 1)
        first = torch.tensor(padding or [0] * self.batch, dtype=torch.int32) - (seen - self.length)
        self._first_token = first.clamp(min=0).repeat_interleave(self.kv_heads).to(key.device)
        self._no_sinks = torch.zeros_like(self._first_token)

    @property
    def window_length(self) -> int:
        return self.length

    @property
    def has_room(self) -> bool:
        """Whether the buffer takes a token more as it is."""
        return self.length < self.tokens.shape[1]

    def make_room(self) -> None:
        """Shift the last window to the front when the buffer is full."""
        if not self.has_room:
            kept = self.sliding_window - 1
            self.tokens[:, :kept] = self.tokens[:, self.length - kept :].clone()
            self._first_token.sub_(self.length - kept).clamp_(min=0)
            self.length = kept

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the newest token's ``[batch, kv_heads, 1, dim]`` at the place the clock gives."""
        append_token(self.tokens, key, value, self.clock.length, 0)
        self.note_appended()

    def note_appended(self) -> None:
        """Count the token that the device appended."""
        self.length += 1
        self.seen += 1

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens in the buffer and in all, as the host counts them."""
        return self.length, self.seen

    def recount(self, counted: tuple[int, int]) -> None:
        """Set what :attr:`counted` gives."""
        self.length, self.seen = counted

    def attend(
        self, query: torch.Tensor, *, attention_sinks: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Attention of ``[batch, query_heads, 1, head_dim]`` to the last ``sliding_window`` tokens."""
        if attention_sinks is not None:
            attention_sinks = attention_sinks.view(self.kv_heads, -1).repeat(self.batch, 1)
        start = torch.maximum(self._first_token, self.clock.length - self.sliding_window)
        recent = Recent(self.tokens, self._no_sinks, start, self.clock.length, 0)
        q = query.reshape(len(self.tokens), -1, self.head_dim)
        out = attend(q, recent, None, None, attention_sinks=attention_sinks, **options)
        return out.view(*query.shape[:3], -1)

    def newest(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the last ``sliding_window - 1`` tokens, ``[batch, kv_heads, tokens, dim]``."""
        kept = self.tokens[:, max(0, self.length - self.sliding_window + 1) : self.length]
        kept = kept.unflatten(0, (self.batch, self.kv_heads)).clone()
        return kept[..., : self.head_dim], kept[..., self.head_dim :]

    def addresses(self) -> tuple[int, ...]:
        """Where a captured decode step reads and writes."""
        return tuple(tensor.data_ptr() for tensor in (self.tokens, self._first_token, self._no_sinks))
