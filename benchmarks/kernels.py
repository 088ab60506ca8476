"""The kernels of a decode step on a GPU: checked against their references first, then timed against their byte floor.

    python -m benchmarks.kernels                                  # every kernel at its tuned constants
    python -m benchmarks.kernels --sweep                          # settings of tiles, warps and stages; the best last
    python -m benchmarks.kernels --list

A row is one kernel on one shape: median, 10th and 90th percentile in µs of a call replayed from a CUDA graph. A graph
goes through ``LAYERS`` layers with their own tables, so that L2 does not flatter. The floor is the bytes that must move
over the bandwidth measured on this machine: a device copy's, or a pinned copy's for recall. Nothing is timed when a
check fails.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tiered_kv.kernels import attend, count, lookup, recall, score, select
from tiered_kv.kernels.attend import Attended, Estimated, Recent
from tiered_kv.kernels.lookup import SlotTables
from tiered_kv.kernels.select import Selection

LAYERS = 16
STEPS = 10
REPLAYS = 50
HOST_TOKENS = 1 << 20
DEVICE = "cuda"
OUT = Path(__file__).with_name("results") / "kernels.jsonl"


@dataclass(frozen=True)
class Shape:
    """Llama-3.1-8B in bf16, unless said otherwise; ``clusters`` of ``capacity`` exist."""

    name: str
    rows: int
    clusters: int
    capacity: int
    group: int = 4
    head_dim: int = 128
    token_budget: int = 2048
    max_blocks: int = 384
    num_slots: int = 768
    block_size: int = 8

    @property
    def width(self) -> int:
        return 2 * self.head_dim


SHAPES = (
    Shape("1 x 128k", rows=8, clusters=8192, capacity=8192),
    Shape("1 x 128k, spare capacity", rows=8, clusters=8200, capacity=8704),
    Shape("1 x 32k", rows=8, clusters=2048, capacity=2048),
    Shape("8 x 32k", rows=64, clusters=2048, capacity=2048),
    Shape("1 x 1M", rows=8, clusters=65536, capacity=65536),
    Shape("1 x 128k, head_dim 256, group 2", rows=8, clusters=8192, capacity=8192, group=2, head_dim=256),
)


@dataclass(frozen=True)
class Layer:
    """A layer's tables, and what its kernels hand to each other."""

    query: torch.Tensor
    centroids: torch.Tensor
    centroid_scales: torch.Tensor
    variances: torch.Tensor
    variance_scales: torch.Tensor
    mean_values: torch.Tensor
    value_scales: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    first_blocks: torch.Tensor
    tables: SlotTables
    hints: torch.Tensor
    counters: torch.Tensor
    cache: torch.Tensor
    recent: Recent
    logits: torch.Tensor
    step_scores: list[torch.Tensor]
    selections: list[Selection]
    slots: torch.Tensor
    dense: Recent

    @property
    def index(self) -> tuple[torch.Tensor, ...]:
        return self.centroids, self.centroid_scales, self.variances, self.variance_scales, self.sizes


