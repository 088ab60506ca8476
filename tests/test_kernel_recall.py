"""Recall: the Triton kernel against the reference, to the bit, and nothing beside it."""

import pytest
import torch

from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.recall import recall_blocks, recall_blocks_reference

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_case(rows, max_blocks, num_slots, block_size, width, dtype, miss_rate=0.4):
    """Host store, starts, lengths, slots, missed and a cache full of NaN."""
    host = torch.randn(60, width).to(dtype)
    host = host.pin_memory() if DEVICE == "cuda" else host
    starts = torch.randint(0, 60 - block_size, (rows, max_blocks), dtype=torch.int32)
    lengths = torch.randint(1, block_size + 1, (rows, max_blocks), dtype=torch.int32)
    slots = torch.stack([torch.randperm(num_slots)[:max_blocks] for _ in range(rows)]).int()
    missed = torch.rand(rows, max_blocks) < miss_rate
    slots[:, -2:], lengths[:, -2:], missed[:, -2:] = -1, 0, False  # padding
    cache = torch.full((rows, num_slots, block_size, width), float("nan"), dtype=dtype)
    return host, *(x.to(DEVICE) for x in (starts, lengths, slots, missed, cache))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("rows", "max_blocks", "num_slots", "block_size", "width", "dtype"),
    [
        (3, 11, 17, 8, 128, torch.float16),
        (1, 5, 6, 8, 256, torch.bfloat16),
        (2, 9, 12, 6, 160, torch.float16),  # a block size that is no power of two, head_dim 80
        (2, 7, 8, 4, 6, torch.float32),
        (1, 8, 9, 8, 7, torch.float16),  # a token of 14 bytes goes in words of 2
        (3, 5, 5, 1, 192, torch.float16),  # keys and values of different size, blocks of one token
    ],
)
def test_equals_reference_to_the_bit(rows, max_blocks, num_slots, block_size, width, dtype):
    *case, cache = make_case(rows, max_blocks, num_slots, block_size, width, dtype)
    expected = cache.clone()
    recall_blocks_reference(*case, expected)
    with force_backend("triton"):
        recall_blocks(*case, cache)
    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.parametrize("programs", [1, 4, 5, 100])
def test_few_programs_copy_all(programs):
    *case, cache = make_case(3, 23, 24, 8, 128, torch.float16)
    expected = cache.clone()
    recall_blocks_reference(*case, expected)
    with force_backend("triton"):
        recall_blocks(*case, cache, programs=programs)
    assert torch.equal(bits(cache), bits(expected))


def test_neighbours_keep_their_bytes():
    host, starts, lengths, slots, missed, cache = make_case(2, 11, 40, 8, 128, torch.float16)
    before = cache.clone()
    with force_backend("triton"):
        recall_blocks(host, starts, lengths, slots, missed, cache)
    copied = torch.zeros(cache.shape[:3], dtype=torch.bool, device=DEVICE)
    for row, place in missed.nonzero().tolist():
        start, length, slot = (int(x[row, place]) for x in (starts, lengths, slots))
        copied[row, slot, :length] = True
        assert torch.equal(cache[row, slot, :length].cpu(), host[start : start + length])
    assert torch.equal(bits(cache[~copied]), bits(before[~copied]))


def test_nothing_missed_nothing_written():
    *case, cache = make_case(2, 11, 17, 8, 128, torch.float16, miss_rate=0.0)
    before = cache.clone()
    with force_backend("triton"):
        recall_blocks(*case, cache)
    assert torch.equal(bits(cache), bits(before))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_registered_memory_and_a_captured_graph():
    """What the host wrote after capture is what a replay copies."""
    host = torch.zeros(60, 256, dtype=torch.bfloat16)
    error = torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * host.element_size(), 0)
    assert int(error) == 0
    try:
        _, starts, lengths, slots, missed, cache = make_case(2, 11, 17, 8, 256, torch.bfloat16)
        recall_blocks(host, starts, lengths, slots, missed, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recall_blocks(host, starts, lengths, slots, missed, cache)
        host.copy_(torch.randn(60, 256))
        expected = cache.clone()
        recall_blocks_reference(host, starts, lengths, slots, missed, expected)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(cache), bits(expected))
    finally:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
