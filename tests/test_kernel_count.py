"""Appended tokens: the kernel against its reference. (What counts is tested where it runs: lookup and prefetch.)"""

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.kernels.append import append_token, append_token_reference
from tiered_kv.kernels.dispatch import force_backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (80, 48), (24, 40)])
def test_append_writes_one_place_and_nothing_beside_it(dtype, key_dim, value_dim):
    batch, heads, places, offset = 2, 3, 11, 4
    key = torch.randn(batch, heads, 1, key_dim, dtype=dtype, device=DEVICE)
    value = torch.randn(batch, 1, heads, value_dim, dtype=dtype, device=DEVICE).transpose(1, 2)
    length = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    expected, buffer = (
        torch.full((batch * heads, places, key_dim + value_dim), 7.0, dtype=dtype, device=DEVICE) for _ in "ab"
    )
    append_token_reference(expected, key, value, length, offset)
    with force_backend("triton"):
        append_token(buffer, key, value, length, offset)
    assert torch.equal(buffer, expected)
    assert (buffer != 7.0).any(2).sum() == batch * heads
