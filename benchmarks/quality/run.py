"""Run tasks against methods and write a row for each: the loop behind ``python -m benchmarks.quality``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality.methods.base import Method
from benchmarks.quality.ours import TieredSession
from benchmarks.quality.rows import append_row, read_rows, row_key
from benchmarks.quality.schedule import Schedule
from benchmarks.quality.scoring import ItemScores, step_metrics, summarise
from benchmarks.quality.session import Session
from benchmarks.quality.tasks.data import MissingData
from benchmarks.quality.tasks.items import Item, Maker, Task
from tiered_kv import TieredKVConfig

FLOOR = "streaming_llm"
"""The method that ``recovered`` is measured from; it is part of every pass that has it at all."""


WORTH_A_GRAPH = 64
"""Decode steps from which on the real cache may capture them (an untuned guess)."""


@dataclass(frozen=True)
class Subject:
    """The model under test.

    Attributes:
        name: As given on the command line.
        sha256: Of the weights' file, where it is one known file.
        dtype: Weights' and cache's.
    """

    model: Any
    name: str
    sha256: str | None
    dtype: str


@dataclass
class Plan:
    """What is compared on every task.

    Attributes:
        methods: Baselines of the research attention.
        configs: Ours, by the name rows are to carry.
        schedule: Sinks and window granted to every method.
        path: File of rows.
        quiet: Print nothing.
        done: Keys of the rows that are there.
    """

    methods: list[Method]
    configs: list[tuple[str, TieredKVConfig]]
    schedule: Schedule
    path: Path
    quiet: bool = False
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = {row["key"] for row in read_rows(self.path)}


@dataclass
class Replay:
    """What one pass over an item leaves for the passes that follow.

    Attributes:
        tokens: Tokens that were fed.
        scored: Steps that count.
        answers: Ranges within ``scored``.
        references: ``[scored, vocabulary]`` log-probabilities of the full cache.
        targets: ``[scored]`` int64.
        scores: The item under each row of the pass.
    """

    tokens: list[int]
    scored: list[int]
    answers: list[tuple[int, int]]
    references: torch.Tensor
    targets: torch.Tensor
    scores: list[ItemScores]


def scored_steps(item: Item) -> tuple[list[int], list[tuple[int, int]]]:
    """Steps whose prediction counts, and the ranges among them that make an answer.

    Step i predicts forced token i + 1.
    """
    steps: list[int] = []
    answers = []
    for begin, end in item.answers:
        answers.append((len(steps), len(steps) + end - begin))
        steps += range(begin - 1, end - 1)
    return steps, answers


def play(session: Session, item: Item) -> Replay:
    """One item under the full cache and every method, in one pass."""
    session.prefill(item.prompt)
    if item.greedy:
        return _play_greedily(session, item)
    steps, answers = scored_steps(item)
    wanted, fed = set(steps), item.forced[: max(steps) + 1]
    targets = torch.tensor([item.forced[step + 1] for step in steps], device=session.model.device)
    references, values = [], []
    for step, logits in enumerate(session.decode(fed)):
        if step in wanted:
            references.append(logits[0].float().log_softmax(-1))
            values.append(step_metrics(logits, references[-1], targets[len(values)]))
    return Replay(fed, steps, answers, torch.stack(references), targets, _per_row(values, steps, answers, item))


def _play_greedily(session: Session, item: Item) -> Replay:
    steps = list(range(0, item.greedy, item.score_every))
    fed, references, values, targets = [], [], [], []
    for step, (token, logits) in enumerate(session.continue_greedily(item.forced[-1], item.greedy)):
        fed.append(token)
        if step % item.score_every == 0:
            references.append(logits[0].log_softmax(-1))
            targets.append(references[-1].argmax()[None])
            values.append(step_metrics(logits, references[-1], targets[-1]))
    tokens, answers = torch.cat(fed).tolist(), [(0, len(steps))]
    return Replay(
        tokens, steps, answers, torch.stack(references), torch.cat(targets), _per_row(values, steps, answers, item)
    )


def replay(session: TieredSession, item: Item, before: Replay) -> ItemScores:
    """The same item, fed the same tokens, under the real cache."""
    session.prefill(item.prompt)
    place = {step: index for index, step in enumerate(before.scored)}
    values = [
        step_metrics(logits, before.references[place[step]], before.targets[place[step]])
        for step, logits in enumerate(session.decode(before.tokens))
        if step in place
    ]
    return _per_row(values, before.scored, before.answers, item)[0]


def _per_row(
    values: list[torch.Tensor], steps: list[int], answers: list[tuple[int, int]], item: Item
) -> list[ItemScores]:
    table = torch.stack(values).permute(2, 1, 0).double().cpu().numpy()
    return [ItemScores(steps, np.asarray(row), answers, item.meta.get("depth")) for row in table]


def run_task(subject: Subject, task: Task, maker: Maker, plan: Plan) -> int:
    """Measure what the file of rows lacks about a task.

    Returns:
        Rows written.
    """
    facts = {
        "model": subject.name, "model_sha256": subject.sha256, "dtype": subject.dtype, "task": task.name,
        "is_text": task.is_text, "length": maker.length, "items": maker.count, "steps": maker.steps, "seed": maker.seed,
        "schedule": asdict(plan.schedule),
    }  # fmt: skip
    methods = [method for method in plan.methods if not _is_done(facts, _variants([method]), plan)]
    configs = [named for named in plan.configs if not _is_done(facts, [_our_variant(*named)], plan)]
    if not methods and not configs:
        return _say(plan, f"{task.name}: nothing left to do")
    try:
        items = list(task.make(maker))
    except MissingData as missing:
        return _say(plan, f"{task.name}: skipped, {missing}")
    if not items:
        return _say(plan, f"{task.name}: skipped, no item of {maker.length} tokens")
    methods = [m for m in plan.methods if m in methods or m.name == FLOOR]
    began = time.perf_counter()
    variants, scores = _measure(subject, items, methods, configs, plan, task.name)
    facts["task_seconds"] = round(time.perf_counter() - began, 1)
    rows = [
        {**facts, **variant, **summarise(mine, scores[0], task.is_text)}
        for variant, mine in zip(variants, scores, strict=True)
    ]
    return sum(_write(_with_recovered(row, rows), plan) for row in rows)


def _write(row: dict[str, Any], plan: Plan) -> bool:
    if row_key(row) in plan.done:
        return False
    append_row(plan.path, row)
    plan.done.add(row_key(row))
    return True


def _with_recovered(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the share of the NLL that the window alone loses at the same budget and the method regains."""
    nll = {(r["method"], r["budget"]): r["metrics"]["nll"][0] for r in rows if r["method"] in (FLOOR, "full")}
    full, window = nll["full", None], nll.get((FLOOR, row["budget"]))
    if window is None or window - full < 1e-3:
        return {**row, "recovered": None}
    return {**row, "recovered": (window - row["metrics"]["nll"][0]) / (window - full)}


