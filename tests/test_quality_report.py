"""From rows to tables, and options to plans: what a user sees of the quality benchmark."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.quality import __main__ as command
from benchmarks.quality.ablate import SIMULATED, VARIATIONS, _name, ablate
from benchmarks.quality.methods.clusters import ClusterOptions
from benchmarks.quality.report import write_report
from benchmarks.quality.rows import append_row
from benchmarks.quality.scoring import ItemScores, summarise
from benchmarks.quality.suites import SUITES
from benchmarks.quality.tasks import TASKS
from tiered_kv import TieredKVConfig


def add_row(path, method, budget, kl, task="passkey", is_text=False) -> None:
    def scores(kl):
        return [ItemScores(list(range(40)), np.tile([[1.0 + kl], [1.0], [kl], [1.0]], 40), [(0, 40)], 0.5)]

    facts = {"model": "tiny", "length": 100, "dtype": "float32", "task": task, "is_text": is_text, "items": 1}
    row = {**facts, "method": method, "budget": budget, **summarise(scores(kl), scores(0.0), is_text), "recovered": 0.5}
    append_row(path, row)


def test_a_report_has_a_line_for_every_method_and_budget_ours_last(tmp_path):
    rows = tmp_path / "rows.jsonl"
    for task, is_text in (("passkey", False), ("ppl_books", True)):
        add_row(rows, "ours", 64, 0.001, task, is_text)
        add_row(rows, "quest", 128, 0.25, task, is_text)
        add_row(rows, "quest", 64, 0.5, task, is_text)
        add_row(rows, "kivi_int2", None, 0.125, task, is_text)
        add_row(rows, "full", None, 0.0, task, is_text)
    table, *plots = write_report(rows, tmp_path / "out")
    text = table.read_text()
    assert "## tiny, prompts of 100 tokens" in text
    overview = [line for line in text.splitlines() if line.startswith("|")][2:7]
    assert [line.split(" | ")[0].strip("| ") for line in overview] == ["full", "kivi_int2", "quest", "quest", "ours"]
    assert "| quest | 64 | 2 | 0.50 | 0.50 | 0.50 |" in text
    assert "| quest | 128 | 0.25 [0.25, 0.25] | 1.000 | +0.25 [0.25, 0.25] | +28.40 % |" in text
    assert all(plot.stat().st_size > 1000 for plot in plots)


def test_every_variation_is_a_valid_config_with_a_name_of_its_own():
    base = TieredKVConfig(token_budget=512)
    changes = [change for group in VARIATIONS.values() for change in group]
    configs = [replace(base, **change) for change in changes]
    assert len({(_name(change), config.token_budget) for change, config in zip(changes, configs, strict=True)}) == len(
        changes
    )
    for change in SIMULATED.values():
        replace(ClusterOptions(), **change)


def test_an_unknown_variation_is_refused():
    with pytest.raises(SystemExit, match="unknown variation 'sprad'"):
        ablate(None, None, None, length=1, budget=1, only=["sprad"], options=argparse.Namespace())


def test_suites_name_known_tasks():
    for suite in SUITES.values():
        assert set(suite.tasks) <= set(TASKS)


def test_run_is_the_verb_when_none_is_given():
    options = command._parser().parse_args(command._with_verb(["--tasks", "passkey:3,copying", "--set", "policy=lfu"]))
    assert command._tasks(options, SUITES["full"]) == {"passkey": 3, "copying": 4}
    assert command._settings(options) == {"policy": "lfu"}
    options = command._parser().parse_args(command._with_verb(["--set", "spread=0.25", "--shard", "1/2"]))
    assert command._settings(options) == {"spread": 0.25}
    assert list(command._tasks(options, SUITES["ci"])) == ["passkey", "copying"]


def test_an_unknown_task_is_refused():
    options = command._parser().parse_args(["run", "--tasks", "paskey"])
    with pytest.raises(SystemExit, match="unknown task 'paskey'"):
        command._tasks(options, SUITES["ci"])
