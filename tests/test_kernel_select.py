"""Budgeted selection: the Triton kernel must equal sort, cumulate, cut exactly."""

import pytest
import torch

from tiered_kv.kernels import select as kernel
from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.select import select_clusters, select_clusters_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = {"token_budget": 200, "max_blocks": 40, "block_size": 8}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_row_tables(scores, block_size=8, largest=40, missing=0.1):
    """Scores with some clusters that do not exist, sizes, starts and first blocks."""
    scores = scores.clone().to(DEVICE)
    sizes = torch.randint(1, largest + 1, scores.shape, dtype=torch.int32, device=DEVICE)
    gone = torch.rand(scores.shape, device=DEVICE) < missing
    sizes[gone], scores[gone] = 0, float("-inf")
    blocks = (sizes + block_size - 1) // block_size
    first_blocks, starts = (x.cumsum(1, dtype=torch.int32) - x for x in (blocks, sizes))
    return scores, sizes, starts + 1000, first_blocks


def check(tables, hints=None, **budget):
    with force_backend("triton"):
        selection = select_clusters(*tables, hints, **budget)
    expected = select_clusters_reference(*tables, **budget)
    for name, got, want in zip(selection._fields, selection, expected, strict=True):
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name
    return selection


@pytest.mark.parametrize(("rows", "clusters"), [(1, 3), (3, 100), (2, 257), (1, 1000)])
def test_equals_reference(rows, clusters):
    selection = check(make_row_tables(torch.randn(rows, clusters) * 3), **BUDGET)
    assert selection.chosen.any(1).all()


@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(2, 300),
        torch.tensor([0.0, -0.0]).repeat(2, 150),  # they are equal
        torch.randn(2, 300).round(),
        torch.cat([torch.zeros(2, 290), torch.ones(2, 10)], 1),
        torch.cat([torch.ones(2, 60), torch.zeros(2, 240)], 1),  # a tie where the candidates end
    ],
    ids=["all equal", "signed zeros", "few values", "few above", "many above"],
)
def test_ties_go_by_cluster_number(scores):
    check(make_row_tables(scores), **BUDGET)


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30, 1e37])
def test_any_range_of_scores(scale):
    check(make_row_tables(torch.randn(2, 300) * scale), **BUDGET)


def test_outliers_and_a_steep_distribution():
    scores = torch.randn(2, 300)
    scores[0, 7], scores[1] = 1e30, torch.logspace(-38, 38, 300)[torch.randperm(300)]
    check(make_row_tables(scores), **BUDGET)


@pytest.mark.parametrize(
    "budget",
    [
        {"token_budget": 200, "max_blocks": 9, "block_size": 8},
        {"token_budget": 40, "max_blocks": 40, "block_size": 8},
        {"token_budget": 1, "max_blocks": 1, "block_size": 8},
        {"token_budget": 10000, "max_blocks": 1000, "block_size": 8},
        {"token_budget": 200, "max_blocks": 33, "block_size": 7},
        {"token_budget": 200, "max_blocks": 200, "block_size": 1},
    ],
)
def test_budgets(budget):
    check(make_row_tables(torch.randn(3, 120), block_size=budget["block_size"]), **budget)


def test_the_first_cluster_that_does_not_fit_ends_the_selection():
    tables = make_row_tables(torch.arange(20.0).flip(0)[None], missing=0.0)
    tables[1][0, :4] = torch.tensor([150, 60, 10, 5])
    selection = check(tables, **BUDGET)
    assert selection.chosen[0].tolist() == [True] + [False] * 19


def test_rows_without_clusters():
    scores, sizes, starts, first_blocks = make_row_tables(torch.randn(3, 100))
    scores[1], sizes[1] = float("-inf"), 0
    selection = check((scores, sizes, starts, first_blocks), **BUDGET)
    assert not selection.chosen[1].any()


@pytest.mark.parametrize("kind", ["random", "ties", "sparse"])
def test_long_rows_are_narrowed_in_pieces(monkeypatch, kind):
    monkeypatch.setattr(kernel, "ROW_TILE", 64)
    monkeypatch.setattr(kernel, "PIECE_TILE", 32)
    scores = torch.zeros(2, 300) if kind == "ties" else torch.randn(2, 300)
    check(
        make_row_tables(scores, missing=0.9 if kind == "sparse" else 0.1), token_budget=100, max_blocks=20, block_size=8
    )


@pytest.mark.parametrize("clusters", [17, 64, 65, 72, 80, 96, 97, 127])
def test_rows_between_powers_of_two(monkeypatch, clusters):
    monkeypatch.setattr(kernel, "LEAST_COLUMNS", 8)
    monkeypatch.setattr(kernel, "ROW_TILE", 128)
    for scores in (torch.randn(2, clusters), torch.randn(2, clusters).round(), torch.zeros(2, clusters)):
        check(make_row_tables(scores), token_budget=100, max_blocks=11, block_size=8)


def test_a_row_takes_less_than_a_quarter_more_places_than_clusters():
    for clusters in (8192, 8200, 8704, 9728, 10240, 16000):
        chunks, columns, has_rest = kernel._row_shape(clusters)
        assert clusters <= (chunks + has_rest) * columns < 1.25 * clusters
        assert has_rest == (clusters > 8192)


@pytest.mark.parametrize("row_tile", [16384, 64], ids=["one piece", "several pieces"])
def test_any_hint_gives_the_same_selection(monkeypatch, row_tile):
    monkeypatch.setattr(kernel, "ROW_TILE", row_tile)
    monkeypatch.setattr(kernel, "PIECE_TILE", 64)
    tables = make_row_tables(torch.randn(1, 150).repeat(9, 1))
    best = float(tables[0].max())
    floats = torch.tensor([0.0, -0.0, best, -best, float("nan"), float("inf"), -float("inf"), 1e-40, -1e30])
    for hints in (floats.to(DEVICE).view(torch.int32), torch.randint(-(1 << 31), 1 << 31, (9,)).int().to(DEVICE)):
        check(tables, hints, token_budget=100, max_blocks=11, block_size=8)


def test_the_next_step_begins_where_the_last_one_would_have_liked_to():
    tables = make_row_tables(torch.randn(3, 300))
    hints = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    check(tables, hints, **BUDGET)
    scores = _sorted_keys(tables[0])
    wanted, limit = 40, 64
    assert torch.equal(hints, scores[:, (wanted + limit) // 2 - 1])
    for _ in range(3):
        tables[0].add_(torch.randn_like(tables[0]) * 0.1)
        check(tables, hints, **BUDGET)


def _sorted_keys(scores):
    """The integers that the kernel orders scores by, best first."""
    bits = scores.view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).sort(1, descending=True).values