def _is_done(facts: dict[str, Any], variants: list[dict[str, Any]], plan: Plan) -> bool:
    return all(row_key({**facts, **variant}) in plan.done for variant in variants)


def _variants(methods: Iterable[Method]) -> list[dict[str, Any]]:
    """The part of a row's key that tells a method and budget, one for each row of a pass."""
    return [
        {"method": method.name, "settings": method.settings(), "budget": budget if method.has_budget else None}
        for method in methods
        for budget in method.budgets
    ]


def _our_variant(name: str, config: TieredKVConfig) -> dict[str, Any]:
    return {"method": name, "settings": config.to_dict(), "budget": config.token_budget}


def _measure(
    subject: Subject,
    items: list[Item],
    methods: list[Method],
    configs: list[tuple[str, TieredKVConfig]],
    plan: Plan,
    title: str,
) -> tuple[list[dict[str, Any]], list[list[ItemScores]]]:
    """Scores ``[variant][item]``; variant 0 is the full cache."""
    variants = _variants([Method(), *methods]) + [_our_variant(*named) for named in configs]
    columns = []
    for item in _progress(items, title, plan):
        with Session(subject.model, methods, plan.schedule) as session:
            shared = play(session, item)
        column = list(shared.scores)
        for _, config in configs:
            with TieredSession(subject.model, _without_idle_graph(config, shared)) as ours:
                column.append(replay(ours, item, shared))
        columns.append(column)
    return variants, [list(row) for row in zip(*columns, strict=True)]


def _without_idle_graph(config: TieredKVConfig, shared: Replay) -> TieredKVConfig:
    """A CUDA graph changes no token, and takes longer to capture than a short answer takes without it."""
    return config if len(shared.tokens) >= WORTH_A_GRAPH else replace(config, cuda_graph=False)


def _progress(items: list[Item], title: str, plan: Plan) -> Iterator[Item]:
    if plan.quiet:
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, desc=title, file=sys.stderr, leave=True)


def _say(plan: Plan, text: str) -> int:
    """Report that there is nothing to write."""
    if not plan.quiet:
        print(text, file=sys.stderr)
    return 0
