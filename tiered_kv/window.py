"""Sinks and window of a layer: the first and the newest tokens, always on the device and always attended."""

from __future__ import annotations

import torch

from tiered_kv.kernels.append import append_token
from tiered_kv.kernels.attend import Recent
from tiered_kv.offload.cluster_cache import take_rows

GROWTH = 512
"""Tokens the window's buffer grows by while everything is still attended exactly."""


lasting = torch.inference_mode(False)
"""Decorator of what makes buffers: made under ``inference_mode``, they could not be updated outside of it."""


class WindowClock:
    """The length of the window, as a device scalar and on the host; shared by all layers of a device.

    Layers move in step, so one scalar serves them all: a captured decode step reads it from the device.
    """

    @lasting
    def __init__(self, device: torch.device) -> None:
        self.length = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_length = 0

    def advance(self) -> None:
        """One token more."""
        self.length.add_(1)
        self.host_length += 1

    def set(self, length: int) -> None:
        """Put the device right where it differs."""
        if length != self.host_length:
            self.length.fill_(length)
            self.host_length = length


class Window:
    """One buffer ``[rows, sink_capacity + capacity, width]``: sinks first, then the window from its oldest token on.

    Args:
        rows: KV heads times sequences.
        sink_capacity: Places for sinks.
        width: Numbers a token: key and value side by side.
        dtype: Of the tokens.
        device: Where the buffer is.
        clock: Length of the window on the device.
    """

    def __init__(
        self,
        rows: int,
        sink_capacity: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        clock: WindowClock,
    ) -> None:
        self.sink_capacity, self.clock = sink_capacity, clock
        self.length = 0
        self.buffer = torch.zeros(rows, sink_capacity, width, dtype=dtype, device=device)
        self.num_sinks = torch.zeros(rows, dtype=torch.int32, device=device)
        self.start = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        return self.buffer.shape[1] - self.sink_capacity

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()

    @property
    def sinks(self) -> torch.Tensor:
        """``[rows, sink_capacity, width]`` of which the first ``num_sinks`` of each row are present."""
        return self.buffer[:, : self.sink_capacity]

    @property
    def tokens(self) -> torch.Tensor:
        """``[rows, length, width]`` the window, oldest first."""
        return self.buffer[:, self.sink_capacity : self.sink_capacity + self.length]

    def view(self) -> Recent:
        """What attention reads."""
        return Recent(self.buffer, self.num_sinks, self.start, self.clock.length, self.sink_capacity)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the newest token's ``[batch, kv_heads, 1, dim]`` at the place the clock gives; ``length`` stays."""
        append_token(self.buffer, key, value, self.clock.length, self.sink_capacity)

    def replace(self, tokens: torch.Tensor, capacity: int) -> None:
        """Let ``tokens`` ``[rows, length, width]`` be the window, in a buffer with room for ``capacity`` of them."""
        rows, length, width = tokens.shape
        if capacity == self.capacity:
            tokens = tokens.clone()  # it may lie in the very buffer that it is moved within
        else:
            sinks = self.sinks
            self.buffer = tokens.new_zeros(rows, self.sink_capacity + capacity, width)
            self.sinks.copy_(sinks)
        self.length = length
        self.tokens.copy_(tokens)

    def reserve(self, length: int) -> None:
        """Make room for a window of ``length`` tokens."""
        if length > self.capacity:
            self.replace(self.tokens, -(-length // GROWTH) * GROWTH)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was."""
        self.buffer = take_rows(self.buffer, rows)
        self.num_sinks, self.start = take_rows(self.num_sinks, rows), take_rows(self.start, rows)
