"""Milliseconds per token of a decode step, beside the peers, in one run.

    python -m benchmarks.decode                                        # 1 x 32k, 1 x 128k, 8 x 32k; every peer
    python -m benchmarks.decode --quick                                # ours, the floor and full KV in a graph
    python -m benchmarks.decode --cap-gib 24                           # best batch of each under a memory cap
    python -m benchmarks.decode --kv prefetch=next_layer               # other options of the library
    python -m benchmarks.decode --profile                              # kernels of one replayed step of ours

Caches are filled with random keys and values (benchmarks/fill.py); what ours selects follows a trace recorded from a
real model (benchmarks/traces.py), so that it misses as that model would, and the miss rate over the timed steps stands
beside each time. A row is a median of measurements of several steps each, with its 10th and 90th percentiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import capped, fill, ours, peers, rows, shapes, traces
from benchmarks.fill import HOST_BYTES
from tiered_kv import TieredKVConfig

BARS = {
    ("floor", 1, 131072, 0.1): 1.35,
    ("floor", 1, 131072, 0.4): 1.6,
    ("floor", 1, 32768, 0.1): 1.3,
    ("full_graph", 1, 32768, 0.1): 1.0,
    ("full_graph", 8, 32768, 0.1): 1 / 1.5,
    ("offloaded", 1, 32768, 0.1): 1 / 30,
    ("offloaded", 1, 131072, 0.1): 1 / 100,
}
"""Most that our time over the peer's may be, by peer, batch, context and miss rate (issue 6)."""

COLUMNS = (
    "what", "batch", "context", "miss_target", "miss_rate", "ms", "ms_p10", "ms_p90", "tokens_per_s", "peer", "ratio",
    "bar", "won", "note",
)  # fmt: skip


class Setting:
    """One batch and context: runs whoever is asked and compares ours with each.

    Args:
        model: Shared by all.
        kv_config: Ours; the size of the GPU cluster cache comes with the miss rate.
        out: Where rows go.
        plan: Command line options.
    """

    def __init__(self, model: Any, kv_config: TieredKVConfig, batch: int, context: int, out: rows.Rows, plan: Any):
        self.model, self.kv_config, self.out, self.plan = model, kv_config, out, plan
        self.batch, self.context = batch, context
        self.ours: list[dict[str, Any]] = []
        self.peers: list[dict[str, Any]] = []

    def run(self) -> None:
        """Fast peers first, so that a run that is cut short has the rows that matter."""
        for name in [p for p in ("floor", "full_graph") if p in self.plan.peers]:
            self.run_peer(name)
        self.run_ours()
        for name in [p for p in peers.PEERS[2:] if p in self.plan.peers]:
            self.run_peer(name)

    def row(self, what: str, **facts: Any) -> dict[str, Any]:
        place = {"shape": self.plan.shape, "batch": self.batch, "context": self.context}
        if "ms" in facts:
            facts["tokens_per_s"] = round(self.batch * 1e3 / facts["ms"], 1)
        return self.out.add(what=what, **place, **facts)

    def run_peer(self, name: str) -> None:
        if name in peers.CUDA_ONLY and not torch.cuda.is_available():
            print(f"  {name}: skipped, needs CUDA")
            return
        if name == "offloaded" and self.batch > 1:
            print(f"  {name}: skipped, a batch of {self.batch} takes minutes")
            return
        try:
            with peers.running(name, self.model, self.batch, self.context) as peer:
                slow = name in ("dynamic", "offloaded")
                timing = rows.time_steps(peer.step, self.plan.steps, self.plan.measurements, warmup=2 if slow else 3)
                row = self.row(name, **timing.fields(), **peer.facts, **_gpu_memory())
                if name == "dynamic":
                    self.run_generate("dynamic, generate()", peer.cache, 8)
        except torch.OutOfMemoryError:
            peers.release()
            row = self.row(name, note="out of GPU memory")
        self.peers.append(row)
        for mine in self.ours:
            self.compare(mine, row)

    def run_generate(self, what: str, cache: Any, tokens: int) -> None:
        ids = ours.random_ids(self.model, cache, self.batch)
        times = ours.generate_times(self.model, cache, ids, tokens)
        self.row(what, **times.fields())

    def run_ours(self) -> None:
        need = self.batch * self.context * shapes.kv_bytes_per_token(self.model.config, self.model.dtype)
        if need > HOST_BYTES:
            self.row("ours", note=f"needs {need >> 30} GiB of pinned host memory, more than the machine has")
            return
        try:
            self.run_misses()
        except torch.OutOfMemoryError:
            self.row("ours", note="out of GPU memory")
        peers.release()

    def run_misses(self) -> None:
        place = (self.batch, self.context, self.model.device, self.model.dtype)
        cache = fill.fill_tiered(self.model.config, self.kv_config, *place)
        try:
            for miss in self.plan.miss:
                self.run_miss(cache, miss)
        finally:
            cache.close()

    def run_miss(self, cache: Any, miss: float) -> None:
        name, gpu_cache_size, stride = traces.for_miss_rate(miss)
        fill.with_gpu_cache(cache, gpu_cache_size)
        peers.release()
        facts = {
            "miss_target": miss,
            "trace": name,
            "gpu_cache_size": gpu_cache_size,
            "settings": cache.kv_config.to_dict(),
        }
        with ours.decoding(self.model, cache, traces.load(name), stride) as decoder:
            timing, counted = decoder.timed(self.plan.steps, self.plan.measurements)
            facts |= counted
            mine = self.row(
                "ours", **timing.fields(), **facts, waits=decoder.waits(), replay_ms=decoder.replay_ms(),
                stats=ours.memory_stats(cache), **_gpu_memory(), eager=self.model._tiered_kv.graph.refusal,
            )  # fmt: skip
            generated = decoder.generated(self.plan.generated)
            overhead = round(generated.ms - timing.ms, 4)
            self.row(
                "ours, generate()", **generated.fields(), **facts, overhead_ms=overhead, bar=0.5, won=overhead <= 0.5
            )
            if miss == self.plan.sustained:
                decoder.rewind()
                self.row("ours, with a segment", **decoder.sustained(), **facts)
        self.ours.append(mine)
        for peer in self.peers:
            self.compare(mine, peer)

    def compare(self, mine: dict[str, Any], peer: dict[str, Any]) -> None:
        """A row of its own: our time over the peer's, its bar, and whether we won; a peer that did not fit has lost."""
        place = (peer["what"], self.batch, self.context, mine["miss_target"])
        bar = BARS.get(place) if self.plan.shape == "8b" else None
        judged = rows.verdict(mine["ms"] / peer["ms"], bar) if "ms" in peer else {"won": True, "note": peer["note"]}
        if peer["what"] == "floor" and bar is None:
            judged["won"] = None  # the floor is there to be approached
        self.row("ours over", peer=peer["what"], miss_target=mine["miss_target"], miss_rate=mine["miss_rate"], **judged)


