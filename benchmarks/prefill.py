"""Time to first token: our streamed prefill beside transformers' own with SDPA, both through ``generate()``.

    python -m benchmarks.prefill                                       # 32k
    python -m benchmarks.prefill --contexts 131072 --cap-gib 24        # 128k on as much memory as a small GPU has

Random token ids, random weights, one new token. ``hf`` is plain ``generate()`` with a DynamicCache, the whole prompt in
one pass; where it runs out of memory the row says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks import peers, rows, shapes
from benchmarks.ours import add_arguments, kv_config, memory_stats
from tiered_kv import TieredCache, TieredKVConfig, TieredKVError, kv_cache_dispatched

BARS = {32768: 1.15}
"""Most that our time over transformers' may be (issue 6)."""
COLUMNS = ("what", "batch", "context", "cap_gib", "ms", "ms_p10", "ms_p90", "peak_gib", "ratio", "bar", "won", "note")


Close = Callable[[], Any]


def hf_first_token(model: Any, ids: torch.Tensor) -> Close:
    _one_token(model, ids, DynamicCache(config=model.config))
    return lambda: None


def _one_token(model: Any, ids: torch.Tensor, cache: Any) -> None:
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False)


class Ours:
    """Our first token from a fresh cache: taking and page-locking its host memory counts, giving it back does not."""

    def __init__(self, model: Any, kv_config: TieredKVConfig) -> None:
        self.model, self.kv_config = model, kv_config
        self.stats: dict[str, Any] = {}

    def __call__(self, ids: torch.Tensor) -> Close:
        cache = TieredCache(self.model.config, self.kv_config)
        _one_token(self.model, ids, cache)

        def close() -> None:
            self.stats = memory_stats(cache)
            cache.close()

        return close


def measured(first_token: Callable[[torch.Tensor], Close], ids: torch.Tensor, measurements: int) -> dict[str, Any]:
    """Times of the first token and the peak of GPU memory; after one run that is not counted."""
    peers.release()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        times = [timed(first_token, ids) for _ in range(measurements + 1)]
        return rows.Timing(times[1:], 1).fields() | peak()
    except (torch.OutOfMemoryError, TieredKVError) as error:
        is_refusal = isinstance(error, TieredKVError)
        return {"note": str(error) if is_refusal else "out of GPU memory", **peak()}
    finally:
        peers.release()


def timed(first_token: Callable[[torch.Tensor], Close], ids: torch.Tensor) -> float:
    """Milliseconds to the first token, and then the cache goes."""
    made: list[Close] = []
    ms = rows.elapsed(lambda: made.append(first_token(ids)), 1)
    made.pop()()
    return ms


def peak() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    return {"peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


def run(model: Any, config: TieredKVConfig, context: int, out: rows.Rows, plan: Any) -> None:
    """Both on one prompt, and a row that compares them."""
    ids = torch.randint(3, model.config.vocab_size, (plan.batch, context), device=model.device)
    place = {"shape": plan.shape, "batch": plan.batch, "context": context, "cap_gib": plan.cap_gib}
    found: dict[str, dict[str, Any]] = {}
    if "ours" in plan.who:
        with kv_cache_dispatched(model, config):
            ours = Ours(model, config)
            found["ours"] = measured(ours, ids, plan.measurements)
        out.add(what="ours", **place, **found["ours"], settings=config.to_dict(), stats=ours.stats)
    if "hf" in plan.who:
        model.set_attn_implementation("sdpa")
        found["hf"] = measured(lambda ids: hf_first_token(model, ids), ids, plan.measurements)
        out.add(what="hf", **place, **found["hf"])
    if len(found) == 2:
        out.add(what="ours over", **place, **judged(found["ours"], found["hf"], BARS.get(context)))


def judged(ours: dict[str, Any], hf: dict[str, Any], bar: float | None) -> dict[str, Any]:
    """Who won; who ran out of memory has lost."""
    if "ms" in ours and "ms" in hf:
        return rows.verdict(ours["ms"] / hf["ms"], bar)
    return {"won": "ms" in ours, "note": "hf: " + hf["note"] if "note" in hf else "ours: " + ours["note"]}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = rows.arguments(__doc__, "prefill")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="8b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--who", nargs="+", choices=("ours", "hf"), default=["ours", "hf"])
    parser.add_argument("--measurements", type=int, help="default 5, or 2 from 100k tokens on")
    add_arguments(parser)
    parser.add_argument("--cap-gib", type=float, help="GPU memory this process may take, weights included")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.smoke:
        options.shape, options.contexts, options.measurements = "tiny", [700], 2
    chosen = options.measurements
    device = rows.device_of(options)
    rows.set_cap(options.cap_gib)
    model, out = shapes.make_model(options.shape, device), rows.open_rows("prefill", options)
    for context in options.contexts:
        options.measurements = chosen or (2 if context > 100_000 else 5)
        run(model, kv_config(options), context, out, options)
    print(rows.table(out.rows, COLUMNS))


if __name__ == "__main__":
    main()
