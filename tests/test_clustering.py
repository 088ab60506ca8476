"""What a clustered segment promises, whoever computes it."""

import pytest
import torch

from tiered_kv.clustering import cluster_segment, max_clusters, num_clusters
from tiered_kv.config import TieredKVConfig
from tiered_kv.kernels.dispatch import HAS_TRITON, force_backend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = TieredKVConfig(tokens_per_cluster=8, max_cluster_tokens=12, kmeans_iterations=3)


@pytest.fixture(autouse=True, params=["torch", "triton"])
def backend(request):
    if request.param == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    torch.manual_seed(0)
    with force_backend(request.param):
        yield request.param


def some_tokens(rows, tokens, head_dim=16, value_dim=16):
    return torch.randn(rows, tokens, head_dim, device=DEVICE), torch.randn(rows, tokens, value_dim, device=DEVICE)


def check(segment, keys, values, valid, config):
    """Every promise of ``ClusteredSegment``, cluster by cluster."""
    rows, tokens, head_dim = keys.shape
    pieces = max_clusters(tokens, config)
    assert segment.sizes.shape == segment.offsets.shape == (rows, pieces)
    assert segment.sizes.dtype == segment.offsets.dtype == torch.int32
    for row in range(rows):
        order, sizes, offsets = (x[row].tolist() for x in (segment.order, segment.sizes, segment.offsets))
        is_valid = [True] * tokens if valid is None else valid[row].tolist()
        assert sorted(order) == list(range(tokens))
        assert sum(sizes) == sum(is_valid)
        assert all(is_valid[t] for t in order[: sum(sizes)])  # so each valid token is in exactly one cluster
        assert max(sizes) <= config.max_cluster_tokens
        assert offsets == [sum(sizes[:c]) for c in range(pieces)]
        assert sorted(sizes, key=lambda size: size == 0) == sizes  # clusters that do not exist come last
        assert torch.equal(segment.tokens[row], torch.cat([keys[row], values[row]], 1)[order])
        for cluster, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            members = order[offset : offset + size]
            assert members == sorted(members)
            key = keys[row, members].double() if size else torch.zeros(1, head_dim, device=DEVICE).double()
            value = values[row, members].double() if size else torch.zeros(1, values.shape[2], device=DEVICE).double()
            for result, expected in (
                (segment.centroids, key.mean(0)),
                (segment.mean_values, value.mean(0)),
                (segment.variances, key.var(0, correction=0)),
            ):
                assert result.dtype == torch.float32
                torch.testing.assert_close(result[row, cluster].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "tokens", "head_dim", "value_dim"), [(2, 61, 16, 16), (1, 40, 24, 16), (3, 7, 8, 8)])
def test_every_token_is_in_one_cluster(rows, tokens, head_dim, value_dim):
    keys, values = some_tokens(rows, tokens, head_dim, value_dim)
    check(cluster_segment(keys, values, None, CONFIG), keys, values, None, CONFIG)


def test_tokens_that_are_not_valid_come_last_and_touch_nothing():
    keys, values = some_tokens(3, 50)
    valid = torch.ones(3, 50, dtype=torch.bool, device=DEVICE)
    valid[0, :20] = False  # left padding
    valid[1, ::3] = False
    segment = cluster_segment(keys, values, valid, CONFIG)
    check(segment, keys, values, valid, CONFIG)

    other = cluster_segment(keys.masked_fill(~valid[..., None], float("nan")), values, valid, CONFIG)
    assert torch.equal(segment.order, other.order)
    assert torch.equal(segment.centroids, other.centroids)


def test_fewer_valid_tokens_than_clusters_and_none_at_all():
    keys, values = some_tokens(2, 41)
    valid = torch.zeros(2, 41, dtype=torch.bool, device=DEVICE)
    valid[0, 37:39] = True
    segment = cluster_segment(keys, values, valid, CONFIG)
    check(segment, keys, values, valid, CONFIG)
    assert num_clusters(41, CONFIG) > 2
    assert (segment.sizes[1] == 0).all()


def test_one_token():
    keys, values = some_tokens(2, 1)
    segment = cluster_segment(keys, values, None, CONFIG)
    check(segment, keys, values, None, CONFIG)
    assert torch.equal(segment.centroids[:, 0], keys[:, 0])


@pytest.mark.parametrize("center", [True, False])
def test_equal_tokens_fill_one_cluster_and_are_cut_at_the_cap(center):
    config = TieredKVConfig(tokens_per_cluster=8, max_cluster_tokens=12, kmeans_iterations=2, center_keys=center)
    keys, values = some_tokens(1, 1)
    keys, values = keys.expand(2, 30, -1).contiguous(), values.expand(2, 30, -1).contiguous()
    segment = cluster_segment(keys, values, None, config)
    check(segment, keys, values, None, config)
    assert segment.sizes[0, :3].tolist() == [12, 12, 6]


def test_the_same_input_gives_the_same_bits():
    keys, values = some_tokens(2, 90)
    one, other = (cluster_segment(keys, values, None, CONFIG) for _ in range(2))
    for name, tensor in vars(one).items():
        assert torch.equal(tensor, getattr(other, name)), name


def test_rows_do_not_see_each_other():
    keys, values = some_tokens(3, 45)
    together = cluster_segment(keys, values, None, CONFIG)
    alone = cluster_segment(keys[1:2], values[1:2], None, CONFIG)
    assert torch.equal(together.order[1:2], alone.order)


def test_clusters_that_are_plain_to_see_are_found():
    """Five directions, eight tokens each: with a start in each of them k-means cannot miss."""
    config = TieredKVConfig(tokens_per_cluster=8, max_cluster_tokens=8, kmeans_iterations=3, center_keys=False)
    direction = torch.eye(16, device=DEVICE)[:5]
    keys = direction.repeat_interleave(8, 0)[None] + 0.05 * torch.randn(1, 40, 16, device=DEVICE)
    segment = cluster_segment(keys, keys, None, config)
    assert segment.sizes[0].tolist() == [8] * 5 + [0] * 5
    torch.testing.assert_close(segment.centroids[0, :5], direction, rtol=0, atol=0.1)
