"""Selection traces: which clusters real models rank highest, step after step, recorded once and replayed in benchmarks.

    python -m benchmarks.traces record smollm2-135m --tokens 7500      # minutes on a CPU
    python -m benchmarks.traces record gemma3-270m --tokens 30000      # on the GPU
    python -m benchmarks.traces rates                                  # what an LRU would miss, by cache size

Misses depend on how a model's attention moves, which random weights don't show. So the benchmarks run random weights
at full size, scoring included, and then let a trace's ranking overwrite the scores: see :class:`Replay`. Beside each
ranking a trace holds the one that the query guessed a layer earlier gives, for what is fetched ahead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rows import about
from tiered_kv import TieredCache, TieredKVConfig, kv_cache_dispatched
from tiered_kv import layer as layer_module
from tiered_kv.generation import prefill
from tiered_kv.kernels.dispatch import tl, triton, use_triton
from tiered_kv.kernels.score import score_clusters
from tiered_kv.layer import TieredLayer

FOLDER = Path(__file__).with_name("traces")
TOP = 192
"""Clusters a ranking; a budget of 2048 tokens takes about 128."""
STREAMS, STEPS = 21, 128
Hook = Callable[[torch.Tensor, torch.Tensor, bool], None]

MISS_RATES: dict[float, tuple[tuple[str, float, int], ...]] = {
    0.0: (("drift", 2.0, 0),),
    0.01: (("smollm2", 2.0, 1), ("drift", 4.0, 1)),
    0.1: (("smollm2", 1.08, 1), ("drift", 1.0, 1)),
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
    """Cluster numbers by descending score, ``[streams, steps, TOP]`` int16; a stream is one KV head of one layer.

    Attributes:
        name: Of the file.
        ids: By the layer's own query.
        guesses: By the query guessed from the input of the layer before.
        about: Where it comes from.
    """

    name: str
    ids: np.ndarray
    guesses: np.ndarray
    about: dict[str, Any]

    @property
    def clusters(self) -> int:
        return int(max(self.ids.max(), self.guesses.max())) + 1


@contextmanager
def scores_hooked(hook: Hook) -> Iterator[None]:
    """Call ``hook(sizes, scores, is_guess)`` after every scoring by a tiered layer, ``scores`` its to change."""
    scored, fetch_ahead = layer_module.score_clusters, getattr(TieredLayer, "fetch_ahead", None)
    guessing: list[bool] = []

    def score_clusters(query: torch.Tensor, *tables: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, scores = scored(query, *tables, **options)
        hook(tables[4], scores, bool(guessing))
        return logits, scores

    def fetch(*args: Any, **options: Any) -> Any:
        guessing.append(True)
        try:
            return fetch_ahead(*args, **options)
        finally:
            guessing.pop()

    layer_module.score_clusters = score_clusters
    if fetch_ahead is not None:
        TieredLayer.fetch_ahead = fetch
    try:
        yield
    finally:
        layer_module.score_clusters = scored
        if fetch_ahead is not None:
            TieredLayer.fetch_ahead = fetch_ahead


@triton.jit
def overwrite_kernel(
    score_ptr, ids_ptr, injection_ptr, stream_ptr, phase_ptr, step_ptr, clusters, known, steps, top_score, fall,
    TOP: tl.constexpr, TOP_PADDED: tl.constexpr,
):  # fmt: skip
    """The ranking of this step over the scores of one row."""
    row = tl.program_id(0).to(tl.int64)
    stream, phase = tl.load(stream_ptr + row), tl.load(phase_ptr + row)
    rank = tl.arange(0, TOP_PADDED)
    is_listed = rank < TOP
    at = (stream * steps + (tl.load(step_ptr) + phase) % steps) * TOP + rank
    ids = tl.load(ids_ptr + at, mask=is_listed, other=0)
    cluster = tl.load(injection_ptr + row * known + ids.to(tl.int64))
    tl.store(score_ptr + row * clusters + cluster, top_score - rank.to(tl.float32) * fall, mask=is_listed)


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
        self.ids, self.guesses = (torch.from_numpy(ids).to(device) for ids in (trace.ids, trace.guesses))
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (len(self.layers), self.layers[0].rows)
        self.streams = torch.randint(len(trace.ids), shape, device=device, generator=generator)
        self.phases = torch.randint(trace.ids.shape[1], shape, device=device, generator=generator)
        self.places = [_scatter(layer.index.tables.sizes, trace.clusters, generator) for layer in self.layers]

    def begin_step(self, *_: Any) -> None:
        """Move on in the trace: before the model's first layer, on the stream that computes."""
        self.step.add_(self.stride)

    def __call__(self, sizes: torch.Tensor, scores: torch.Tensor, is_guess: bool = False) -> None:
        """Overwrite the scores of the layer that has these sizes."""
        number = next(n for n, layer in enumerate(self.layers) if layer.index.tables.sizes is sizes)
        ranking = self.guesses if is_guess else self.ids
        if use_triton(scores):
            self._overwrite(number, ranking, scores)
            return
        ids = ranking[self.streams[number], (self.step + self.phases[number]) % ranking.shape[1]].long()
        rank = torch.arange(TOP, device=scores.device, dtype=torch.float32)
        value = (TOP_SCORE - rank * (SCORE_SPAN / TOP)).expand(len(scores), -1)
        scores.scatter_(1, self.places[number].gather(1, ids), value)

    def _overwrite(self, number: int, ranking: torch.Tensor, scores: torch.Tensor) -> None:
        places = self.places[number]
        overwrite_kernel[(len(scores),)](
            scores, ranking, places, self.streams[number], self.phases[number], self.step,
            scores.shape[1], places.shape[1], ranking.shape[1], TOP_SCORE, SCORE_SPAN / TOP,
            TOP=TOP, TOP_PADDED=triton.next_power_of_2(TOP),
        )  # fmt: skip


