"""Decode under a cap on GPU memory: the best batch of each at one context, and the longest context each can hold.

``python -m benchmarks.decode --cap-gib 24 [--longest]`` runs it. The cap counts everything of this process, weights,
activations and graphs included but for CUDA's own half GiB or so, and holds while caches are filled, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import fill, full_attention, ours, peers, rows, shapes, traces
from benchmarks.fill import HOST_BYTES
from tiered_kv import TieredKVConfig

BAR = 2.5
"""Least that our throughput over the full-KV graph's may be (issue 6)."""
CONTEXT = 32768
GPU_CACHE_SIZES = (1.0, 2.0)
TRACES = ("smollm2", "gemma3")
SPARE_BYTES = 1 << 30
"""GPU memory left for activations, graphs and filling when a batch is guessed; too little costs a try."""
LONGEST = (655360, 524288, 393216, 262144, 131072)


def run(model: Any, kv_config: TieredKVConfig, out: rows.Rows, plan: Any) -> None:
    """The full-KV graph, then ours with each size of the GPU cache, then who won; then lengths, if asked for."""
    context = (plan.contexts or [CONTEXT])[0]
    facts = {"shape": plan.shape, "context": context, "cap_gib": plan.cap_gib}
    peer = best_peer(model, context, out, plan, facts)
    mine = [row for size in GPU_CACHE_SIZES for row in our_rows(model, kv_config, context, size, out, plan, facts)]
    for trace in sorted({row["trace"] for row in mine}) if peer else ():
        best = max((row for row in mine if row["trace"] == trace), key=lambda row: row["tokens_per_s"])
        judged = rows.verdict(best["tokens_per_s"] / peer["tokens_per_s"], BAR, most=False)
        same = {"batch": best["batch"], "trace": trace, "miss_rate": best["miss_rate"]}
        out.add(what="ours over, tokens/s", peer="full_graph", **same, **facts, **judged)
    if plan.longest:
        longest(model, kv_config, out, plan)


def free_bytes(plan: Any) -> float:
    """What the cap leaves beside the weights."""
    peers.release()
    if not torch.cuda.is_available():
        return 8 << 20
    return plan.cap_gib * 2**30 - torch.cuda.memory_allocated()


def largest(guess: int, attempt: Callable[[int], Any], tries: int = 4) -> Any:
    """What ``attempt`` gives at the largest batch that fits, from a guess downwards; ``None`` when none does."""
    for batch in range(max(1, guess), max(0, guess - tries), -1):
        try:
            return attempt(batch)
        except torch.OutOfMemoryError:
            print(f"  batch {batch} does not fit")
        peers.release()  # outside the handler, which holds the frames that hold the memory
    return None


