"""Scores and rows of the quality benchmark, worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.quality.rows import append_row, read_rows, row_key
from benchmarks.quality.run import scored_steps
from benchmarks.quality.schedule import Schedule
from benchmarks.quality.scoring import (
    ItemScores,
    bucket_edges,
    by_depth,
    by_position,
    mean_and_interval,
    step_metrics,
    summarise,
)
from benchmarks.quality.tasks.items import Item


def test_step_metrics_by_hand():
    full = torch.tensor([0.5, 0.25, 0.25]).log()
    other = torch.tensor([0.25, 0.5, 0.25]).log()
    values = step_metrics(torch.stack([full, other]) + 3.0, full, torch.tensor(1))
    kl = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    expected = torch.tensor([[math.log(4), math.log(2)], [0, 1], [0, kl], [1, 0]])
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)


def test_scored_steps_predict_the_answers_tokens():
    item = Item([1, 2], [3, 4, 5, 6, 7, 8], [(1, 3), (4, 6)])
    assert scored_steps(item) == ([0, 1, 3, 4], [(0, 2), (2, 4)])


def scores(nll, hit=None, kl=None, top1=None, answers=None) -> ItemScores:
    zeros = [0.0] * len(nll)
    table = np.array([nll, hit or zeros, kl or zeros, top1 or zeros], dtype=np.float64)
    return ItemScores(list(range(len(nll))), table, answers or [(0, len(nll))])


def test_an_answer_is_exact_when_every_token_is():
    item = scores([1, 2, 3, 4], hit=[1, 1, 1, 0], answers=[(0, 2), (2, 4)])
    first, second = item.units(is_text=False)
    assert (first["exact"], second["exact"]) == (1, 0)
    assert (first["nll"], second["token_accuracy"]) == (1.5, 0.5)


def test_texts_are_averaged_in_blocks():
    units = list(scores(list(range(70))).units(is_text=True))
    assert [unit["nll"] for unit in units] == [15.5, 47.5, 66.5]
    assert "exact" not in units[0]


def test_the_interval_holds_the_mean_and_shrinks_with_more_items():
    mean, low, high = mean_and_interval([1.0, 2.0, 3.0, 4.0] * 3)
    assert (mean, low < 2.5 < high) == (2.5, True)
    _, low_many, high_many = mean_and_interval([1.0, 2.0, 3.0, 4.0] * 300)
    assert high_many - low_many < (high - low) / 5
    assert mean_and_interval([2.0, 2.0]) == [2.0, 2.0, 2.0]


def test_buckets_double():
    assert bucket_edges(512) == [0, 64, 128, 256, 512]
    assert bucket_edges(40) == [0, 40]
    assert bucket_edges(4089) == [0, 64, 128, 256, 512, 1024, 2048, 4089]


def test_positions_are_averaged_over_items():
    full = [scores([1.0] * 100), scores([3.0] * 100)]
    mine = [scores([2.0] * 100, kl=[0.5] * 100), scores([3.0] * 64 + [5.0] * 36, kl=[0.1] * 100)]
    near, far = by_position(mine, full)
    assert (near["from"], near["to"], near["n"]) == (0, 64, 128)
    assert (near["nll_change"], far["nll_change"]) == pytest.approx((0.5, 1.5))
    assert near["kl"] == pytest.approx(0.3)


def test_answers_are_averaged_by_depth():
    full = [ItemScores([0], np.array([[1.0], [1], [0], [1]]), [(0, 1)], depth) for depth in (0.1, 0.2, 0.8)]
    mine = [ItemScores([0], np.array([[nll], [0], [0], [1]]), [(0, 1)], d) for nll, d in ((2, 0.1), (4, 0.2), (1, 0.8))]
    first, last = by_depth(mine, full)
    assert (first["from"], first["n"], first["nll_change"], first["exact"]) == (0.0, 2, 2.0, 0.0)
    assert (last["from"], last["n"], last["nll_change"]) == (0.75, 1, 0.0)
    assert by_depth([scores([1.0])], [scores([1.0])]) == []


def test_a_summary_gives_differences_from_the_full_cache():
    full, mine = [scores([1.0] * 64)], [scores([1.5] * 64)]
    text = summarise(mine, full, is_text=True)
    assert text["units"] == 2
    assert text["change"]["nll"] == pytest.approx([0.5, 0.5, 0.5])
    assert text["ppl_change_percent"][0] == pytest.approx(100 * (math.exp(0.5) - 1))
    answer = summarise([scores([1.0], hit=[1])], [scores([1.0], hit=[0])], is_text=False)
    assert answer["change"]["exact"][0] == 1
    assert json.loads(json.dumps(answer)) == answer


def test_the_window_grows_and_is_cut():
    schedule = Schedule(num_sink_tokens=4, window_size=8, decode_segment=16, prefill_segment=64)
    assert schedule.after_prefill(75) == 0
    assert schedule.after_prefill(76) == 68
    assert schedule.after_prefill(76 + 64) == 132
    start, seen = 68, []
    for length in range(80, 130):
        start = schedule.before_step(length, start)
        seen.append(start)
    assert sorted(set(seen)) == [68, 84, 100, 116]
    assert seen.index(84) == 92 - 80


def test_rows_are_appended_and_a_torn_line_is_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"model": "m", "task": "t", "method": "a", "x": 1})
    append_row(path, {"model": "m", "task": "t", "method": "b", "x": 2})
    append_row(path, {"model": "m", "task": "t", "method": "a", "x": 3})
    with path.open("a") as file:
        file.write('{"key": "torn')
    rows = read_rows(path)
    assert [(row["method"], row["x"]) for row in rows] == [("a", 3), ("b", 2)]
    assert {"commit", "date", "machine", "versions"} <= set(rows[0])
    assert rows[0]["key"] == row_key({"model": "m", "task": "t", "method": "a", "x": 99})
