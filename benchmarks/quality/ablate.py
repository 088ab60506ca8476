"""Variations of ours, one option at a time, on a few core tasks: where the defaults come from.

Real variations run the real cache. Simulated ones, marked ``sim``, change what the cache fixes (reduction over the
group, log-size term, scalar variances, ...) and run as rows of the research attention, all in one pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.quality.methods import make_methods
from benchmarks.quality.methods.base import Method
from benchmarks.quality.methods.clusters import ClusterOptions, Clusters
from benchmarks.quality.ours import schedule_of
from benchmarks.quality.run import Plan, Subject, run_task
from benchmarks.quality.tasks import TASKS
from benchmarks.quality.tasks.data import Data
from benchmarks.quality.tasks.items import Encoder, Maker
from tiered_kv import TieredKVConfig

CORE_TASKS = {"ppl_books": 1, "ppl_manual": 1, "passkey": 6, "copying": 2}
"""Items of each task that variations are judged on."""

VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "tokens_per_cluster": [
        {"tokens_per_cluster": 8, "max_cluster_tokens": 32},
        {"tokens_per_cluster": 32, "max_cluster_tokens": 128},
        {"tokens_per_cluster": 80, "max_cluster_tokens": 320},
    ],
    "max_cluster_tokens": [{"max_cluster_tokens": n} for n in (16, 32, 128, 512)],
    "kmeans_iterations": [{"kmeans_iterations": n} for n in (1, 3, 5, 20)],
    "prefill_segment": [{"prefill_segment": n, "prefill_chunk": 8192} for n in (1024, 2048, 4096, 16384)],
    "window_size": [{"window_size": n} for n in (16, 32, 128, 256)],
    "estimate": [{"estimate": False}, {"estimate": False, "spread": 0.0}],
    "spread": [{"spread": share} for share in (0.0, 0.25, 1.0)],
    "spread_limit": [{"spread_limit": limit} for limit in (0.5, 3.0)],
    "index_dtype": [{"index_dtype": "model"}],
    "decode_segment": [{"decode_segment": n} for n in (64, 128, 640)],
    "center_keys": [{"center_keys": False}],
    "block_size": [{"block_size": n} for n in (4, 16)],
    "token_budget": [{"token_budget": n} for n in (128, 256, 1024, 2048)],
    "num_sink_tokens": [{"num_sink_tokens": n} for n in (4, 64)],
}
"""Real variations: options of :class:`~tiered_kv.TieredKVConfig` that differ from the default, by what is varied."""

SIMULATED: dict[str, dict[str, Any]] = {
    "sim": {},
    "sim_mean_over_group": {"reduce": "mean"},
    "sim_per_query_head": {"reduce": "none"},
    "sim_log_size": {"log_size": True},
    "sim_trim": {"trim": True, "estimate_share": 0.0},
    "sim_scalar_variance": {"scalar_variance": True},
    "sim_estimate_best_quarter": {"estimate_share": 0.25},
    "sim_estimate_best_tenth": {"estimate_share": 0.1},
    "sim_whole_prompt_at_once": {"segment": 1 << 30},
    "sim_no_cap": {"max_cluster_tokens": 1 << 30},
}
"""Simulated variations: changes of :class:`ClusterOptions`."""


def ablate(
    subject: Subject,
    encoder: Encoder,
    data: Data,
    *,
    length: int,
    budget: int,
    only: Sequence[str] | None,
    options: argparse.Namespace,
) -> int:
    """Measure what the file of rows lacks; returns the number of rows written.

    Args:
        length: Tokens of a prompt.
        budget: Candidates attended, where the budget is not what varies.
        only: Names of ``VARIATIONS``, or ``"sim"``; all when ``None``.

    Raises:
        SystemExit: A name is not known.
    """
    wanted = [*VARIATIONS, "sim"] if only is None else ["default", *only]
    unknown = sorted(set(wanted) - {*VARIATIONS, "sim"})
    if unknown:
        raise SystemExit(f"unknown variation {unknown[0]!r}: expected any of {', '.join(VARIATIONS)}, sim")
    base = TieredKVConfig(token_budget=budget)
    configs = [(_name(changes), replace(base, **changes)) for name in wanted for changes in VARIATIONS.get(name, [])]
    methods = make_methods(["streaming_llm", "oracle"], [budget]) + (_simulated(budget) if "sim" in wanted else [])
    plan = Plan(methods, configs, schedule_of(base), options.rows)
    makers = {
        task: Maker(encoder, data, length, count, options.seed, options.steps or 512)
        for task, count in CORE_TASKS.items()
    }
    return sum(run_task(subject, TASKS[task], maker, plan) for task, maker in makers.items())


def _name(changes: dict[str, Any]) -> str:
    """What rows call it: ``ours`` and the changes."""
    told = [f"{name}={value}" for name, value in changes.items() if name not in ("prefill_chunk", "token_budget")]
    return "ours" + (f" ({', '.join(told)})" if told else "")


def _simulated(budget: int) -> list[Method]:
    return [Clusters([budget], name, replace(ClusterOptions(), **changes)) for name, changes in SIMULATED.items()]
