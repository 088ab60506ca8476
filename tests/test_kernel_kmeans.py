"""Assignment and centroid update: the Triton kernels against their references."""

import pytest
import torch

from tiered_kv.kernels.directions import (
    evenly_spaced,
    evenly_spaced_reference,
    key_directions,
    key_directions_reference,
)
from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.kmeans import (
    assign_clusters,
    assign_clusters_reference,
    sum_by_cluster,
    sum_by_cluster_reference,
    sum_by_product,
    update_centroids,
    update_centroids_reference,
)

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bf16 wrongly
ROUNDING = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}  # one unit in the last place at 1, and a bit

# rows, tokens, clusters, dim, dtype; more than 32 clusters take the path that lists tokens
SHAPES = [
    (2, 203, 37, 64, HALF),
    (1, 131, 13, 80, torch.float32),
    (2, 70, 150, 96, HALF),
    (1, 67, 33, 128, torch.float32),
    (1, 45, 20, 256, HALF),
    (3, 1, 1, 64, HALF),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def integers(*shape, dtype):
    """Small integers: their dot products are exact in any order of summation, and many are equal."""
    return torch.randint(-2, 3, shape, device=DEVICE).to(dtype)


def some_of(rows, tokens):
    return torch.rand(rows, tokens, device=DEVICE) > 0.3


@pytest.mark.parametrize(("rows", "tokens", "clusters", "dim", "dtype"), SHAPES)
def test_assignment_breaks_ties_as_argmax_does(rows, tokens, clusters, dim, dtype):
    x, mu = integers(rows, tokens, dim, dtype=dtype), integers(rows, clusters, dim, dtype=dtype)
    mu = mu[:, torch.arange(clusters, device=DEVICE) % 32]  # equal ones in the same column of different tiles too
    with force_backend("triton"):
        nearest = assign_clusters(x, mu)
    assert nearest.dtype == torch.int32
    assert torch.equal(nearest, assign_clusters_reference(x, mu))


@pytest.mark.parametrize(("rows", "tokens", "clusters", "dim", "dtype"), SHAPES[:3])
def test_assignment_of_directions_is_the_nearest(rows, tokens, clusters, dim, dtype):
    x = torch.nn.functional.normalize(torch.randn(rows, tokens, dim, device=DEVICE), dim=2).to(dtype)
    mu = torch.nn.functional.normalize(torch.randn(rows, clusters, dim, device=DEVICE), dim=2).to(dtype)
    valid = some_of(rows, tokens)
    with force_backend("triton"):
        nearest = assign_clusters(x, mu, valid)
    assert (nearest[~valid] == clusters).all()
    score = torch.matmul(x.float(), mu.float().transpose(1, 2))
    reached = score.gather(2, nearest.clamp(max=clusters - 1).long()[..., None])[..., 0]
    assert (reached >= score.amax(2) - 1e-5)[valid].all()


def test_assignment_reads_views():
    x, mu = integers(2, 50, 3, 64, dtype=HALF)[:, :, 1], integers(2, 64, 18, dtype=HALF).transpose(1, 2)
    with force_backend("triton"):
        assert torch.equal(assign_clusters(x, mu), assign_clusters_reference(x, mu))


@pytest.mark.parametrize(("rows", "tokens", "clusters", "dim", "dtype"), SHAPES)
def test_sums_leave_out_what_is_in_no_cluster(rows, tokens, clusters, dim, dtype):
    x = integers(rows, tokens, dim, dtype=dtype)
    assignment = torch.randint(0, clusters + 3, (rows, tokens), device=DEVICE, dtype=torch.int32)
    x[assignment >= clusters] = float("nan")
    with force_backend("triton"):
        sums, again = (sum_by_cluster(x, assignment, clusters) for _ in range(2))
    assert torch.equal(sums, sum_by_cluster_reference(x, assignment, clusters))
    assert torch.equal(sums, again)


@pytest.mark.parametrize("clusters", [20, 40])
def test_all_tokens_in_one_cluster(clusters):
    x = integers(1, 300, 64, dtype=HALF)
    assignment = torch.full((1, 300), clusters - 1, device=DEVICE, dtype=torch.int32)
    with force_backend("triton"):
        sums = sum_by_cluster(x, assignment, clusters)
    assert torch.equal(sums[:, -1], x.float().sum(1))
    assert (sums[:, :-1] == 0).all()


@pytest.mark.parametrize(("rows", "tokens", "clusters", "dim", "dtype"), SHAPES)
def test_an_empty_cluster_keeps_its_centroid(rows, tokens, clusters, dim, dtype):
    x = torch.nn.functional.normalize(torch.randn(rows, tokens, dim, device=DEVICE), dim=2).to(dtype)
    before = torch.nn.functional.normalize(torch.randn(rows, clusters, dim, device=DEVICE), dim=2).to(dtype)
    assignment = torch.randint(1, clusters + 1, (rows, tokens), device=DEVICE, dtype=torch.int32)
    with force_backend("triton"):
        after, again = (update_centroids(x, assignment, before) for _ in range(2))
    assert torch.equal(after, again)
    assert torch.equal(after[:, 0], before[:, 0])
    expected = update_centroids_reference(x, assignment, before)
    assert after.dtype == dtype
    torch.testing.assert_close(after, expected, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("partly_valid", [True, False])
@pytest.mark.parametrize(("rows", "tokens", "clusters", "dim", "dtype"), SHAPES)
def test_start_of_kmeans(rows, tokens, clusters, dim, dtype, partly_valid, center):
    keys = (torch.randn(rows, tokens, 2, dim, device=DEVICE) + 1).to(dtype)[:, :, 1]
    valid = some_of(rows, tokens) if partly_valid else None
    if valid is not None:
        valid[-1, 2:] = False  # fewer valid tokens than clusters
        keys = keys.masked_fill(~valid[..., None], float("nan"))
    with force_backend("triton"):
        directions = key_directions(keys, valid, center)
        first = evenly_spaced(directions, valid, clusters)
    expected = key_directions_reference(keys, valid, center)
    torch.testing.assert_close(directions, expected, rtol=0, atol=ROUNDING[dtype], equal_nan=True)
    assert directions.is_contiguous()
    chosen = evenly_spaced_reference(directions, valid, clusters)
    torch.testing.assert_close(first, chosen, rtol=0, atol=0, equal_nan=True)


def test_a_row_without_valid_tokens_has_a_start_all_the_same():
    directions = torch.randn(2, 30, 64, device=DEVICE)
    valid = torch.zeros(2, 30, dtype=torch.bool, device=DEVICE)
    valid[1] = True
    with force_backend("triton"):
        first = evenly_spaced(directions, valid, 4)
    assert torch.equal(first, evenly_spaced_reference(directions, valid, 4))


def test_sums_as_a_product_leave_out_the_same_tokens():
    tokens = torch.randn(2, 61, 12)
    tokens[0, :7] = float("nan")
    assignment = torch.randint(0, 9, (2, 61), dtype=torch.int32)
    assignment[0, :7] = 9
    expected = sum_by_cluster_reference(tokens, assignment, 9)
    torch.testing.assert_close(sum_by_product(tokens, assignment, 9), expected, atol=1e-5, rtol=0)