def _scatter(sizes: torch.Tensor, known: int, generator: torch.Generator) -> torch.Tensor:
    """For each row, ``known`` different clusters that exist, in random order; some twice where there are fewer."""
    lottery = torch.rand(sizes.shape, device=sizes.device, generator=generator).masked_fill(sizes == 0, -1)
    order = lottery.argsort(1, descending=True)
    number = torch.arange(known, device=sizes.device) % (sizes > 0).sum(1, keepdim=True)
    return order.gather(1, number)


class Recorder:
    """Notes the best clusters of every tiered layer at each step, by its own query and by the guessed one."""

    def __init__(self) -> None:
        self.steps: list[list[torch.Tensor]] = []
        self.guesses: list[list[torch.Tensor]] = []

    def begin_step(self) -> None:
        self.steps.append([])
        self.guesses.append([])

    def __call__(self, sizes: torch.Tensor, scores: torch.Tensor, is_guess: bool = False) -> None:
        best = scores.topk(min(TOP, scores.shape[1])).indices.to(torch.int16)
        (self.guesses if is_guess else self.steps)[-1].append(best.cpu())

    def rankings(self, streams: int) -> tuple[np.ndarray, np.ndarray]:
        """Exact and guessed, ``[streams, steps, TOP]``, of layers spread over the depth of those that are guessed."""
        exact, guessed = (_stacked(steps) for steps in (self.steps, self.guesses))
        exact = exact[len(exact) - len(guessed) :]  # no guess is made for a model's very first layer
        count = max(1, min(len(exact), streams // exact.shape[1]))
        chosen = torch.linspace(0, len(exact) - 1, count).round().long()
        return exact[chosen].flatten(0, 1).numpy(), guessed[chosen].flatten(0, 1).numpy()


def _stacked(steps: list[list[torch.Tensor]]) -> torch.Tensor:
    """``[layers, rows, steps, TOP]``."""
    return torch.stack([torch.stack(step) for step in steps], dim=2)


@torch.no_grad()
def record(
    model: Any, ids: torch.Tensor, steps: int, kv_config: TieredKVConfig, streams: int = STREAMS
) -> tuple[np.ndarray, np.ndarray]:
    """The rankings of ``steps`` decode steps that are forced along the last of ``ids`` ``[1, tokens]``."""
    recorder, prompt = Recorder(), ids[:, :-steps]
    if hasattr(kv_config, "prefetch"):  # guesses are scored here, whatever the cache would do with them
        kv_config = replace(kv_config, prefetch="off")
    with kv_cache_dispatched(model, kv_config):
        cache = TieredCache(model.config, kv_config)
        prefill(model, cache, prompt, chunk_tokens=1024 if ids.device.type == "cpu" else None)
        model(input_ids=prompt[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)
        for lane in cache.group.lanes:
            lane.make_room()  # clusters the prompt's end, which a guess may be scored against before its layer's turn
        with _guesses_scored(model, cache, recorder), scores_hooked(recorder):
            for place in range(prompt.shape[1], ids.shape[1]):
                recorder.begin_step()
                model(input_ids=ids[:, place : place + 1], past_key_values=cache)
        cache.close()
    return recorder.rankings(streams)


@contextmanager
def _guesses_scored(model: Any, cache: TieredCache, hook: Hook) -> Iterator[None]:
    """Score what :class:`~tiered_kv.prefetch.QueryGuesser` guesses for each tiered layer, a layer before its turn."""
    from tiered_kv.prefetch import QueryGuesser

    layers, rotary, handles = model.base_model.layers, model.base_model.rotary_emb, []

    def guess_for(number: int) -> Callable[..., None]:
        guesser, tiered = QueryGuesser(layers[number], rotary), cache.layers[number].tiered
        scale = getattr(layers[number].self_attn, "scaling", None) or tiered.head_dim**-0.5

        def before_layer(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
            query = guesser(args[0], kwargs["position_ids"], kwargs["position_embeddings"])
            hook(tiered.index.tables.sizes, _scores(tiered, query, scale), True)

        return before_layer

    for number, layer in enumerate(cache.layers[1:], start=1):
        if getattr(layer, "tiered", None) is not None:
            handles.append(layers[number - 1].register_forward_pre_hook(guess_for(number), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scores(tiered: TieredLayer, query: torch.Tensor, scale: float) -> torch.Tensor:
    t, c = tiered.index.tables, tiered.config
    tables = (t.centroids, t.centroid_scales, t.variances, t.variance_scales, t.sizes)
    rows = query.reshape(tiered.rows, -1, tiered.head_dim)
    return score_clusters(rows, *tables, scale=scale, spread=c.spread, spread_limit=c.spread_limit)[1]


def save(name: str, rankings: tuple[np.ndarray, np.ndarray], facts: dict[str, Any], folder: Path = FOLDER) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.npz"
    np.savez_compressed(path, ids=rankings[0], guesses=rankings[1], about=json.dumps(facts))
    return path


def load(name: str) -> Trace:
    """A recorded trace, or with ``"drift"`` one made up, for smoke tests."""
    if name == "drift":
        return _drift()
    with np.load(FOLDER / f"{name}.npz") as file:
        return Trace(name, file["ids"], file["guesses"], json.loads(str(file["about"])))


def _drift(streams: int = 8, steps: int = 64, clusters: int = 2048, seed: int = 0) -> Trace:
    """Scores that wander a seventh of their spread each step; guesses are off by as much."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((streams, clusters))
    ids, guesses = [], []
    for _ in range(steps):
        scores = 0.99 * scores + 0.14 * rng.standard_normal(scores.shape)
        ids.append(_best(scores))
        guesses.append(_best(scores + 0.14 * rng.standard_normal(scores.shape)))
    return Trace("drift", np.stack(ids, axis=1), np.stack(guesses, axis=1), {"made up": "an autoregressive walk"})


def _best(scores: np.ndarray) -> np.ndarray:
    return np.argsort(-scores, axis=1)[:, :TOP].astype(np.int16)


def found_by_guess(trace: Trace, clusters: int) -> tuple[float, float]:
    """Of the clusters that are new in a step, the share that the guess names; and what it names in vain, per budget."""
    new = hits = vain = 0
    for stream, guessed in zip(
        trace.ids[:, :, :clusters].tolist(), trace.guesses[:, :, :clusters].tolist(), strict=True
    ):
        for before, now, guess in zip(stream, stream[1:], guessed[1:], strict=False):
            fresh = set(now) - set(before)
            new, hits = new + len(fresh), hits + len(fresh & set(guess))
            vain += len(set(guess) - set(before) - set(now))
    steps = trace.ids.shape[0] * (trace.ids.shape[1] - 1)
    return hits / max(1, new), vain / max(1, steps * clusters)


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
    streams, steps, _ = found[0].shape
    print(f"{path}: {streams} streams, {steps} steps, {path.stat().st_size / 2**20:.2f} MiB")


def _rates_command(options: argparse.Namespace) -> None:
    for name in options.names or names():
        trace = load(name)
        rates = {size: lru_miss_rate(trace, options.clusters, size) for size in (1, 1.25, 1.5, 2, 3, 4)}
        figures = "  ".join(f"{size}: {rate:.3f}" for size, rate in rates.items())
        print(f"{name} {trace.ids.shape}, {trace.clusters} clusters; LRU of so many budgets misses  {figures}")
        found, vain = found_by_guess(trace, options.clusters)
        print(f"  the guess finds {found:.2f} of what is new in a step, and names {vain:.2f} of a budget in vain")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record", help="record a trace from a real model")
    verb.add_argument("model")
    verb.add_argument("--name", help="of the trace; by default the model's family")
    verb.add_argument("--tokens", type=int, default=7500, help="length of the prompt")
    verb.add_argument("--steps", type=int, default=STEPS)
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
