"""Selection traces: which clusters real models rank highest, step after step, recorded once and replayed in benchmarks.

    python -m benchmarks.traces record smollm2-135m --tokens 7500      # minutes on a CPU
    python -m benchmarks.traces record gemma3-270m --tokens 30000      # on the GPU
    python -m benchmarks.traces rates                                  # what an LRU would miss, by cache size

Misses depend on how a model's attention moves, which random weights don't show. So the benchmarks run random weights at
full size, scoring included, and then let a trace's ranking overwrite the scores: see :class:`Replay`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import about
from tiered_kv import TieredCache, TieredKVConfig, kv_cache_dispatched
from tiered_kv import layer as layer_module
from tiered_kv.generation import prefill
from tiered_kv.kernels.dispatch import tl, triton, use_triton

FOLDER = Path(__file__).with_name("traces")
TOP = 256
STREAMS = 24
Hook = Callable[[torch.Tensor, torch.Tensor], None]

MISS_RATES: dict[float, tuple[tuple[str, float, int], ...]] = {
    0.0: (("drift", 2.0, 0),),
    0.01: (("smollm2", 2.0, 1), ("drift", 4.0, 1)),
    0.1: (("smollm2", 1.0, 1), ("drift", 1.0, 1)),
    0.2: (("gemma3", 2.0, 1), ("drift", 1.0, 4)),
    0.4: (("gemma3", 1.0, 1), ("drift", 1.0, 16)),
}
"""Trace, size of the GPU cluster cache in budgets and stride that come close to a token miss rate; the first whose
trace is there serves."""

TOP_SCORE, SCORE_SPAN = 24.0, 4.0
"""Overwritten scores fall from the one by the other: above all that random weights give, yet of the same order, so that
selection's bisection takes about as many rounds as it does by itself."""


@dataclass(frozen=True)
class Trace:
    """Cluster numbers by descending score, ``[streams, steps, TOP]`` int16; a stream is one KV head of one layer."""

    name: str
    ids: np.ndarray
    about: dict[str, Any]

    @property
    def clusters(self) -> int:
        return int(self.ids.max()) + 1


