"""Which tokens every method attends to besides its budget: the sinks and a window that grows and is cut like ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Sinks and window of a :class:`~tiered_kv.TieredCache`, granted to all methods alike.

    The tokens between the sinks and the window are the candidates that a budget is spent on. The window grows with
    every new token, and is cut back to ``window_size`` when it has gathered ``decode_segment`` more.

    Attributes:
        num_sink_tokens: First tokens, always attended.
        window_size: Newest tokens that are always attended.
        decode_segment: Tokens that gather beyond the window before they become candidates.
        prefill_segment: Tokens of a prompt that become candidates in one go.
    """

    num_sink_tokens: int = 16
    window_size: int = 64
    decode_segment: int = 320
    prefill_segment: int = 8192

    def after_prefill(self, length: int) -> int:
        """Start of the window after a prompt of ``length`` tokens, before the first decode step."""
        start, step = 0, self.prefill_segment + self.num_sink_tokens
        while length - start >= step + self.window_size:
            start, step = start + step, self.prefill_segment
        return start

    def before_step(self, length: int, start: int) -> int:
        """Start of the window for the decode step that takes token number ``length``, counted from 0."""
        is_full = length - start >= self.window_size + self.decode_segment
        return length - self.window_size if is_full else start