def _gpu_memory() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return {"gpu_gib": round(torch.cuda.memory_reserved() / 2**30, 2)}


def profile_step(model: Any, kv_config: TieredKVConfig, batch: int, context: int, miss: float) -> str:
    """Kernels of one replayed step: name, count, µs."""
    from torch.profiler import ProfilerActivity, profile

    name, gpu_cache_size, stride = traces.for_miss_rate(miss)
    config = TieredKVConfig(**kv_config.to_dict() | {"gpu_cache_size": gpu_cache_size})
    cache = fill.fill_tiered(model.config, config, batch, context, model.device, model.dtype)
    with ours.decoding(model, cache, traces.load(name), stride) as decoder:
        for _ in range(ours.SETTLING):
            decoder.step()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with profile(activities=activities) as profiler:
            decoder.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    cache.close()
    peers.release()
    return _kernel_table(profiler)


def _kernel_table(profiler: Any) -> str:
    """Kernels by time; on the CPU, where there are none, operators."""
    on_gpu, found = torch.cuda.is_available(), []
    for event in profiler.key_averages():
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if us and (event.device_type.name == "CUDA") == on_gpu:
            found.append({"kernel": event.key[:90], "count": event.count, "us": round(us, 1)})
    found.sort(key=lambda row: -row["us"])
    total = {"kernel": "all", "count": sum(r["count"] for r in found), "us": sum(r["us"] for r in found)}
    return rows.table([total, *found[:40]], ("kernel", "count", "us"))


def settings(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Batches and contexts; long ones singly unless both are asked for by name."""
    for context in options.contexts or (32768, 131072):
        for batch in options.batches or ((1, 8) if context <= 32768 else (1,)):
            yield batch, context


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = rows.arguments(__doc__, "decode")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="8b")
    parser.add_argument("--contexts", type=int, nargs="+", help="default 32768 131072")
    parser.add_argument("--batches", type=int, nargs="+", help="default 1 and 8 up to 32k, 1 beyond")
    parser.add_argument("--miss", type=float, nargs="+", default=[0.0, 0.1, 0.4], help="token miss rates to aim at")
    ours.add_arguments(parser)
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    parser.add_argument("--quick", action="store_true", help="no slow peers, fewer measurements")
    parser.add_argument("--steps", type=int, default=20, help="steps a measurement")
    parser.add_argument("--measurements", type=int, default=rows.MEASUREMENTS)
    parser.add_argument("--generated", type=int, default=48, help="tokens of the timed generate()")
    parser.add_argument("--sustained", type=float, default=0.1, help="miss rate whose run goes on over a segment's end")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step, and stop")
    parser.add_argument("--cap-gib", type=float, help="GPU memory this process may take: the best batch of each peer")
    parser.add_argument("--longest", action="store_true", help="with --cap-gib: the longest context each can hold, too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.peers = [p for p in options.peers if p in ("floor", "full_graph")]
        options.measurements = 5
    if options.smoke:
        options.shape, options.contexts, options.batches = "tiny", [600], [2]
        options.steps, options.measurements, options.generated = 2, 2, 4
    return options


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = rows.device_of(options)
    rows.set_cap(options.cap_gib)
    model, out = shapes.make_model(options.shape, device), rows.open_rows("decode", options)
    kv_config = ours.kv_config(options)
    if options.profile:
        for batch, context in settings(options):
            print(f"{batch} x {context}, miss rate aimed at {options.miss[-1]}")
            print(profile_step(model, kv_config, batch, context, options.miss[-1]))
        return
    if options.cap_gib:
        capped.run(model, kv_config, out, options)
    else:
        for batch, context in settings(options):
            Setting(model, kv_config, batch, context, out, options).run()
    print(rows.table(out.rows, COLUMNS))


if __name__ == "__main__":
    main()
