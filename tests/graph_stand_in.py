"""CUDA graphs on the CPU: what a step computed is noted operator by operator, and computed again when it is replayed.

As on the device, a capture computes nothing that lasts, a replay reads and writes the memory that the capture saw, and
whatever Python decided or counted during capture stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tiered_kv import graphs
from tiered_kv.offload import cluster_cache


class Graph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        with torch.inference_mode():  # memory has no modes
            for step in self.steps:
                step()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(kwargs[argument.name] if argument.name in kwargs else args[place])
        result = func(*args, **kwargs)
        outputs = _tensors(result)

        def again() -> None:
            for output, fresh in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if output.data_ptr() != fresh.data_ptr():
                    output.copy_(fresh)

        self.graph.steps.append(again)
        return result

    def keep(self, tensor: torch.Tensor) -> None:
        """Remember memory that is about to be written, to put it back after the capture."""
        storage = tensor.untyped_storage()
        self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]


_recorders: list[_Recorder] = []


@contextmanager
def graph(graph: Graph, capture_error_mode: str) -> Iterator[None]:
    """In place of ``torch.cuda.graph``."""
    recorder = _Recorder(graph)
    _recorders.append(recorder)
    try:
        with recorder:
            yield
    finally:
        _recorders.remove(recorder)
        for storage, content in recorder.before.values():
            storage.copy_(content)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let decode steps on the CPU be captured."""
    recall = cluster_cache.recall_blocks

    def recall_as_one_operator(*args: Any, **options: Any) -> None:
        """Its reference looks at what is missing; the kernel does so on the device."""
        with _disable_current_modes():
            for recorder in _recorders:
                recorder.keep(args[-1])
                recorder.graph.steps.append(lambda: recall(*args, **options))
            recall(*args, **options)

    monkeypatch.setattr(cluster_cache, "recall_blocks", recall_as_one_operator)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(graphs, "_can_capture", lambda ids: True)
