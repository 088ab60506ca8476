"""Kernels of clustering on a GPU: checked against their references first, then timed against what the hardware allows.

    python -m benchmarks.clustering --out benchmarks/results/clustering.jsonl
    python -m benchmarks.clustering --sweep --only assign,update     # tile and warp settings, one at a time

A row is one kernel on one shape: median, 10th and 90th percentile in µs of calls replayed from a CUDA graph, inputs
warm in L2 as they are in k-means, beside the floor: bytes that must move at 4.3 TB/s or flops at 790 TFLOP/s, what an
H200 was seen to do. Nothing is timed when a check fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.kernels import environment, settings
from tiered_kv.clustering import assign_by_direction, cluster_segment, max_clusters, num_clusters
from tiered_kv.config import TieredKVConfig
from tiered_kv.kernels import directions, kmeans, order, pack, quantise, summarise
from tiered_kv.kernels.dispatch import force_backend

BYTES_PER_US = 4.3e6
FLOPS_PER_US = 790e6
CALLS_PER_GRAPH = 10
REPLAYS = 30


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    tokens: int
    head_dim: int = 128
    partly_valid: bool = False


SHAPES = (
    Shape("prefill", rows=8, tokens=8192),
    Shape("prefill, left padding", rows=8, tokens=8192, partly_valid=True),
    Shape("prefill, batch 8", rows=64, tokens=8192),
    Shape("prefill, head_dim 64", rows=8, tokens=8192, head_dim=64),
    Shape("prefill, head_dim 80", rows=8, tokens=8192, head_dim=80),
    Shape("prefill, head_dim 256", rows=8, tokens=8192, head_dim=256),
    Shape("decode, all layers", rows=256, tokens=320),
    Shape("decode, one layer", rows=8, tokens=320),
)


@dataclass(frozen=True)
class Inputs:
    """A segment and every intermediate of its clustering, so that each kernel can be called alone."""

    config: TieredKVConfig
    clusters: int
    pieces: int
    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None
    x: torch.Tensor
    centroids: torch.Tensor
    assignment: torch.Tensor
    order: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    packed: torch.Tensor
    means: torch.Tensor


@dataclass(frozen=True)
class Kernel:
    """A call, the bytes it must move and the flops it must do, and the settings worth trying."""

    call: Callable[[Inputs], Any]
    bytes: Callable[[Inputs], int]
    flops: Callable[[Inputs], int]
    module: ModuleType
    sweep: dict[str, tuple[Any, ...]]


def size_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def matrix_flops(i: Inputs) -> int:
    return 2 * i.x.numel() * i.clusters


def no_flops(_: Inputs) -> int:
    return 0


KERNELS = {
    "directions": Kernel(
        lambda i: directions.key_directions(i.keys, i.valid, True),
        lambda i: size_of(i.keys, i.x),
        no_flops,
        directions,
        {"SUM_TOKENS": (128, 256, 512), "TURN_TILE": (4096, 8192, 16384), "WARPS": (4, 8)},
    ),
    "start": Kernel(
        lambda i: directions.evenly_spaced(i.x, i.valid, i.clusters),
        lambda i: 2 * size_of(i.centroids),
        no_flops,
        directions,
        {"SEARCH_TOKENS": (256, 512), "SEARCH_CLUSTERS": (8, 16, 32)},
    ),
    "assign": Kernel(
        lambda i: kmeans.assign_clusters(i.x, i.centroids, i.valid),
        lambda i: size_of(i.x, i.centroids, i.assignment),
        matrix_flops,
        kmeans,
        {
            "ASSIGN_TILE,ASSIGN_WARPS,ASSIGN_STAGES": (
                *(((128, 64), warps, stages) for warps in (4, 8) for stages in (2, 3, 4)),
                *(((128, 128), 8, stages) for stages in (2, 3)),
                *(((128, 32), warps, 3) for warps in (4, 8)),
                *(((256, 64), 8, stages) for stages in (2, 3)),
                *(((64, 64), 4, stages) for stages in (2, 3)),
                ((64, 128), 4, 3),
                ((256, 32), 8, 3),
            )
        },
    ),
    "update": Kernel(
        lambda i: kmeans.update_centroids(i.x, i.assignment, i.centroids),
        lambda i: size_of(i.x, i.assignment, i.centroids),
        no_flops,
        kmeans,
        {
            "SUM_CLUSTERS": (8, 16, 32),
            "SUM_LISTED": (1024, 2048, 4096, 8192),
            "SUM_TILE_BYTES": (8192, 16384, 32768),
            "SUM_WARPS": (2, 4, 8),
            "SUM_STAGES": (2, 3, 5, 7),
            "UNLISTED_CLUSTERS": (0, 32),
        },
    ),
    "sum": Kernel(
        lambda i: kmeans.sum_by_cluster(i.x, i.assignment, i.clusters),
        lambda i: size_of(i.x, i.assignment) + 4 * i.centroids.numel(),
        no_flops,
        kmeans,
        {},
    ),
    "order": Kernel(
        lambda i: order.order_by_cluster(i.assignment, i.clusters, i.config.max_cluster_tokens, i.pieces),
        lambda i: size_of(i.assignment, i.order, i.sizes, i.offsets),
        no_flops,
        order,
        {
            "PLACE_CLUSTERS": (8, 16, 32),
            "PLACE_TOKENS": (64, 128, 256, 512),
            "PLACE_STAGES": (1, 3, 4),
            "COUNT_TOKENS": (512, 1024),
            "WARPS": (4, 8),
        },
    ),
    "pack": Kernel(
        lambda i: pack.pack_tokens(i.keys, i.values, i.order),
        lambda i: size_of(i.keys, i.values, i.order, i.packed),
        no_flops,
        pack,
        {"PACK_TILE_BYTES": (2048, 4096, 8192, 16384), "PACK_WARPS": (2, 4, 8)},
    ),
    "summarise": Kernel(
        lambda i: summarise.summarise_clusters(i.packed, i.offsets, i.sizes, i.keys.shape[2]),
        lambda i: size_of(i.packed) + 3 * size_of(i.means),
        no_flops,
        summarise,
        {"SUMMARISE_TOKENS": (8, 16, 32), "SUMMARISE_WARPS": (1, 2, 4)},
    ),
    "quantise": Kernel(
        lambda i: quantise.quantise_int8(i.means),
        lambda i: 5 * i.means.numel(),
        no_flops,
        quantise,
        {"QUANTISE_TILE": (1024, 2048, 4096), "QUANTISE_WARPS": (2, 4)},
    ),
}


def make_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Keys around centres of very unequal weight, a common offset, and noise; clustered as far as each kernel needs."""
    torch.manual_seed(0)
    config = TieredKVConfig()
    rows, tokens, dim = shape.rows, shape.tokens, shape.head_dim
    num_centres = tokens // 12 + 1
    weight = 1 / torch.arange(1, num_centres + 1, device=device) ** 0.7
    centre = torch.multinomial(weight.expand(rows, -1), tokens, replacement=True)
    centres = torch.randn(rows, num_centres, dim, device=device)
    keys = centres.gather(1, centre[..., None].expand(-1, -1, dim)) + 0.5 * torch.randn(
        rows, tokens, dim, device=device
    )
    keys = (keys + 2 * torch.randn(rows, 1, dim, device=device)).to(dtype)
    values = torch.randn(rows, tokens, dim, device=device).to(dtype)
    valid = None
    if shape.partly_valid:
        padding = torch.arange(rows, device=device)[:, None] * (tokens // (2 * rows))
        valid = torch.arange(tokens, device=device) >= padding
    clusters, pieces = num_clusters(tokens, config), max_clusters(tokens, config)
    x = directions.key_directions(keys, valid, True)
    assignment = assign_by_direction(keys, valid, clusters, config)
    centroids = kmeans.update_centroids(x, assignment, directions.evenly_spaced(x, valid, clusters))
    places, sizes, offsets = order.order_by_cluster(assignment, clusters, config.max_cluster_tokens, pieces)
    packed = pack.pack_tokens(keys, values, places)
    means, _, _ = summarise.summarise_clusters(packed, offsets, sizes, dim)
    return Inputs(
        config, clusters, pieces, keys, values, valid, x, centroids, assignment, places, sizes, offsets, packed, means
    )


def check(i: Inputs) -> None:
    """Every kernel against its reference, and against itself.

    Raises:
        AssertionError: A kernel is wrong.
    """
    nearest = KERNELS["assign"].call(i)
    for row in range(len(i.x)):  # one at a time: the reference holds a token × cluster matrix
        score = i.x[row].float() @ i.centroids[row].float().T
        at = nearest[row].clamp(max=i.clusters - 1).long()[:, None]
        is_nearest = score.gather(1, at)[:, 0] >= score.amax(1) - 1e-5
        assert (is_nearest | (nearest[row] == i.clusters)).all(), "assign"
    if i.valid is not None:
        assert torch.equal(nearest == i.clusters, ~i.valid), "assign: valid"
    for name, tolerance in (
        ("directions", 1e-2), ("start", 0), ("update", 1e-2), ("sum", 1e-3), ("order", 0), ("pack", 0),
        ("summarise", 1e-4), ("quantise", 0),
    ):  # fmt: skip
        with force_backend("torch"):
            expected = KERNELS[name].call(i)
        result = KERNELS[name].call(i)
        close(name, result, expected, tolerance)
    for name, kernel in KERNELS.items():
        close(f"{name}, again", kernel.call(i), kernel.call(i), 0)
    one, other = (cluster_segment(i.keys, i.values, i.valid, i.config) for _ in range(2))
    close("cluster_segment, again", tuple(vars(one).values()), tuple(vars(other).values()), 0)


def close(name: str, result: Any, expected: Any, tolerance: float) -> None:
    pairs = [(result, expected)] if isinstance(result, torch.Tensor) else list(zip(result, expected, strict=True))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}")


