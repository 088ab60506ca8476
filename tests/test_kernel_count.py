"""Counters and appended tokens: the kernels against their references."""

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.kernels.append import append_token, append_token_reference
from tiered_kv.kernels.count import count_step, count_step_reference, new_counters
from tiered_kv.kernels.dispatch import force_backend


@pytest.mark.parametrize(("rows", "clusters", "max_blocks"), [(1, 1, 1), (3, 37, 19), (5, 5000, 12)])
def test_counters_add_up_over_steps(rows, clusters, max_blocks):
    torch.manual_seed(0)
    expected, counters = new_counters(DEVICE), new_counters(DEVICE)
    for _ in range(3):
        chosen = torch.rand(rows, clusters, device=DEVICE) < 0.3
        lengths = torch.randint(0, 9, (rows, max_blocks), dtype=torch.int32, device=DEVICE)
        missed = (torch.rand(rows, max_blocks, device=DEVICE) < 0.5) & (lengths > 0)
        count_step_reference(expected, chosen, lengths, missed)
        with force_backend("triton"):
            count_step(counters, chosen, lengths, missed)
    assert counters.tolist() == expected.tolist()
    assert counters[0] == 3 * rows


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
