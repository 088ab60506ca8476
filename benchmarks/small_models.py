"""Real small models under plain ``generate()``: ours beside transformers' caches; the same tokens as the torch path?

    python -m benchmarks.small_models                  # SmolLM2-135M at 7.5k tokens, Gemma-3-270M at 30k

``dynamic`` is transformers' DynamicCache, eager, within ``generate()``, and is compared with ours there.
``static_graph`` is the decode step of its StaticCache in a CUDA graph, and is compared with our replayed step; neither
has ``generate()`` around it. Times are milliseconds a new token. The models' selections are their own: no trace.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

from benchmarks import ours, peers, rows, shapes
from benchmarks.models import is_available, load_model, load_tokenizer
from benchmarks.quality.tasks.data import Data
from tiered_kv import TieredCache, TieredKVConfig, kv_cache_dispatched
from tiered_kv.kernels.dispatch import force_backend

LENGTHS = {"smollm2-135m": 7500, "gemma3-270m": 30000}
COLUMNS = (
    "model", "what", "context", "ms", "ms_p10", "ms_p90", "miss_rate", "overhead_ms", "peer", "ratio", "bar", "won",
    "note",
)  # fmt: skip


class Bench:
    """One model and its prompt.

    Args:
        name: For the rows.
        model: On its device.
        ids: ``[1, tokens]`` the prompt.
        kv_config: Ours.
        out: Where rows go.
        plan: Command line options.
    """

    def __init__(self, name: str, model: Any, ids: torch.Tensor, kv_config: TieredKVConfig, out: rows.Rows, plan: Any):
        self.model, self.ids, self.kv_config, self.out, self.plan = model, ids, kv_config, out, plan
        self.place = {"model": name, "context": ids.shape[1], "budget": kv_config.token_budget}

    def run(self) -> None:
        """Ours, then the peers, each compared with its like."""
        generated, step = self.ours()
        self.same_tokens()
        for mine, peer in ((generated, self.dynamic()), (step, self.static_graph())):
            if peer is not None:
                judged = rows.verdict(mine["ms"] / peer["ms"], 1.0)
                self.out.add(what=f"{mine['what']} over", **self.place, peer=peer["what"], **judged)

    def ours(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tokens of ``generate()`` after a prefill that is not counted, and the replayed step by itself."""
        with kv_cache_dispatched(self.model, self.kv_config):
            cache = TieredCache(self.model.config, self.kv_config)
            ids = self._after_a_token(cache)
            before = ours.counted(cache)
            times = ours.generate_times(self.model, cache, ids, self.plan.tokens, skip=8)
            counted = ours.since(before, ours.counted(cache))
            step = rows.time_steps(self._step(cache), self.plan.steps, self.plan.measurements)
            facts = {**counted, "settings": self.kv_config.to_dict(), "stats": ours.memory_stats(cache)}
            eager = self.model._tiered_kv.graph.refusal if self.model._tiered_kv.graph else None
            cache.close()
        overhead = round(times.ms - step.ms, 4)
        generated = self.out.add(what="ours", **self.place, **times.fields(), overhead_ms=overhead, **facts)
        return generated, self.out.add(what="ours, step", **self.place, **step.fields(), eager=eager)

    def dynamic(self) -> dict[str, Any]:
        cache = DynamicCache(config=self.model.config)
        ids = self._after_a_token(cache)
        times = ours.generate_times(self.model, cache, ids, min(self.plan.tokens, 32))
        peers.release()
        return self.out.add(what="dynamic", **self.place, **times.fields())

    def static_graph(self) -> dict[str, Any] | None:
        """The raw step in a graph; ``None`` where transformers' static layers cannot be captured."""
        cache = static_cache(self.model.config, self.ids.shape[1] + 512)
        token, position = self.ids[:, :1].clone(), torch.full_like(self.ids[:, :1], self.ids.shape[1])
        self.model(input_ids=self.ids, past_key_values=cache, logits_to_keep=1)
        try:
            step = rows.captured(lambda: self.model(input_ids=token, position_ids=position, past_key_values=cache))
            times = rows.time_steps(step, self.plan.steps, self.plan.measurements)
        except RuntimeError as error:
            self.out.add(what="static_graph", **self.place, note=str(error).splitlines()[0][:120])
            return None
        return self.out.add(what="static_graph", **self.place, **times.fields())

    def same_tokens(self) -> None:
        """Greedy tokens of the graph path and of the torch references run eagerly."""
        plain = TieredKVConfig(**self.kv_config.to_dict() | {"cuda_graph": False})
        tokens = self.plan.compared
        with kv_cache_dispatched(self.model, self.kv_config):
            fast = self._generate(None, tokens)
        with kv_cache_dispatched(self.model, plain), force_backend("torch"):
            slow = self._generate(None, tokens)
        same = int((fast == slow).int().cumprod(1).sum())
        note = f"{same} of {tokens} tokens alike before the first that differs"
        self.out.add(what="same tokens as torch path", **self.place, note=note, won=same == tokens)

    def _after_a_token(self, cache: Any) -> torch.Tensor:
        """Prefill ``cache`` and give the prompt with its first new token, which the cache has not seen."""
        return torch.cat([self.ids, self._generate(cache, 1)], dim=1)

    def _generate(self, cache: Any, tokens: int) -> torch.Tensor:
        ids = self.ids
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False, max_new_tokens=tokens
        )
        return made[:, ids.shape[1] :]

    def _step(self, cache: TieredCache) -> Any:
        token = self.ids[:, :1].clone()
        return lambda: self.model(input_ids=token, past_key_values=cache)


