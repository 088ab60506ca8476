"""The methods under comparison, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.quality.methods.base import Method
from benchmarks.quality.methods.clusters import CLUSTERKV, ClusterOptions, Clusters
from benchmarks.quality.methods.evicting import H2O, SnapKV
from benchmarks.quality.methods.infinigen import InfiniGen
from benchmarks.quality.methods.oracle import Oracle, OraclePerQueryHead
from benchmarks.quality.methods.quantised import Kivi, QuantisedTopK
from benchmarks.quality.methods.quest import Quest
from benchmarks.quality.methods.streaming import StreamingLLM

BASELINES: dict[str, Callable[[Sequence[int]], Method]] = {
    "streaming_llm": StreamingLLM,
    "oracle": Oracle,
    "oracle_q": OraclePerQueryHead,
    "quest": Quest,
    "infinigen": InfiniGen,
    "h2o": H2O,
    "snapkv": SnapKV,
    "kivi_int4": lambda budgets: Kivi(4),
    "kivi_int2": lambda budgets: Kivi(2),
    "clusterkv": lambda budgets: Clusters(budgets, "clusterkv", CLUSTERKV),
    "int2_topk": QuantisedTopK,
    "ours_sim": lambda budgets: Clusters(budgets, "ours_sim", ClusterOptions()),
}
"""Every method of the research attention; the full cache is always there, and ours runs for real (``ours.py``)."""


def make_methods(names: Sequence[str], budgets: Sequence[int]) -> list[Method]:
    """The named methods with a row for each budget.

    Raises:
        ValueError: A name is not known.
    """
    unknown = sorted(set(names) - set(BASELINES))
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}: expected any of {', '.join(BASELINES)}")
    return [BASELINES[name](budgets) for name in names]