@contextmanager
def scores_hooked(hook: Hook) -> Iterator[None]:
    """Call ``hook(sizes, scores)`` after every scoring of clusters by a tiered layer, ``scores`` its to change."""
    scored = layer_module.score_clusters

    def score_clusters(query: torch.Tensor, *tables: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, scores = scored(query, *tables, **options)
        hook(tables[4], scores)
        return logits, scores

    layer_module.score_clusters = score_clusters
    try:
        yield
    finally:
        layer_module.score_clusters = scored


@triton.jit
def overwrite_kernel(
    score_ptr, ids_ptr, injection_ptr, stream_ptr, phase_ptr, step_ptr, clusters, known, steps, top_score, fall,
    TOP: tl.constexpr,
):  # fmt: skip
    """The ranking of this step over the scores of one row."""
    row = tl.program_id(0).to(tl.int64)
    stream, phase = tl.load(stream_ptr + row), tl.load(phase_ptr + row)
    rank = tl.arange(0, TOP)
    ids = tl.load(ids_ptr + (stream * steps + (tl.load(step_ptr) + phase) % steps) * TOP + rank)
    cluster = tl.load(injection_ptr + row * known + ids.to(tl.int64))
    tl.store(score_ptr + row * clusters + cluster, top_score - rank.to(tl.float32) * fall)


class Replay:
    """Lets a trace decide what a cache selects; one small kernel a layer, its step counter on the device.

    Every row of every layer takes a stream of its own, in a phase of its own, its cluster numbers scattered at random
    over the row's clusters; so rows differ, and yet each moves as the model's attention did.

    Args:
        trace: What to replay.
        cache: Filled.
        stride: Steps of the trace a decode step; 0 selects the same clusters for ever.
        seed: Of streams, phases and places.
    """

    def __init__(self, trace: Trace, cache: TieredCache, stride: int = 1, seed: int = 0) -> None:
        self.layers, self.stride = cache.group.layers, stride
        device = self.layers[0].device
        generator = torch.Generator(device).manual_seed(seed)
        self.ids = torch.from_numpy(trace.ids.astype(np.int16)).to(device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (len(self.layers), self.layers[0].rows)
        self.streams = torch.randint(len(trace.ids), shape, device=device, generator=generator)
        self.phases = torch.randint(trace.ids.shape[1], shape, device=device, generator=generator)
        self.places = [_scatter(layer.index.tables.sizes, trace.clusters, generator) for layer in self.layers]

    def __call__(self, sizes: torch.Tensor, scores: torch.Tensor) -> None:
        """Overwrite the scores of the layer that has these sizes."""
        number = next(n for n, layer in enumerate(self.layers) if layer.index.tables.sizes is sizes)
        if number == 0:
            self.step.add_(self.stride)
        if use_triton(scores):
            self._overwrite(number, scores)
            return
        steps = (self.step + self.phases[number]) % self.ids.shape[1]
        ids = self.ids[self.streams[number], steps].long()
        rank = torch.arange(TOP, device=scores.device, dtype=torch.float32)
        value = (TOP_SCORE - rank * (SCORE_SPAN / TOP)).expand(len(scores), -1)
        scores.scatter_(1, self.places[number].gather(1, ids), value)

    def _overwrite(self, number: int, scores: torch.Tensor) -> None:
        places = self.places[number]
        overwrite_kernel[(len(scores),)](
            scores, self.ids, places, self.streams[number], self.phases[number], self.step,
            scores.shape[1], places.shape[1], self.ids.shape[1], TOP_SCORE, SCORE_SPAN / TOP, TOP=TOP,
        )  # fmt: skip


def _scatter(sizes: torch.Tensor, known: int, generator: torch.Generator) -> torch.Tensor:
    """For each row, ``known`` different clusters that exist, in random order; some twice where there are fewer."""
    lottery = torch.rand(sizes.shape, device=sizes.device, generator=generator).masked_fill(sizes == 0, -1)
    order = lottery.argsort(1, descending=True)
    number = torch.arange(known, device=sizes.device) % (sizes > 0).sum(1, keepdim=True)
    return order.gather(1, number)


class Recorder:
    """Notes the best clusters of some layers at each step."""

    def __init__(self) -> None:
        self.steps: list[list[torch.Tensor]] = []

    def begin_step(self) -> None:
        self.steps.append([])

    def __call__(self, sizes: torch.Tensor, scores: torch.Tensor) -> None:
        best = scores.topk(min(TOP, scores.shape[1])).indices.to(torch.int16)
        self.steps[-1].append(best.cpu())

    def ids(self, streams: int) -> np.ndarray:
        """``[streams, steps, TOP]`` of layers spread over the model's depth."""
        ids = torch.stack([torch.stack(step) for step in self.steps], dim=2)  # layers, rows, steps, top
        layers = max(1, min(len(ids), streams // ids.shape[1]))
        chosen = torch.linspace(0, len(ids) - 1, layers).round().long()
        return ids[chosen].flatten(0, 1).numpy()


@torch.no_grad()
def record(model: Any, ids: torch.Tensor, steps: int, kv_config: TieredKVConfig, streams: int = STREAMS) -> np.ndarray:
    """The rankings of ``steps`` decode steps that are forced along the last of ``ids`` ``[1, tokens]``."""
    recorder, prompt = Recorder(), ids[:, :-steps]
    with kv_cache_dispatched(model, kv_config):
        cache = TieredCache(model.config, kv_config)
        prefill(model, cache, prompt, chunk_tokens=1024 if ids.device.type == "cpu" else None)
        model(input_ids=prompt[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)
        with scores_hooked(recorder):
            for place in range(prompt.shape[1], ids.shape[1]):
                recorder.begin_step()
                model(input_ids=ids[:, place : place + 1], past_key_values=cache)
        cache.close()
    return recorder.ids(streams)


def save(name: str, ids: np.ndarray, facts: dict[str, Any], folder: Path = FOLDER) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.npz"
    np.savez_compressed(path, ids=ids, about=json.dumps(facts))
    return path


def load(name: str) -> Trace:
    """A recorded trace, or with ``"drift"`` one made up, for smoke tests."""
    if name == "drift":
        return _drift()
    with np.load(FOLDER / f"{name}.npz") as file:
        return Trace(name, file["ids"], json.loads(str(file["about"])))


def _drift(streams: int = 8, steps: int = 64, clusters: int = 2048, seed: int = 0) -> Trace:
    """Scores that wander: each step moves them a tenth of their spread towards new ones."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((streams, clusters))
    ids = []
    for _ in range(steps):
        scores = 0.99 * scores + 0.14 * rng.standard_normal(scores.shape)
        ids.append(np.argsort(-scores, axis=1)[:, :TOP])
    return Trace("drift", np.stack(ids, axis=1).astype(np.int16), {"made up": "an autoregressive walk"})


def for_miss_rate(rate: float) -> tuple[str, float, int]:
    """Trace, ``gpu_cache_size`` and stride for about that token miss rate."""
    nearest = min(MISS_RATES, key=lambda known: abs(known - rate))
    return next(choice for choice in MISS_RATES[nearest] if choice[0] in ("drift", *names()))


def names() -> list[str]:
    """Traces that are there."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def lru_miss_rate(trace: Trace, clusters: int, cached: float, warmup: int = 16) -> float:
    """Share of selected clusters that an LRU of ``cached`` times ``clusters`` misses, averaged over streams."""
    missed = selected = 0
    for stream in trace.ids:
        used: dict[int, int] = {}
        for step, ids in enumerate(stream[:, :clusters].tolist()):
            new = [i for i in ids if i not in used]
            used.update(dict.fromkeys(ids, step))
            for leaving in sorted(used, key=used.__getitem__)[: max(0, len(used) - int(cached * clusters))]:
                del used[leaving]
            if step >= warmup:
                missed, selected = missed + len(new), selected + len(ids)
    return missed / max(1, selected)


def _record_command(options: argparse.Namespace) -> None:
    from benchmarks.models import file_sha256, gguf_path, load_model, load_tokenizer
    from benchmarks.quality.tasks.data import Data

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device)
    text = Data().text(options.text) if options.text else Data().any_prose()
    ids = load_tokenizer(options.model)(text[: 8 * options.tokens], return_tensors="pt").input_ids
    ids = ids[:, : options.tokens + options.steps].to(device)
    kv_config = TieredKVConfig(token_budget=options.budget, cuda_graph=False)
    found = record(model, ids, options.steps, kv_config, options.streams)
    facts = {
        "model": options.model,
        "gguf_sha256": file_sha256(gguf_path(options.model)) if gguf_path(options.model).exists() else None,
        "text": options.text or "any_prose",
        "tokens": ids.shape[1] - options.steps,
        "token_budget": options.budget,
        "dtype": str(model.dtype),
        **about(),
    }
    path = save(options.name or options.model.split("-")[0], found, facts, options.folder)
    print(f"{path}: {found.shape[0]} streams, {found.shape[1]} steps, {path.stat().st_size / 2**20:.2f} MiB")


def _rates_command(options: argparse.Namespace) -> None:
    for name in options.names or names():
        trace = load(name)
        rates = {size: lru_miss_rate(trace, options.clusters, size) for size in (1, 1.25, 1.5, 2, 3, 4)}
        figures = "  ".join(f"{size}: {rate:.3f}" for size, rate in rates.items())
        print(f"{name} {trace.ids.shape}, {trace.clusters} clusters; LRU of so many budgets misses  {figures}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record", help="record a trace from a real model")
    verb.add_argument("model")
    verb.add_argument("--name", help="of the trace; by default the model's family")
    verb.add_argument("--tokens", type=int, default=7500, help="length of the prompt")
    verb.add_argument("--steps", type=int, default=160)
    verb.add_argument("--streams", type=int, default=STREAMS, help="most layers times KV heads")
    verb.add_argument("--budget", type=int, default=2048, help="token budget of the cache that records")
    verb.add_argument("--text", help="file of the evaluation data, such as text/book_katrine.txt")
    verb.add_argument("--folder", type=Path, default=FOLDER, help="where the trace goes")
    verb.set_defaults(run=_record_command)
    verb = verbs.add_parser("rates", help="predict miss rates by cache size")
    verb.add_argument("names", nargs="*")
    verb.add_argument("--clusters", type=int, default=128, help="clusters a selection: the budget over 16")
    verb.set_defaults(run=_rates_command)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
