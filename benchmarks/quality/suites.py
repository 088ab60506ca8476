"""Sizes of a run: which tasks with how many items, how long, at which budgets, against which methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """A run's size.

    Attributes:
        models: Names in ``benchmarks.models`` (any other model may be given) with the prompt length each is run at.
        length: Prompt length of other models, at most what their configuration allows.
        budgets: Candidates attended.
        methods: Baselines; ours is always there.
        tasks: Items of each task.
        steps: Decode steps of a running text.
    """

    models: dict[str, int]
    length: int
    budgets: tuple[int, ...]
    methods: tuple[str, ...]
    tasks: dict[str, int]
    steps: int = 512


SUITES = {
    "ci": Suite(
        models={"smollm2-135m": 3000},
        length=3000,
        budgets=(512,),
        methods=("streaming_llm", "oracle", "quest", "snapkv", "clusterkv"),
        tasks={"ppl_python": 2, "passkey": 3, "niah_multikey": 2, "copying": 1},
        steps=64,
    ),
    "full": Suite(
        models={"smollm2-135m": 7500, "gemma3-270m": 30000},
        length=30000,
        budgets=(512, 1024),
        methods=(
            "streaming_llm", "oracle", "oracle_q", "quest", "infinigen", "h2o", "snapkv", "kivi_int4", "kivi_int2",
            "clusterkv", "int2_topk",
        ),
        tasks={
            "ppl_books": 2, "ppl_code": 2, "ppl_manual": 1, "copying": 4,
            "passkey": 20, "niah_single": 20, "niah_multikey": 10, "niah_multivalue": 4, "niah_multiquery": 4,
            "variable_tracking": 4, "key_value": 4, "lines": 10, "topics": 8, "babi_qa1": 10, "babi_qa2": 10,
            "documents": 10, "banking77": 12, "clinc150": 12, "subjectivity": 12, "next_line": 10, "multi_turn": 4,
        },
    ),
    "long": Suite(
        models={"smollm2-135m": 7500, "gemma3-270m": 30000},
        length=30000,
        budgets=(512,),
        methods=("streaming_llm", "oracle", "quest", "snapkv", "h2o", "clusterkv", "int2_topk"),
        tasks={"long_generation": 1},
    ),
}  # fmt: skip
"""``ci`` takes minutes on two cores, ``full`` about ten minutes a model on one GPU, ``long`` is 4096 new tokens."""