def best_peer(model: Any, context: int, out: rows.Rows, plan: Any, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The full-KV graph at its largest batch."""
    bytes_each = context * shapes.kv_bytes_per_token(model.config, model.dtype)

    def attempt(batch: int) -> dict[str, Any]:
        with peers.running("full_graph", model, batch, context) as peer:
            timing = rows.time_steps(peer.step, plan.steps, plan.measurements)
            rate = round(batch * 1e3 / timing.ms, 1)
            return out.add(what="full_graph", batch=batch, **facts, **timing.fields(), tokens_per_s=rate, **peer.facts)

    return largest(int(free_bytes(plan) // bytes_each), attempt)


def our_rows(
    model: Any, kv_config: TieredKVConfig, context: int, size: float, out: rows.Rows, plan: Any, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """Ours at its largest batch with a GPU cluster cache of ``size`` budgets: a row a trace."""
    kv_config = replace(kv_config, gpu_cache_size=size)
    bytes_each = our_bytes(model, kv_config, context)
    host = context * shapes.kv_bytes_per_token(model.config, model.dtype)
    guess = min(int((free_bytes(plan) - SPARE_BYTES) // bytes_each), HOST_BYTES // host, 4 if plan.smoke else 64)

    def attempt(batch: int) -> list[dict[str, Any]]:
        cache = fill_batch(model, kv_config, batch, context)
        try:
            return [timed(model, cache, name, out, plan, facts) for name in TRACES if name in traces.names()]
        finally:
            cache.close()

    found = largest(guess, attempt) or []
    peers.release()
    return found


def timed(model: Any, cache: Any, trace: str, out: rows.Rows, plan: Any, facts: dict[str, Any]) -> dict[str, Any]:
    with ours.decoding(model, cache, traces.load(trace)) as decoder:
        timing, counted = decoder.timed(plan.steps, plan.measurements)
        return out.add(
            what="ours", batch=decoder.batch, **facts, **timing.fields(), trace=trace, **counted,
            gpu_cache_size=cache.kv_config.gpu_cache_size,
            tokens_per_s=round(decoder.batch * 1e3 / timing.ms, 1), settings=cache.kv_config.to_dict(),
            stats=ours.memory_stats(cache),
        )  # fmt: skip


def fill_batch(model: Any, kv_config: TieredKVConfig, batch: int, context: int) -> Any:
    """A filled cache; large batches are clustered in shorter segments, so that filling them fits, too."""
    shorter = kv_config.prefill_segment
    while batch * shorter > 8 * 8192 and shorter > 2 * kv_config.decode_segment:
        shorter //= 2
    kv_config = replace(kv_config, prefill_segment=shorter)
    return fill.fill_tiered(model.config, kv_config, batch, context, model.device, model.dtype)


def our_bytes(model: Any, kv_config: TieredKVConfig, context: int) -> int:
    """GPU bytes a sequence, from a filled cache of one layer."""
    config = type(model.config)(**model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
    cache = fill.fill_tiered(config, kv_config, 1, context, model.device, model.dtype)
    num_bytes = cache.stats()["kv_gpu_bytes"] * model.config.num_hidden_layers
    cache.close()
    peers.release()
    return num_bytes


def longest(model: Any, kv_config: TieredKVConfig, out: rows.Rows, plan: Any) -> None:
    """The longest context of one sequence that decodes a step under the cap."""
    facts = {"shape": plan.shape, "batch": 1, "cap_gib": plan.cap_gib}
    bytes_each = shapes.kv_bytes_per_token(model.config, model.dtype)
    guess = int(free_bytes(plan) // bytes_each // 2048)
    full = largest(guess, lambda blocks: full_step(model, blocks * 2048), tries=8)
    out.add(what="longest, full_graph", context=full, **facts)
    for context in [c for c in LONGEST if c * bytes_each <= HOST_BYTES] if not plan.smoke else [2048]:
        stats = largest(1, lambda _, context=context: our_step(model, kv_config, context))
        if stats is not None:
            note = f"{HOST_BYTES >> 30} GiB of host memory allow no longer one" if context == LONGEST[0] else None
            out.add(what="longest, ours", context=context, **facts, stats=stats, note=note)
            return


def full_step(model: Any, context: int) -> int:
    """One step of the full-KV graph's model over ``context`` tokens; gives ``context``."""
    before = model.config._attn_implementation
    full_attention.register(full_attention.gqa)
    model.set_attn_implementation(full_attention.NAME)
    try:
        cache = full_attention.full_cache(model.config, 1, context, model.device, model.dtype)
        token = torch.ones(1, 1, dtype=torch.long, device=model.device)
        rows.captured(lambda: model(input_ids=token, past_key_values=cache, position_ids=token))()
    finally:
        model.set_attn_implementation(before)
    return context


def our_step(model: Any, kv_config: TieredKVConfig, context: int) -> dict[str, Any]:
    """A few of our steps over ``context`` tokens; gives the cache's memory."""
    cache = fill.fill_tiered(model.config, kv_config, 1, context, model.device, model.dtype)
    try:
        with ours.decoding(model, cache, traces.load("drift")) as decoder:
            for _ in range(4):
                decoder.step()
            return ours.memory_stats(cache)
    finally:
        cache.close()
