"""Centroid scores: the Triton kernel against the reference."""

import pytest
import torch

from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.score import score_clusters, score_clusters_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bf16 matrices wrongly.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# Sums of up to 256 products of about 1 in float32, in another order; the operands are exact in every dtype, but for the
# digits of the query: see digits_bound().
ATOL, RTOL = 2e-5, 1e-5
OPTIONS = {"softcap": None, "spread": 0.5, "spread_limit": 1.5}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def make_index(rows, clusters, head_dim, dtype):
    """Centroids, their scales, variances, their scales and sizes; a fifth of the clusters do not exist."""
    if dtype == torch.int8:
        centroids = torch.randint(-127, 128, (rows, clusters, head_dim), dtype=torch.int8, device=DEVICE)
        variances = torch.randint(0, 128, (rows, clusters, head_dim), dtype=torch.int8, device=DEVICE)
    else:
        centroids = torch.randn(rows, clusters, head_dim, device=DEVICE).mul(40).to(dtype)
        variances = torch.rand(rows, clusters, head_dim, device=DEVICE).mul(100).to(dtype)
    scales = torch.rand(2, rows, clusters, device=DEVICE) * 0.02
    sizes = torch.randint(0, 5, (rows, clusters), dtype=torch.int32, device=DEVICE)
    if dtype != torch.int8:
        centroids[sizes == 0] = float("nan")
        variances[sizes == 0] = float("nan")
    scales[:, sizes == 0] = float("nan")
    return centroids, scales[0].contiguous(), variances, scales[1].contiguous(), sizes


def check(query, index, **options):
    options = {"scale": query.shape[-1] ** -0.5, **OPTIONS, **options}
    with force_backend("triton"):
        logits, scores = score_clusters(query, *index, **options)
    expected_logits, expected_scores = score_clusters_reference(query, *index, **options)
    assert logits.dtype == scores.dtype == torch.float32
    bound = digits_bound(query, index, options)
    if index[0].dtype != torch.int8 or query.dtype == torch.float32:
        bound = torch.zeros_like(bound)
    assert_within(logits, expected_logits, bound)
    assert_within(scores, expected_scores, bound.amax(1))


def digits_bound(query, index, options):
    """What two digits may cost, ``[rows, group, clusters]``: 1/64516 of the largest |q_d|, and of the largest q_d²."""
    centroids, centroid_scales, variances, variance_scales, _ = index
    step = query.float().abs().amax(2)[..., None] * options["scale"] / 64516
    bound = step * (centroids.float().abs().sum(2) * centroid_scales)[:, None]
    if variances is not None:
        step = (query.float().abs().amax(2)[..., None] * options["scale"]) ** 2 / 64516
        bound += 0.5 * options["spread"] * step * (variances.float().sum(2) * variance_scales)[:, None]
    return bound.nan_to_num(0)  # scales of clusters that do not exist


def assert_within(got, expected, bound):
    assert ((got - expected).abs() <= bound + ATOL + RTOL * expected.abs()).logical_or(got == expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "clusters"),
    [(1, 1, 64, 37), (3, 3, 80, 130), (2, 4, 96, 16), (1, 16, 128, 65), (3, 7, 256, 33), (1, 20, 64, 5)],
)
def test_equals_reference(rows, group, head_dim, clusters, dtype):
    query = torch.randn(rows, group, head_dim, device=DEVICE).to(dtype)
    check(query, make_index(rows, clusters, head_dim, torch.int8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_in_the_models_dtype(dtype):
    check(torch.randn(3, 4, 96, device=DEVICE).to(dtype), make_index(3, 50, 96, dtype))


def test_float32_index_of_a_half_precision_model():
    check(torch.randn(2, 4, 64, device=DEVICE).half(), make_index(2, 40, 64, torch.float32))


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"spread": 1.0, "spread_limit": 0.1}, {"scale": 1.0}])
def test_options(options):
    check(torch.randn(2, 3, 80, device=DEVICE).half(), make_index(2, 70, 80, torch.int8), **options)


def test_without_variances():
    centroids, scales, _, _, sizes = make_index(2, 70, 64, torch.int8)
    check(torch.randn(2, 3, 64, device=DEVICE).half(), (centroids, scales, None, None, sizes))


def test_large_queries_do_not_overflow_half_precision():
    check(torch.full((1, 2, 64), 300.0, device=DEVICE).half(), make_index(1, 20, 64, torch.int8), scale=0.01)


@pytest.mark.parametrize("programs", [1, 9, 1000])
def test_any_number_of_tiles_a_program_and_a_row_without_clusters(monkeypatch, programs):
    monkeypatch.setattr("tiered_kv.kernels.score.PROGRAMS", programs)
    index = make_index(3, 300, 64, torch.int8)
    index[-1][1] = 0
    index[-1][2, 140:] = 0
    check(torch.randn(3, 4, 64, device=DEVICE).half(), index)


def test_strided_tables_are_refused():
    centroids, *rest = make_index(2, 70, 64, torch.int8)
    with force_backend("triton"), pytest.raises(ValueError, match="centroids: expected a contiguous tensor"):
        score_clusters(torch.randn(2, 3, 64, device=DEVICE), centroids[:, :50], *rest, scale=0.1)
