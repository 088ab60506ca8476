"""Decode steps of the peers, each as a call that runs one step of a model that has seen ``context`` tokens.

====================  =====================================================================================
``floor``             the full-KV graph with 128 tokens: what no cache can beat
``full_graph``        all keys and values on the GPU, the fastest SDPA, in a CUDA graph
``static_graph``      transformers' StaticCache, its own SDPA, in a CUDA graph
``dynamic``           transformers' DynamicCache, eager
``offloaded``         transformers' ``DynamicCache(offloading=True)``, eager
====================  =====================================================================================
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import fill, full_attention
from benchmarks.rows import captured

PEERS = ("floor", "full_graph", "static_graph", "dynamic", "offloaded")
CUDA_ONLY = ("offloaded",)
FLOOR_CONTEXT = 128


@dataclass
class Peer:
    """A peer, ready to run.

    Attributes:
        step: Runs one decode step.
        cache: What it decodes with.
        facts: What is worth a place in its row.
    """

    step: Callable[[], Any] | None
    cache: Any
    facts: dict[str, Any]


class _Inputs:
    """One token a sequence, at a fixed address."""

    def __init__(self, model: Any, batch: int, position: int) -> None:
        self.input_ids = torch.randint(3, model.config.vocab_size, (batch, 1), device=model.device)
        self.position_ids = torch.full_like(self.input_ids, position)


@contextmanager
def running(name: str, model: Any, batch: int, context: int) -> Iterator[Peer]:
    """Set a peer up and take it down again, with its memory.

    Raises:
        torch.OutOfMemoryError: It does not fit.
    """
    previous, peer = model.config._attn_implementation, None
    try:
        with torch.no_grad():
            peer = _BUILDERS[name](model, batch, context)
            yield peer
    finally:
        if peer is not None:
            peer.step = peer.cache = None  # the caller may still hold the peer
        model.set_attn_implementation(previous)
        release()


def release() -> None:
    """Give unused memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _full_graph(model: Any, batch: int, context: int) -> Peer:
    place = (model.config, batch, context, model.device, model.dtype)
    name, attend, times = full_attention.fastest(*place)
    release()
    full_attention.register(attend)
    model.set_attn_implementation(full_attention.NAME)
    cache, inputs = full_attention.full_cache(*place), _Inputs(model, batch, context - 1)
    return Peer(captured(_forward(model, cache, inputs)), cache, {"attention": name, "variants": times})


def _floor(model: Any, batch: int, context: int) -> Peer:
    return _full_graph(model, batch, FLOOR_CONTEXT)


def _static_graph(model: Any, batch: int, context: int) -> Peer:
    model.set_attn_implementation("sdpa")
    cache = fill.fill_static(model.config, batch, context, model.device, model.dtype)
    return Peer(captured(_forward(model, cache, _Inputs(model, batch, context))), cache, {})


def _dynamic(model: Any, batch: int, context: int, offloading: bool = False) -> Peer:
    model.set_attn_implementation("sdpa")
    cache = fill.fill_dynamic(model.config, batch, context, model.device, model.dtype, offloading)
    inputs = _Inputs(model, batch, context)
    return Peer(lambda: model(input_ids=inputs.input_ids, past_key_values=cache), cache, {})


def _offloaded(model: Any, batch: int, context: int) -> Peer:
    return _dynamic(model, batch, context, offloading=True)


def _forward(model: Any, cache: Any, inputs: _Inputs) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        return model(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, past_key_values=cache, use_cache=True
        ).logits

    return forward


_BUILDERS: dict[str, Callable[[Any, int, int], Peer]] = {
    "floor": _floor,
    "full_graph": _full_graph,
    "static_graph": _static_graph,
    "dynamic": _dynamic,
    "offloaded": _offloaded,
}
