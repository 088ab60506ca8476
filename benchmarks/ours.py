"""Our own decode steps for the speed benchmarks: the product's graph behind ``model.forward``, driven by a trace."""

from __future__ import annotations

import argparse
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks import traces
from benchmarks.rows import Timing, captured, time_steps
from tiered_kv import TieredCache, TieredKVConfig, kv_cache_dispatched

SETTLING = 40
"""Steps before anything is timed: the GPU cluster cache starts empty, and its misses take that long to settle."""


class Decoder:
    """A dispatched model and a filled cache.

    Args:
        model: Dispatched.
        cache: Filled with ``context`` tokens.
        replay: What decides the selection.
    """

    def __init__(self, model: Any, cache: TieredCache, replay: traces.Replay) -> None:
        self.model, self.cache, self.replay = model, cache, replay
        self.context, self.batch = cache.get_seq_length(), cache.layers[0].batch_size
        self.token = torch.randint(3, model.config.vocab_size, (self.batch, 1), device=model.device)

    def step(self) -> torch.Tensor:
        """One decode step through ``model.forward``: the logits."""
        return self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits

    def rewind(self) -> None:
        """Drop what was decoded so far."""
        surplus = self.cache.get_seq_length() - self.context
        if surplus:
            self.cache.crop(-surplus)

    def timed(self, steps: int, measurements: int) -> tuple[Timing, dict[str, Any]]:
        """Time of a step once misses are steady, and what was counted over the same steps."""
        for _ in range(SETTLING):
            self.step()
        before = counted(self.cache)
        timing = time_steps(self.step, steps, measurements, warmup=0)
        return timing, since(before, counted(self.cache))

    def sustained(self) -> dict[str, Any]:
        """Steps over the time a segment takes to gather and be clustered, that included."""
        steps = self.cache.kv_config.decode_segment
        captures = self.model._tiered_kv.graph.captures
        timing = time_steps(self.step, steps, measurements=1, warmup=1, most_ms=1e9)
        return timing.fields() | {"captures": self.model._tiered_kv.graph.captures - captures}

    def generated(self, tokens: int) -> Timing:
        """Time of a token within plain ``generate()``, greedy."""
        ids = random_ids(self.model, self.cache, self.batch)
        return generate_times(self.model, self.cache, ids, tokens)

    def waits(self) -> str:
        """What a few steps make the host wait for: "none", or torch's complaint."""
        if not torch.cuda.is_available():
            return "not checked"
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                self.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "none"

    def replay_ms(self) -> float:
        """What replaying the trace adds to a step: it is part of every time reported, and is not taken off."""
        scores = [torch.zeros(layer.index.tables.sizes.shape, device=layer.device) for layer in self.replay.layers]

        def overwrite() -> None:
            self.replay.begin_step()
            for layer, score in zip(self.replay.layers, scores, strict=True):
                self.replay(layer.index.tables.sizes, score)

        return round(time_steps(captured(overwrite), measurements=3).ms, 4)


@contextmanager
def decoding(model: Any, cache: TieredCache, trace: traces.Trace, stride: int = 1) -> Iterator[Decoder]:
    """A :class:`Decoder` with a graph of its own; the cache is rewound before and after."""
    with torch.no_grad(), kv_cache_dispatched(model, cache.kv_config):
        replay = traces.Replay(trace, cache, stride)
        decoder = Decoder(model, cache, replay)
        hook = model.base_model.register_forward_pre_hook(replay.begin_step)
        try:
            with traces.scores_hooked(replay):
                yield decoder
            decoder.rewind()
        finally:
            hook.remove()
            decoder.model = decoder.cache = None  # the caller may still hold the decoder


def add_arguments(parser: argparse.ArgumentParser, budget: int = 2048) -> None:
    """What benchmarks of ours take: the budget, and any other option of the library by name."""
    parser.add_argument("--budget", type=int, default=budget, help=f"tokens attended per KV head (default {budget})")
    parser.add_argument(
        "--kv", nargs="+", default=[], metavar="NAME=VALUE", help="options of TieredKVConfig: --kv prefetch=next_layer"
    )


def kv_config(options: argparse.Namespace) -> TieredKVConfig:
    """Our options: the library's defaults but for what was asked for, or small ones for a smoke test."""
    small: dict[str, Any] = dict(
        num_sink_tokens=4, window_size=8, decode_segment=64, prefill_segment=256, tokens_per_cluster=4,
        max_cluster_tokens=8, block_size=4, kmeans_iterations=3,
    )  # fmt: skip
    chosen = small | {"token_budget": 64} if options.smoke else {"token_budget": options.budget}
    named = dict(item.split("=", 1) for item in options.kv)
    return TieredKVConfig.from_dict(chosen | {name: _value(text) for name, text in named.items()})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def memory_stats(cache: TieredCache) -> dict[str, Any]:
    """Bytes by tier, and averages of the selections so far."""
    stats = cache.stats()
    return {name: stats[name] for name in stats if name.endswith(("_bytes", "_per_lookup"))}


def counted(cache: TieredCache) -> dict[str, int]:
    """Every counter of the cache."""
    return {name: n for name, n in cache.stats().items() if isinstance(n, int) and not name.startswith("kv_")}


def since(before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """What was counted between, as shares of the tokens selected.

    Returns:
        ``miss_rate``: tokens that had to come from the host, fetched ahead or at the layer's turn;
        ``late_rate``: those that came at the layer's turn (all of them without prefetch);
        ``vain_rate``: tokens fetched ahead and not selected; and the ``counters``.
    """
    counters = {name: after[name] - before[name] for name in after if after[name] != before.get(name, 0)}
    late, selected = counters.get("recalled_tokens", 0), max(1, counters.get("selected_tokens", 0))
    ahead, used = counters.get("prefetched_tokens", 0), counters.get("used_prefetched_tokens", 0)
    rates = {"miss_rate": late + used, "late_rate": late, "vain_rate": ahead - used}
    return {name: round(tokens / selected, 4) for name, tokens in rates.items()} | {"counters": counters}


def random_ids(model: Any, cache: Any, batch: int) -> torch.Tensor:
    """A prompt of which ``cache`` holds all but the last token; of the rest ``generate()`` minds the length alone."""
    return torch.randint(3, model.config.vocab_size, (batch, cache.get_seq_length() + 1), device=model.device)


def generate_times(model: Any, cache: Any, ids: torch.Tensor, tokens: int, skip: int = 4) -> Timing:
    """Milliseconds between the forward passes of one ``generate()``, which waits for the GPU at every token itself."""
    with _stamped(model) as stamps:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
            max_new_tokens=tokens + skip,
        )  # fmt: skip
    times = [(b - a) * 1e3 for a, b in zip(stamps[skip:], stamps[skip + 1 :], strict=False)]
    return Timing(times, 1)


@contextmanager
def _stamped(model: Any) -> Iterator[list[float]]:
    """Note when each forward pass begins."""
    stamps: list[float] = []
    forward: Callable[..., Any] = model.forward
    own = model.__dict__.get("forward")

    def stamped(*args: Any, **inputs: Any) -> Any:
        stamps.append(time.perf_counter())
        return forward(*args, **inputs)

    stamped.__signature__ = inspect.signature(forward)
    model.forward = stamped
    try:
        yield stamps
    finally:
        model.__dict__.pop("forward")
        if own is not None:
            model.forward = own