def make_layer(shape: Shape, seed: int) -> Layer:
    """Random clusters of 16 tokens on average, and the selections of ``STEPS`` steps that drift."""
    torch.manual_seed(seed)
    rows, capacity, dim = shape.rows, shape.capacity, shape.head_dim
    with torch.device(DEVICE):
        sizes = torch.empty(rows, capacity).exponential_(1 / 16).ceil().clamp(1, 64).int()
        sizes[:, shape.clusters :] = 0
        blocks = (sizes + shape.block_size - 1) // shape.block_size
        first_blocks, starts = (x.cumsum(1, dtype=torch.int32) - x for x in (blocks, sizes))
        num_blocks = capacity * (64 // shape.block_size)
        cache = torch.randn(rows, shape.num_slots, shape.block_size, shape.width).bfloat16()
        tables = SlotTables(
            torch.full((rows, num_blocks), -1, dtype=torch.int32),
            torch.full((rows, shape.num_slots), -1, dtype=torch.int32),
            *(torch.zeros(rows, shape.num_slots, dtype=torch.int32) for _ in range(2)),
            torch.zeros(rows, dtype=torch.int32),
        )
        query = torch.randn(rows, shape.group, dim).bfloat16()
        centroids, variances, mean_values = (
            torch.randint(low, 128, (rows, capacity, dim), dtype=torch.int8) for low in (-127, 0, -127)
        )
        centroid_scales, variance_scales, value_scales = torch.rand(3, rows, capacity) * 0.02
        index = (centroids, centroid_scales.contiguous(), variances, variance_scales.contiguous(), sizes)
        starts = starts % (HOST_TOKENS - 64)
        logits, scores = score.score_clusters(query, *index, scale=dim**-0.5)
        noise = scores[scores > float("-inf")].std() * 0.6  # a tenth of a selection is new in the next step
        step_scores = [scores + torch.randn_like(scores) * noise for _ in range(STEPS)]
        selections = [select.select_clusters(s, sizes, starts, first_blocks, **budget(shape)) for s in step_scores]
        slots = torch.rand(rows, shape.num_slots).argsort(1)[:, : shape.max_blocks].int().contiguous()
        return Layer(
            query, *index[:4], mean_values, value_scales.contiguous(), sizes, starts, first_blocks, tables,
            torch.zeros(rows, dtype=torch.int32), count.new_counters(torch.device(DEVICE)), cache,
            make_recent(shape, 384, 200), logits, step_scores, selections, slots, make_recent(shape, 2432, 2100),
        )  # fmt: skip


def make_host(width: int) -> torch.Tensor:
    """A host store, pinned."""
    return torch.randn(HOST_TOKENS // 8, width, device=DEVICE).bfloat16().repeat(8, 1).cpu().pin_memory()


def make_recent(shape: Shape, window_capacity: int, window_length: int, sinks: int = 16) -> Recent:
    return Recent(
        torch.randn(shape.rows, sinks + window_capacity, shape.width).bfloat16(),
        torch.full((shape.rows,), sinks, dtype=torch.int32),
        torch.zeros(shape.rows, dtype=torch.int32),
        torch.tensor([window_length], dtype=torch.int32),
        sinks,
    )


def budget(shape: Shape) -> dict[str, int]:
    return {"token_budget": shape.token_budget, "max_blocks": shape.max_blocks, "block_size": shape.block_size}


def size_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# One call of each kernel on one layer.


def call_score(shape: Shape, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    return score.score_clusters(layer.query, *layer.index, scale=shape.head_dim**-0.5)


def call_select(shape: Shape, layer: Layer, step: int = 0) -> Selection:
    return select.select_clusters(
        layer.step_scores[step], layer.sizes, layer.starts, layer.first_blocks, layer.hints, **budget(shape)
    )


def call_lookup(layer: Layer, step: int = 0, policy: str = "lru") -> tuple[torch.Tensor, torch.Tensor]:
    return lookup.assign_slots(layer.tables, layer.selections[step].blocks, policy=policy)


def call_select_and_assign(shape: Shape, layer: Layer, step: int = 0, policy: str = "lru") -> tuple:
    scores, index = layer.step_scores[step], (layer.sizes, layer.starts, layer.first_blocks)
    extras = layer.tables, layer.hints, layer.counters
    return lookup.select_and_assign(scores, *index, *extras, **budget(shape), policy=policy)


def call_recall(host: torch.Tensor, layer: Layer, missed: torch.Tensor) -> None:
    selection = layer.selections[0]
    recall.recall_blocks(host, selection.starts, selection.lengths, layer.slots, missed, layer.cache)


def attend_arguments(layer: Layer) -> tuple[torch.Tensor, Recent, Attended, Estimated]:
    selection = layer.selections[0]
    return (
        layer.query,
        layer.recent,
        Attended(layer.cache, layer.slots, selection.lengths),
        Estimated(layer.logits, layer.sizes, selection.chosen, layer.mean_values, layer.value_scales),
    )


def call_attend(shape: Shape, layer: Layer) -> torch.Tensor:
    return attend.attend(*attend_arguments(layer), scale=shape.head_dim**-0.5)


def call_dense(shape: Shape, layer: Layer) -> torch.Tensor:
    return attend.attend(layer.query, layer.dense, None, None, scale=shape.head_dim**-0.5)


def call_layer(shape: Shape, host: torch.Tensor, layer: Layer) -> torch.Tensor:
    """The whole of a layer's decode step; replayed with the same query it misses nothing after the first time."""
    logits, scores = call_score(shape, layer)
    tables = (layer.sizes, layer.starts, layer.first_blocks, layer.tables, layer.hints, layer.counters)
    selection, slots, missed = lookup.select_and_assign(scores, *tables, **budget(shape), policy="lru")
    recall.recall_blocks(host, selection.starts, selection.lengths, slots, missed, layer.cache)
    attended = Attended(layer.cache, slots, selection.lengths)
    estimated = Estimated(logits, layer.sizes, selection.chosen, layer.mean_values, layer.value_scales)
    return attend.attend(layer.query, layer.recent, attended, estimated, scale=shape.head_dim**-0.5)


# Checks, before anything is timed.


def check(shape: Shape, layer: Layer, host: torch.Tensor) -> None:
    """Every kernel in bf16 against its reference.

    Raises:
        AssertionError: A kernel is wrong.
    """
    scale = shape.head_dim**-0.5
    plain = {"scale": scale, "softcap": None, "spread": 0.5, "spread_limit": 1.5}
    expected = score.score_clusters_reference(layer.query, *layer.index, **plain)
    for name, got, want in zip(("logits", "scores"), call_score(shape, layer), expected, strict=True):
        assert_near(f"score: {name}", got, want, 5e-4)

    tables = SlotTables(*(table.clone() for table in layer.tables))
    for step, policy in itertools.product(range(STEPS), ("lru", "lfu", "lru_lfu")):
        scores, index = layer.step_scores[step], (layer.sizes, layer.starts, layer.first_blocks)
        selection = select.select_clusters_reference(scores, *index, **budget(shape))
        assert_same("select", call_select(shape, layer, step), selection)
        expected_tables = SlotTables(*(table.clone() for table in tables))
        assigned = lookup.assign_slots_reference(expected_tables, selection.blocks, policy=policy)
        together = SlotTables(*(table.clone() for table in tables))
        if step % 2:
            layer.hints.random_(-(1 << 31), (1 << 31) - 1)
        counters, expected_counters = layer.counters.zero_(), torch.zeros_like(layer.counters)
        count.count_step(expected_counters, selection, assigned[1])
        both = lookup.select_and_assign(scores, *index, together, layer.hints, counters, **budget(shape), policy=policy)
        assert_same("select_and_assign: selection", both[0], selection)
        assert_same(f"select_and_assign: {policy}", (*both[1:], *together), (*assigned, *expected_tables))
        assert_same("select_and_assign: counters", [counters], [expected_counters])
        got = lookup.assign_slots(tables, selection.blocks, policy=policy)
        assert_same(f"lookup: {policy}", (*got, *tables), (*assigned, *expected_tables))

    selection = layer.selections[0]
    missed = make_missed(layer, 0.2)
    expected_cache = layer.cache.clone()
    recall.recall_blocks_reference(host, selection.starts, selection.lengths, layer.slots, missed, expected_cache)
    call_recall(host, layer, missed)
    assert_same("recall", [layer.cache], [expected_cache])

    # Weights and outputs are rounded to bf16; outputs are about 1.
    want = attend.attend_reference(*attend_arguments(layer), scale=scale)
    assert_near("attend", call_attend(shape, layer), want, 1.6e-2)
    want = attend.attend_reference(layer.query, layer.dense, None, None, scale=scale)
    assert_near("attend, dense", call_dense(shape, layer), want, 1.6e-2)


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=1e-4, msg=lambda text: f"{name}: {text}")


def assert_same(name: str, got: Any, want: Any) -> None:
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), f"{name}: tensor {place} differs in {(one != other).sum().item()} places"


def make_missed(layer: Layer, rate: float) -> torch.Tensor:
    return (torch.rand(layer.slots.shape, device=DEVICE) < rate) & (layer.selections[0].blocks >= 0)


# What is timed.


@dataclass(frozen=True)
class Case:
    """Calls that go into one graph, and the bytes that one of them must move on average."""

    kernel: str
    variant: str
    calls: Sequence[Callable[[], Any]]
    num_bytes: float
    over_pcie: bool = False
    facts: dict[str, Any] | None = None


def cases(shape: Shape, layers: list[Layer], host: torch.Tensor) -> Iterator[Case]:
    layer, control = layers[0], control_bytes(shape)
    score_bytes = size_of(*layer.index, layer.query, layer.logits, layer.step_scores[0])
    yield Case("score", "", [partial(call_score, shape, x) for x in layers], score_bytes)
    yield Case("select", "", [partial(call_select, shape, x, step) for x, step in steps(layers)], control["select"])
    yield from lookup_cases("lookup", call_lookup, layers, control["lookup"])
    both = partial(call_select_and_assign, shape)
    yield from lookup_cases("select_and_assign", both, layers, control["select"] + control["lookup"])
    for rate in (0.0, 0.05, 0.2, 1.0):
        yield recall_case(shape, layers, host, rate)

    tokens = int(layer.selections[0].lengths.sum()) + shape.rows * (16 + 200)
    estimate_bytes = size_of(
        layer.mean_values, layer.value_scales, layer.sizes, layer.logits, layer.selections[0].chosen
    )
    attend_bytes = tokens * shape.width * 2 + estimate_bytes
    yield Case("attend", "", [partial(call_attend, shape, x) for x in layers], attend_bytes)
    dense_bytes = shape.rows * (16 + 2100) * shape.width * 2
    yield Case("attend", "dense", [partial(call_dense, shape, x) for x in layers], dense_bytes)
    whole = score_bytes + sum(control.values()) + attend_bytes
    yield Case("layer", "no misses", [partial(call_layer, shape, host, x) for x in layers], whole)


def control_bytes(shape: Shape) -> dict[str, int]:
    """Selection reads scores and writes ``chosen`` and three lists; lookup reads and writes lists and slot tables."""
    blocks, slots = 4 * shape.rows * shape.max_blocks, 4 * shape.rows * shape.num_slots
    return {"select": 5 * shape.rows * shape.capacity + 3 * blocks, "lookup": 3 * blocks + 3 * slots}


def steps(layers: list[Layer]) -> list[tuple[Layer, int]]:
    return [(layer, step) for step in range(STEPS) for layer in layers[:4]]


def lookup_cases(name: str, call: Callable[..., Any], layers: list[Layer], num_bytes: int) -> Iterator[Case]:
    """The same selection again and again; then selections that go round, so that each finds some of its blocks gone."""
    yield Case(name, "no misses", [partial(call, layer) for layer in layers], num_bytes)
    for _ in range(2):
        missed = [call(layer, step)[-1] for layer, step in steps(layers)]
    wanted = sum(int((layer.selections[step].blocks >= 0).sum()) for layer, step in steps(layers))
    rate = sum(int(m.sum()) for m in missed) / wanted
    calls = [partial(call, layer, step) for layer, step in steps(layers)]
    yield Case(name, "misses", calls, num_bytes, facts={"miss_rate": round(rate, 3)})


def recall_case(shape: Shape, layers: list[Layer], host: torch.Tensor, rate: float) -> Case:
    missed = [make_missed(layer, rate) for layer in layers]
    tokens = sum(int(layer.selections[0].lengths[m].sum()) for layer, m in zip(layers, missed, strict=True))
    calls = [partial(call_recall, host, layer, m) for layer, m in zip(layers, missed, strict=True)]
    return Case("recall", f"{rate:.0%} missed", calls, tokens * shape.width * 2 / len(layers), over_pcie=True)


SWEEPS: dict[str, tuple[ModuleType, list[dict[str, Any]]]] = {
    "score": (
        score,
        [
            {},
            {"PROGRAMS": 1056, "NUM_STAGES": 2},
            {"PROGRAMS": 264, "TILE_ELEMENTS": 16384, "NUM_WARPS": 8},
        ],
    ),
    "select_and_assign": (lookup, [{}, {"SELECT_WARPS": 4}, {"SELECT_WARPS": 16}]),
    "attend": (
        attend,
        [
            {},
            {"PROGRAMS": 264},
            {"PROGRAMS": 264, "NUM_WARPS": 8},
            {"PROGRAMS": 792},
            {"NUM_STAGES": 2},
            {"NUM_STAGES": 2, "ESTIMATE_TILE_BYTES": 16384},
        ],
    ),
}
"""Settings to compare, the others at their defaults."""
KERNELS = ("score", "select", "lookup", "select_and_assign", "recall", "attend", "layer")
SWEEP_SHAPES = ("1 x 128k, spare capacity", "8 x 32k")


@contextmanager
def settings(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def graph_times(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """µs of one call, for each replay of a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS + 3)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 / len(calls) for start, end in marks[3:]]


def copy_gbps(source: torch.Tensor, target: torch.Tensor, bytes_moved: int) -> float:
    """Median of ten copies."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(13)]
    for start, end in marks:
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
    torch.cuda.synchronize()
    return bytes_moved / statistics.median(start.elapsed_time(end) for start, end in marks[3:]) / 1e6


def bandwidths(host: torch.Tensor) -> dict[str, float]:
    """GB/s of a device copy, read and written, and of a copy from pinned memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    device = copy_gbps(source, torch.empty_like(source), 2 << 30)
    pinned = copy_gbps(host, torch.empty(host.shape, dtype=host.dtype, device=DEVICE), size_of(host))
    return {"device": device, "pcie": pinned}


def time_case(shape: Shape, case: Case, gbps: dict[str, float], **more: Any) -> dict[str, Any]:
    times = graph_times(case.calls)
    median, deciles = statistics.median(times), statistics.quantiles(times, n=10)
    return {
        "kernel": case.kernel,
        "variant": case.variant,
        "shape": asdict(shape),
        "median_us": round(median, 2),
        "p10_us": round(deciles[0], 2),
        "p90_us": round(deciles[-1], 2),
        "floor_us": round(case.num_bytes / gbps["pcie" if case.over_pcie else "device"] / 1e3, 2),
        "gbps": round(case.num_bytes / median / 1e3, 1),
        **(case.facts or {}),
        **more,
    }


def is_swept(case: Case) -> bool:
    return case.kernel in SWEEPS and case.variant in ("", "misses")


def measure(shape: Shape, case: Case, gbps: dict[str, float], is_sweep: bool) -> Iterator[dict[str, Any]]:
    if not is_sweep:
        yield time_case(shape, case, gbps)
        return
    module, choices = SWEEPS[case.kernel]
    rows = []
    for choice in choices:
        with settings(module, choice):
            try:
                rows.append(time_case(shape, case, gbps, settings=choice))
            except Exception as error:  # more shared memory than there is, or a shape the compiler refuses
                torch.cuda.synchronize()
                yield {
                    "kernel": case.kernel,
                    "variant": case.variant,
                    "shape": asdict(shape),
                    "settings": choice,
                    "error": f"{type(error).__name__}: {str(error)[:160]}",
                }
    yield from sorted(rows, key=lambda row: -row["median_us"])


def environment() -> dict[str, Any]:
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": os.environ.get("TIERED_KV_COMMIT") or git_commit() or "unknown",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def git_commit() -> str:
    """Empty where there is no git or no repository, as on a machine that got a copy of the files."""
    try:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def describe(row: dict[str, Any]) -> str:
    what = f"{row['shape']['name']:32} {row['kernel']:18} {row['variant']:12}"
    setting = " ".join(f"{name}={value}" for name, value in row.get("settings", {}).items())
    if "error" in row:
        return f"{what} {row['error'][:60]}  {setting}"
    figures = f"{row['median_us']:8.2f} µs ({row['p10_us']:.2f}-{row['p90_us']:.2f}), floor {row['floor_us']:.2f}"
    return f"{what} {figures}, {row['gbps']:.0f} GB/s  {setting}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help=f"append rows to this JSON-lines file (default {OUT})")
    parser.add_argument("--sweep", action="store_true", help="time settings of tiles, warps and stages on two shapes")
    parser.add_argument("--only", default="", metavar="KERNELS", help="some of score,select,lookup,recall,attend,...")
    parser.add_argument("--shapes", default="", metavar="NAMES", help="some of the shapes, separated by semicolons")
    parser.add_argument("--list", action="store_true", help="name kernels and shapes, and stop")
    parser.add_argument("--no-check", action="store_true", help="do not compare with the references first")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.shapes.split(";") if name]
    wanted = wanted or (SWEEP_SHAPES if options.sweep else [shape.name for shape in SHAPES])
    shapes = [shape for shape in SHAPES if shape.name in wanted]
    if options.list:
        print("kernels:", ", ".join(KERNELS))
        print("shapes:", "; ".join(shape.name for shape in SHAPES))
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.kernels needs a CUDA GPU", file=sys.stderr)
        return 2
    names = [name for name in options.only.split(",") if name] or KERNELS
    about = environment()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    hosts: dict[int, torch.Tensor] = {}
    for shape in shapes:
        if shape.width not in hosts:
            hosts[shape.width] = make_host(shape.width)
        host = hosts[shape.width]
        gbps = bandwidths(host)
        first = make_layer(shape, 0)
        if not options.no_check:
            check(shape, first, host)
            print(f"{shape.name}: checked; copies at {gbps['device']:.0f} and {gbps['pcie']:.1f} GB/s", file=sys.stderr)
        layers = [first, *(make_layer(shape, seed) for seed in range(1, LAYERS))]
        for case in cases(shape, layers, host):
            if case.kernel not in names or (options.sweep and not is_swept(case)):
                continue
            for row in measure(shape, case, gbps, options.sweep):
                print(describe(row), flush=True)
                bandwidth = {name: round(value, 1) for name, value in gbps.items()}
                with options.out.open("a") as file:
                    file.write(json.dumps({"benchmark": "kernels", **row, "copy_gbps": bandwidth, **about}) + "\n")
        del layers, first
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
