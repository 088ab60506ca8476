"""The one module that owns CUDA streams and events: who copies when, and who waits for whom.

======================  ==========================  ====================================================
crossing                recorded                    waited for
======================  ==========================  ====================================================
compute → offload       after the segment is made   by the offload stream, before it reads the segment
offload → load          after the copy to the host  by the load stream, before it reads the host
offload → host          after the copy to the host  by the host, before it picks rows, moves or gives memory back
offload → compute       after the copy to the host  by compute, before a decode step recalls from the host
load → compute          after the copy to the GPU   by compute, before attention reads the piece
compute → ahead         when a fetch begins         by the prefetch stream, before it computes a guess or writes a slot
ahead → compute         when a fetch ends           by compute, before that layer looks up or changes its slots
compute → load          allocator                   a piece's memory is reused only after compute is done with it
======================  ==========================  ====================================================

On a CPU device every copy is done when the call returns, and there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class TransferEngine:
    """Copies between one device and host memory, in order, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._offload_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._load_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._ahead_stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._offloaded: torch.cuda.Event | None = None

    def offload(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy ``source`` on the device to ``destination`` in pinned host memory, once ``source`` is computed."""
        if self._offload_stream is None:
            destination.copy_(source)
            return
        self._offload_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._offload_stream):
            destination.copy_(source, non_blocking=True)
            self._offloaded = self._offload_stream.record_event()
        source.record_stream(self._offload_stream)

    def wait_for_offloads(self) -> None:
        """Make the computation that follows wait until everything offloaded so far has landed in host memory."""
        if self._offloaded is not None:  # kept: another cache may compute on another stream
            torch.cuda.current_stream(self.device).wait_event(self._offloaded)

    def finish_offloads(self) -> None:
        """Make the host wait until everything offloaded so far has landed."""
        if self._offload_stream is not None:
            self._offload_stream.synchronize()

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Run what is inside on the prefetch stream, after all that was computed so far; works within a capture."""
        if self._ahead_stream is None:
            yield
            return
        self._ahead_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._ahead_stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what the current stream was given so far, for :meth:`wait_for`."""
        return torch.cuda.current_stream(self.device).record_event() if self._is_cuda else None

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Make the computation that follows wait for an event of :meth:`mark`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def load(self, sources: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Bring host tensors to the device one after the other, the next one while the present one is used."""
        if self._load_stream is None:
            yield from sources
            return
        if self._offload_stream is not None:
            self._load_stream.wait_stream(self._offload_stream)
        ahead: tuple[torch.Tensor, torch.cuda.Event] | None = None
        for source in sources:
            following = self._start_load(source)
            if ahead is not None:
                yield self._arrived(*ahead)
            ahead = following
        if ahead is not None:
            yield self._arrived(*ahead)

    def __deepcopy__(self, memo: dict) -> TransferEngine:
        return self

    def _start_load(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        assert self._load_stream is not None
        with torch.cuda.stream(self._load_stream):
            piece = source.to(self.device, non_blocking=True)
            return piece, self._load_stream.record_event()

    def _arrived(self, piece: torch.Tensor, event: torch.cuda.Event) -> torch.Tensor:
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(event)
        piece.record_stream(compute)
        return piece


_engines: dict[torch.device, TransferEngine] = {}


def engine_for(device: torch.device) -> TransferEngine:
    """The transfer engine of a device; one for all caches, made when first asked for."""
    if device not in _engines:
        _engines[device] = TransferEngine(device)
    return _engines[device]
