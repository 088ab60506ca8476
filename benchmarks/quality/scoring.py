"""From logits to numbers: what each forced step says about a row, an item, a task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

METRICS = ("nll", "token_accuracy", "kl", "top1")
"""Per step: -log p of the target; whether the target is the most likely token; KL of the full cache's distribution to
the row's; whether both have the same most likely token."""

BLOCK = 32
"""Steps of a running text that count as one unit in a confidence interval: neighbours are not independent."""

RESAMPLES = 2000


def step_metrics(logits: torch.Tensor, reference: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``METRICS`` of one step.

    Args:
        logits: ``[rows, vocabulary]``.
        reference: ``[vocabulary]`` float32 log-probabilities of the full cache.
        target: 0-dimensional or ``[1]`` int64.

    Returns:
        ``[4, rows]`` float32.
    """
    log_probs = logits.float().log_softmax(-1)
    best = log_probs.argmax(-1)
    nll = -log_probs.index_select(1, target.view(1))[:, 0]
    kl = (reference.exp() * (reference - log_probs)).sum(-1)
    return torch.stack([nll, (best == target.view(1)).float(), kl, (best == reference.argmax()).float()])


@dataclass
class ItemScores:
    """One item under one row.

    Attributes:
        steps: Decode steps that were scored, ascending.
        values: ``[4, steps]`` the ``METRICS`` of each.
        answers: Ranges within ``steps`` that make one answer.
        depth: Where in the prompt the answer was hidden, from 0 to 1, if it was.
    """

    steps: list[int]
    values: np.ndarray
    answers: list[tuple[int, int]]
    depth: float | None = None

    def units(self, is_text: bool) -> Iterator[dict[str, float]]:
        """What is averaged: the item's answers, or a text's blocks of steps."""
        ranges = self.answers if not is_text else [(i, i + BLOCK) for i in range(0, len(self.steps), BLOCK)]
        for begin, end in ranges:
            part = self.values[:, begin:end]
            unit = dict(zip(METRICS, part.mean(1).tolist(), strict=True))
            if not is_text:
                unit["exact"] = float(part[1].min())
            yield unit


def mean_and_interval(values: Sequence[float], seed: int = 0) -> list[float]:
    """Mean, and the ends of its 95 % bootstrap interval."""
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return [math.nan] * 3
    picks = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.percentile(x[picks].mean(1), [2.5, 97.5])
    return [float(x.mean()), float(low), float(high)]


def bucket_edges(steps: int) -> list[int]:
    """Doubling distances from the prompt's end: 0, 64, 128, 256, ... up to ``steps``."""
    edges, edge = [0], 64
    while edge < steps:
        edges.append(edge)
        edge *= 2
    return [*edges, steps]


def by_position(scores: Sequence[ItemScores], full: Sequence[ItemScores]) -> list[dict[str, float]]:
    """Metrics of running texts by distance from the prompt's end, as means over all items' steps."""
    steps = np.concatenate([s.steps for s in scores])
    mine, best = (np.concatenate([s.values for s in group], axis=1) for group in (scores, full))
    edges, rows = bucket_edges(int(steps.max()) + 1), []
    for begin, end in pairwise(edges):
        here = (steps >= begin) & (steps < end)
        if here.any():
            nll, _, kl, top1 = mine[:, here].mean(1).tolist()
            change = nll - float(best[0, here].mean())
            rows.append(
                {
                    "from": begin,
                    "to": end,
                    "n": int(here.sum()),
                    "nll": nll,
                    "nll_change": change,
                    "kl": kl,
                    "top1": top1,
                }
            )
    return rows


DEPTHS = ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0))


def by_depth(scores: Sequence[ItemScores], full: Sequence[ItemScores]) -> list[dict[str, float]]:
    """Metrics of answers by the depth at which they were hidden."""
    rows = []
    for begin, end in DEPTHS:
        pairs = [(s, f) for s, f in zip(scores, full, strict=True) if s.depth is not None and begin <= s.depth < end]
        if not pairs:
            continue
        mine, best = ([unit for pair in pairs for unit in pair[side].units(False)] for side in (0, 1))
        means = {name: float(np.mean([unit[name] for unit in mine])) for name in ("exact", "nll", "kl", "top1")}
        change = means["nll"] - float(np.mean([unit["nll"] for unit in best]))
        rows.append({"from": begin, "to": end, "n": len(mine), "nll_change": change, **means})
    return rows


def summarise(scores: Sequence[ItemScores], full: Sequence[ItemScores], is_text: bool) -> dict[str, object]:
    """What a row of results says about a method: means, differences from the full cache, and their intervals.

    Args:
        scores: Every item under the method.
        full: The same items under the full cache.
        is_text: Running text, or answers.
    """
    mine = [unit for score in scores for unit in score.units(is_text)]
    best = [unit for score in full for unit in score.units(is_text)]
    names = list(mine[0])
    change = {name: mean_and_interval([a[name] - b[name] for a, b in zip(mine, best, strict=True)]) for name in names}
    summary: dict[str, object] = {
        "units": len(mine),
        "metrics": {name: mean_and_interval([unit[name] for unit in mine]) for name in names},
        "change": {name: change[name] for name in names if name not in ("kl", "top1")},
    }
    if is_text:
        summary["ppl_change_percent"] = [100 * math.expm1(x) for x in change["nll"]]
        summary["by_position"] = by_position(scores, full)
    else:
        summary["by_depth"] = by_depth(scores, full)
    summary["per_unit"] = {name: [round(unit[name], 5) for unit in mine] for name in names}
    return summary
