"""Cluster order and packing: the Triton kernels against their references."""

import pytest
import torch

from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.order import order_by_cluster, order_by_cluster_reference
from tiered_kv.kernels.pack import pack_tokens, pack_tokens_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("rows", "tokens", "clusters", "cap"),
    [(2, 301, 19, 8), (1, 257, 40, 5), (3, 33, 3, 64), (2, 1, 1, 1), (1, 64, 16, 1)],
)
def test_order_equals_a_stable_sort(rows, tokens, clusters, cap):
    assignment = torch.randint(0, clusters + 2, (rows, tokens), dtype=torch.int32, device=DEVICE)
    pieces = clusters + tokens // cap
    with force_backend("triton"):
        results = order_by_cluster(assignment, clusters, cap, pieces)
    for result, expected in zip(results, order_by_cluster_reference(assignment, clusters, cap, pieces), strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("cluster", [0, 17, 18])
def test_one_cluster_takes_all_pieces_or_none(cluster):
    assignment = torch.full((1, 130), cluster, dtype=torch.int32, device=DEVICE)
    with force_backend("triton"):
        order, sizes, offsets = order_by_cluster(assignment, 18, 64, 20)
    assert torch.equal(order[0].cpu(), torch.arange(130))
    assert sizes[0].tolist() == ([64, 64, 2] + [0] * 17 if cluster < 18 else [0] * 20)
    assert offsets[0].tolist() == ([0, 64, 128] + [130] * 17 if cluster < 18 else [0] * 20)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 80), (96, 64), (128, 128), (256, 256)])
def test_packing_moves_bits(head_dim, value_dim, dtype):
    keys = torch.randn(2, 37, 2, head_dim, device=DEVICE).to(dtype)[:, :, 1]  # a view: strides are not the shape's
    values = torch.randn(2, 37, value_dim, device=DEVICE).to(dtype)
    order = torch.stack([torch.randperm(37) for _ in range(2)]).to(DEVICE)
    with force_backend("triton"):
        packed = pack_tokens(keys, values, order)
    assert packed.is_contiguous()
    assert torch.equal(packed, pack_tokens_reference(keys, values, order))
