"""Pieces of attention and their merging, against one softmax over everything in float64."""

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.flash import attend_piece, attend_piece_reference, merge_pieces, merge_pieces_reference

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Outputs of the order of 1: rounding of the inputs' dtype, a few units of it."""
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])


def tensors(dtype, queries, tokens, group=2, heads=2, dim=16):
    generator = torch.Generator().manual_seed(queries * 31 + tokens)
    shapes = [(2, heads * group, queries, dim), (2, heads, tokens, dim), (2, heads, tokens, dim)]
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def exact(query, key, value, causal, scale, softcap=None):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
    logits = query.double() @ key.transpose(2, 3) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        mask = torch.ones(logits.shape[2:], dtype=torch.bool, device=DEVICE).tril(key.shape[2] - query.shape[2])
        logits = logits.masked_fill(~mask, -torch.inf)
    return torch.softmax(logits, 3) @ value, logits.logsumexp(3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dim", [12, 16, 80])
def test_a_piece_and_its_log_sum_exp(dtype, causal, softcap, dim):
    query, key, value = tensors(dtype, 37, 37 if causal else 53, dim=dim)
    expected, expected_lse = exact(query, key, value, causal, 0.3, softcap)
    for function in (attend_piece, attend_piece_reference):
        out, lse = function(query, key, value, causal=causal, scale=0.3, softcap=softcap)
        assert out.dtype == dtype
        assert (out - expected).abs().max() < TOLERANCE[dtype]
        assert (lse - expected_lse).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_pieces_equal_one_softmax(dtype):
    query, key, value = tensors(dtype, 21, 90)
    expected, expected_lse = exact(query, key, value, False, 0.3)
    cuts = [(0, 7), (7, 8), (8, 90)]
    pieces = [attend_piece(query, key[:, :, a:b], value[:, :, a:b], causal=False, scale=0.3) for a, b in cuts]
    for backend, merge in (("triton", merge_pieces), ("torch", merge_pieces), ("torch", merge_pieces_reference)):
        with force_backend(backend):
            part = tuple(t.clone() for t in pieces[0])
            for piece in pieces[1:]:
                part = merge(*part, *piece)
        assert part[0].dtype == torch.float32
        assert (part[0] - expected).abs().max() < TOLERANCE[dtype]
        assert (part[1] - expected_lse).abs().max() < TOLERANCE[dtype]


def test_merging_reads_outputs_that_flash_kernels_leave_transposed():
    out, other = (torch.randn(2, 9, 3, 16, device=DEVICE).transpose(1, 2) for _ in range(2))
    lse, other_lse = torch.randn(2, 3, 9, device=DEVICE), torch.randn(2, 3, 9, device=DEVICE)
    expected = merge_pieces_reference(out, lse, other, other_lse)
    with force_backend("triton"):
        merged = merge_pieces(out.half(), lse.clone(), other, other_lse)
    assert (merged[0] - expected[0]).abs().max() < 2e-3  # out was rounded to half
    assert (merged[1] - expected[1]).abs().max() < 1e-5


@pytest.mark.skipif(DEVICE.type != "cuda", reason="cuDNN's attention needs a CUDA device")
@pytest.mark.parametrize(("queries", "tokens", "causal"), [(1001, 1001, True), (777, 1543, False), (513, 8277, False)])
def test_long_pieces_of_odd_length(queries, tokens, causal):
    query, key, value = tensors(torch.bfloat16, queries, tokens, group=4, dim=128)
    both = torch.cat([key, value], 3)  # keys and values side by side, as segments are stored
    expected, expected_lse = exact(query, key, value, causal, 0.1)
    out, lse = attend_piece(query, both[..., :128], both[..., 128:], causal=causal, scale=0.1)
    assert (out - expected).abs().max() < TOLERANCE[torch.bfloat16]
    assert (lse - expected_lse).abs().max() < 1e-2
