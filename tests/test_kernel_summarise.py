"""Moments of clusters and their int8 form: the Triton kernels against their references."""

import pytest
import torch

from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.quantise import quantise_int8, quantise_int8_reference
from tiered_kv.kernels.summarise import summarise_clusters, summarise_clusters_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 96), (128, 128), (256, 256)])
def test_moments(head_dim, value_dim, dtype):
    sizes = torch.tensor([[1, 17, 3, 40, 0, 0], [16, 0, 5, 0, 32, 1]], dtype=torch.int32, device=DEVICE)
    offsets = sizes.cumsum(1, dtype=torch.int32) - sizes
    tokens = (torch.randn(2, 67, head_dim + value_dim, device=DEVICE) + 3).to(dtype)
    tokens[:, 61:] = float("nan")  # beyond the last cluster, in no cluster
    with force_backend("triton"):
        moments, again = (summarise_clusters(tokens, offsets, sizes, head_dim) for _ in range(2))
    expected = summarise_clusters_reference(tokens, offsets, sizes, head_dim)
    for result, repeated, reference in zip(moments, again, expected, strict=True):
        assert torch.equal(result, repeated)
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)  # float32 sums of up to 40 terms near 3


def test_variance_of_large_equal_keys_is_zero():
    """The reason for a second pass: Σk²/n - mean² would leave rounding errors of the size of k²."""
    tokens = torch.full((1, 24, 128), 4097.0, device=DEVICE)
    sizes = torch.tensor([[24]], dtype=torch.int32, device=DEVICE)
    with force_backend("triton"):
        _, _, variances = summarise_clusters(tokens, torch.zeros_like(sizes), sizes, 64)
    assert (variances == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_int8(dim, dtype):
    x = (torch.randn(2, 19, dim, device=DEVICE) * 10 ** torch.randn(2, 19, 1, device=DEVICE)).to(dtype)
    x[0, 3] = 0
    x[1, 1] = torch.arange(dim) % 128 - 0.5  # the scale is 1 up to a factor; halves round to even
    x[1, 1, 0] = 127
    with force_backend("triton"):
        codes, scales = quantise_int8(x)
    expected_codes, expected_scales = quantise_int8_reference(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    assert scales[0, 3] == 1
    assert codes.dtype == torch.int8
    error = (codes.float() * scales[..., None] - x.float()).abs().amax(2)
    assert (error <= scales * 0.5001).all()


def test_int8_reads_views():
    x = torch.randn(2, 40, 64, device=DEVICE).transpose(1, 2)
    with force_backend("triton"):
        codes, _ = quantise_int8(x)
    assert torch.equal(codes, quantise_int8_reference(x)[0])
