"""Decode steps as one CUDA graph: captured once, replayed for every token, under plain ``generate()``.

A decode step of a tiered cache reads nothing from the host: lengths, tables and slots live on the GPU at fixed
addresses. So the whole model's step can be captured, and replayed until an address changes (the index grew, a dense
window grew).
What changes shapes or addresses happens between steps, in :meth:`Lane.make_room`.
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tiered_kv.cache import TieredCache

_CAPTURABLE_ARGUMENTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict",
}  # fmt: skip


class DecodeGraph:
    """A model's ``forward`` that runs decode steps from a captured graph where it can, and eagerly where it cannot.

    Args:
        forward: The model's own forward, bound.
        refusal: Why no step of this model can be captured, if that is known beforehand.

    Attributes:
        captures: Graphs captured so far.
        replays: Steps run from a graph so far.
        refusal: Why steps run eagerly, once that is known; it is said once.
    """

    def __init__(self, forward: Callable[..., Any], refusal: str | None = None) -> None:
        self.forward, self.refusal = forward, refusal
        self.captures = self.replays = 0
        self.__signature__ = inspect.signature(forward)  # generate() looks at it
        self._has_told = False
        self._cache: Callable[[], TieredCache | None] = lambda: None
        self._is_warm = False
        self._step: _CapturedStep | None = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """One forward pass of the model."""
        cache = inputs.get("past_key_values")
        if args or not isinstance(cache, TieredCache) or not _is_decode_step(cache, inputs):
            return self.forward(*args, **inputs)
        if self._cache() is not cache:
            self._cache, self._step, self._is_warm = weakref.ref(cache), None, False
        if not self._is_ready(cache):
            return self.forward(**inputs)
        return self._run(cache, inputs)

    def __deepcopy__(self, memo: dict) -> DecodeGraph:
        return DecodeGraph(copy.deepcopy(self.forward, memo), self.refusal)

    def _is_ready(self, cache: TieredCache) -> bool:
        """Whether the step can come from a graph; the first one runs eagerly, which compiles its kernels."""
        self._refuse(self.refusal or cache.capture_obstacle())
        if self.refusal is not None or not self._is_warm:
            self._is_warm = True
            return False
        for lane in cache.group.lanes:
            lane.make_room()
        return cache.is_decoding

    def _run(self, cache: TieredCache, inputs: dict[str, Any]) -> Any:
        if self._step is not None and self._step.fits(cache, inputs):
            for lane in cache.group.lanes:
                lane.note_step()
        else:
            self._step = None  # its memory goes before the next one's is taken
            self._step = self._capture(cache, inputs)
        if self._step is None:
            return self.forward(**inputs)
        self.replays += 1
        return self._step.replay(cache, inputs)

    def _capture(self, cache: TieredCache, inputs: dict[str, Any]) -> _CapturedStep | None:
        """Capture this step: the host counts it while it is captured, the device when it is replayed."""
        counted = [(lane.clock.host_length, [m.counted for m in lane.members]) for lane in cache.group.lanes]
        try:
            step = _CapturedStep(self.forward, cache, inputs)
        except Exception as error:
            for lane, (length, members) in zip(cache.group.lanes, counted, strict=True):
                lane.recount(length, members)
            self._refuse(f"{type(error).__name__}: {error}")
            return None
        self.captures += 1
        return step

    def _refuse(self, reason: str | None) -> None:
        self.refusal = reason
        if reason is not None and not self._has_told:
            self._has_told = True
            warnings.warn(f"tiered_kv decodes without a CUDA graph: {reason}", stacklevel=2)


class _CapturedStep:
    """One decode step in a CUDA graph, with the buffers it reads its inputs from."""

    def __init__(self, forward: Callable[..., Any], cache: TieredCache, inputs: dict[str, Any]) -> None:
        self._changes, self._addresses = _changes(cache), _addresses(cache)
        with torch.inference_mode(False):  # what is made in it could not be written to outside of it
            self._input_ids = inputs["input_ids"].clone()
            self._position_ids = _position_ids(inputs, cache.get_seq_length()).clone()
        self._graph = torch.cuda.CUDAGraph()
        options = {name: inputs[name] for name in ("use_cache", "logits_to_keep", "return_dict") if name in inputs}
        with _without_garbage_collection(), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            output = forward(
                input_ids=self._input_ids, position_ids=self._position_ids, past_key_values=cache, **options
            )
        self._logits, self._output_type = output.logits, type(output)

    def fits(self, cache: TieredCache, inputs: dict[str, Any]) -> bool:
        """Whether the graph still reads and writes where the cache is."""
        if inputs["input_ids"].shape != self._input_ids.shape:
            return False
        if _changes(cache) != self._changes:
            self._changes = _changes(cache)
            return _addresses(cache) == self._addresses
        return True

    def replay(self, cache: TieredCache, inputs: dict[str, Any]) -> Any:
        """Run the step, which is counted already; the output's tensors are the caller's to keep."""
        self._input_ids.copy_(inputs["input_ids"])
        self._position_ids.copy_(_position_ids(inputs, cache.get_seq_length() - 1))
        self._graph.replay()
        return self._output_type(logits=self._logits.clone(), past_key_values=cache)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collecting a dropped cache waits for the device before it unlocks pages, which would spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_decode_step(cache: Any, inputs: dict[str, Any]) -> bool:
    ids = inputs.get("input_ids")
    if not isinstance(cache, TieredCache) or ids is None or ids.shape[1] != 1 or not _can_capture(ids):
        return False
    if torch.is_grad_enabled() or cache.get_seq_length() == 0:
        return False
    used = {name for name, value in inputs.items() if value is not None and value is not False}
    return used <= _CAPTURABLE_ARGUMENTS and {"use_cache", "return_dict"}.isdisjoint(
        name for name, value in inputs.items() if value is False
    )


def _can_capture(ids: torch.Tensor) -> bool:
    return ids.is_cuda and not torch.cuda.is_current_stream_capturing()


def _position_ids(inputs: dict[str, Any], length: int) -> torch.Tensor:
    given = inputs.get("position_ids")
    return torch.full_like(inputs["input_ids"], length) if given is None else given


def _changes(cache: TieredCache) -> list[tuple[int, ...]]:
    """Differs from what it was when any address may have changed: room was made, rows or tokens were taken away."""
    return [(lane.changes, *(member.rebuilt for member in lane.members)) for lane in cache.group.lanes]


def _addresses(cache: TieredCache) -> list[list[tuple[int, ...]]]:
    return [[member.addresses() for member in lane.members] for lane in cache.group.lanes]