def check_no_waits(i: Inputs) -> None:
    """Clustering a segment must not make the host wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        cluster_segment(i.keys, i.values, i.valid, i.config)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_times(call: Callable[[], Any], calls: int = CALLS_PER_GRAPH) -> list[float]:
    """µs of one call, for each of ``REPLAYS`` replays of a graph of ``calls`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS + 3)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 / calls for start, end in marks[3:]]


def eager_times(call: Callable[[], Any]) -> list[float]:
    """µs of one call on the GPU, launches included, for each of ``REPLAYS`` calls."""
    call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for start, end in marks:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in marks]


def host_times(call: Callable[[], Any]) -> list[float]:
    """µs the host takes to submit one call, the GPU idle before."""
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def row_of(what: str, shape: Shape, times: list[float], **more: Any) -> dict[str, Any]:
    deciles = statistics.quantiles(times, n=10)
    return {
        "kernel": what,
        "shape": asdict(shape),
        "median_us": round(statistics.median(times), 2),
        "p10_us": round(deciles[0], 2),
        "p90_us": round(deciles[-1], 2),
        **more,
    }


def floor_us(kernel: Kernel, i: Inputs) -> float:
    return max(kernel.bytes(i) / BYTES_PER_US, kernel.flops(i) / FLOPS_PER_US)


def time_kernels(shape: Shape, i: Inputs, names: list[str]) -> Iterator[dict[str, Any]]:
    for name in names:
        kernel = KERNELS[name]
        times = graph_times(partial(kernel.call, i))
        yield row_of(
            name, shape, times, floor_us=round(floor_us(kernel, i), 2), bytes=kernel.bytes(i), flops=kernel.flops(i)
        )


def time_segment(shape: Shape, i: Inputs) -> Iterator[dict[str, Any]]:
    """The whole of it: GPU time in a graph, time of submission without one, and the torch references."""

    def call() -> Any:
        return cluster_segment(i.keys, i.values, i.valid, i.config)

    floors = {name: floor_us(kernel, i) for name, kernel in KERNELS.items()}
    rounds = i.config.kmeans_iterations
    once = sum(floors[name] for name in ("directions", "start", "assign", "order", "pack", "summarise"))
    floor = once + rounds * (floors["assign"] + floors["update"])
    yield row_of("cluster_segment", shape, graph_times(call, calls=1), floor_us=round(floor, 2))
    yield row_of("cluster_segment, host", shape, host_times(call))
    if shape.rows * shape.tokens <= 8 * 8192 and i.valid is None:
        with force_backend("torch"):
            yield row_of("cluster_segment, torch references", shape, eager_times(call))


def sweep(shape: Shape, i: Inputs, names: list[str]) -> Iterator[dict[str, Any]]:
    """Each setting of each kernel, the others at their defaults. What does not fit the GPU is a row too."""
    for name in names:
        kernel = KERNELS[name]
        for setting, choices in kernel.sweep.items():
            for choice in choices:
                values = dict(zip(setting.split(","), choice, strict=True)) if "," in setting else {setting: choice}
                with settings(kernel.module, values):
                    try:
                        times = graph_times(partial(kernel.call, i))
                    except Exception as error:  # too much shared memory, or a shape the compiler refuses
                        torch.cuda.synchronize()
                        yield {"kernel": name, "shape": asdict(shape), "settings": values, "error": str(error)[:200]}
                        continue
                yield row_of(name, shape, times, floor_us=round(floor_us(kernel, i), 2), settings=values)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append rows to this JSON-lines file")
    parser.add_argument("--sweep", action="store_true", help="time tile and warp settings instead of the defaults")
    parser.add_argument("--only", default="", metavar="KERNELS", help=f"some of {','.join(KERNELS)}; default all")
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only shapes whose name contains this")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.clustering needs a CUDA GPU", file=sys.stderr)
        return 2
    names = [name for name in options.only.split(",") if name] or list(KERNELS)
    shapes = [shape for shape in SHAPES if options.shapes in shape.name]
    for shape in shapes:
        smaller = replace(shape, rows=min(shape.rows, 16))
        inputs = make_inputs(smaller, torch.bfloat16, "cuda")
        check(inputs)
        check_no_waits(inputs)
        print(f"checked: {shape.name}", file=sys.stderr, flush=True)
    about = environment()
    for shape in shapes:
        inputs = make_inputs(shape, torch.bfloat16, "cuda")
        if options.sweep:
            rows: Iterator[dict[str, Any]] = sweep(shape, inputs, names)
        else:
            rows = (row for part in (time_kernels(shape, inputs, names), time_segment(shape, inputs)) for row in part)
        for row in rows:
            line = json.dumps({"benchmark": "clustering", **row, **about})
            print(line, flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