class CapturableSlidingLayer(StaticSlidingWindowLayer):
    """transformers' own, but for a tensor that it brings from the host at every step, which no capture allows."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        if key_states.shape[2] > 1 or self.cumulative_length_int < self.max_cache_len:
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.copy_(held.roll(-1, dims=2))
            held[:, :, -1:].copy_(new)
        return self.keys, self.values


def static_cache(config: Any, tokens: int) -> StaticCache:
    """A StaticCache all of whose layers can be captured."""
    cache = StaticCache(config=config, max_cache_len=tokens)
    for layer in cache.layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = CapturableSlidingLayer
    return cache


def real(name: str, tokens: int, device: torch.device, kind: str | None) -> tuple[Any, torch.Tensor]:
    """A real model in bf16 on the GPU, and the beginning of a book."""
    model = load_model(name, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
    model.generation_config.eos_token_id = None  # every run is as long as it is asked to be
    model.generation_config.pad_token_id = 0
    text = Data().text(kind) if kind else Data().any_prose()
    ids = load_tokenizer(name)(text[: 8 * tokens], return_tensors="pt").input_ids[:, :tokens]
    return model, ids.to(device)


def random_model(device: torch.device, tokens: int) -> tuple[Any, torch.Tensor]:
    model = shapes.make_model("tiny", device)
    return model, torch.randint(3, model.config.vocab_size, (1, tokens), device=device)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = rows.arguments(__doc__, "small_models")
    parser.add_argument("--models", nargs="+", default=list(LENGTHS))
    parser.add_argument("--tokens", type=int, default=128, help="new tokens timed")
    parser.add_argument("--compared", type=int, default=64, help="new tokens compared with the torch path")
    ours.add_arguments(parser, budget=1024)
    parser.add_argument("--steps", type=int, default=20, help="steps a measurement")
    parser.add_argument("--measurements", type=int, default=rows.MEASUREMENTS)
    parser.add_argument("--text", help="file of the evaluation data; by default a book, or Python's help")
    options: argparse.Namespace = parser.parse_args(arguments)
    device, out = rows.device_of(options), rows.open_rows("small_models", options)
    if options.smoke:
        options.models, options.tokens, options.compared, options.steps, options.measurements = ["tiny"], 4, 6, 2, 2
    for name in options.models:
        if name in LENGTHS and not is_available(name):
            out.add(what="ours", model=name, note="the model is not there: python -m benchmarks.models prepare")
            continue
        began = time.perf_counter()
        made = random_model(device, 700) if options.smoke else real(name, LENGTHS[name], device, options.text)
        Bench(name, *made, ours.kv_config(options), out, options).run()
        del made
        peers.release()
        print(f"  {name}: {time.perf_counter() - began:.0f} s")
    print(rows.table(out.rows, COLUMNS))


if __name__ == "__main__":
    main()
