"""Sparse decode attention: the Triton kernels against one softmax over everything."""

import pytest
import torch

from tiered_kv.kernels import attend as kernel
from tiered_kv.kernels.attend import Attended, Estimated, Recent, attend, attend_reference
from tiered_kv.kernels.dispatch import force_backend

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bf16 matrices wrongly.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
# Outputs are about 1; weights are rounded to the model's dtype before they meet the values, and so is the output.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def integers(low, high, *shape):
    return torch.randint(low, high, shape, dtype=torch.int32, device=DEVICE)


def make_recent(rows, width, dtype, sink_capacity=5, window_capacity=70, window_length=41):
    """Sinks and window; whatever is not valid is NaN."""
    tokens = torch.randn(rows, sink_capacity + window_capacity, width, device=DEVICE).to(dtype)
    num_sinks, window_start = integers(0, sink_capacity + 1, rows), integers(0, 4, rows)
    length = torch.tensor([window_length], dtype=torch.int32, device=DEVICE)
    recent = Recent(tokens, num_sinks, window_start, length, sink_capacity)
    tokens[~kernel._recent_mask(recent)] = float("nan")
    return recent


def make_attended(rows, width, dtype, max_blocks=21, num_slots=30, block_size=8):
    """Blocks in a cache that is NaN wherever no selected block has a token; the last row selects nothing."""
    cache = torch.full((rows, num_slots, block_size, width), float("nan"), dtype=dtype, device=DEVICE)
    slots = torch.stack([torch.randperm(num_slots)[:max_blocks] for _ in range(rows)]).int().to(DEVICE)
    lengths = integers(1, block_size + 1, rows, max_blocks)
    padding = torch.arange(max_blocks, device=DEVICE) >= integers(1, max_blocks + 1, rows, 1)
    padding[-1] = rows > 1
    slots[padding], lengths[padding] = -1, 0
    for row, place in (~padding).nonzero().tolist():
        length = int(lengths[row, place])
        cache[row, slots[row, place], :length] = torch.randn(length, width, device=DEVICE).to(dtype)
    return Attended(cache, slots, lengths)


def make_estimated(rows, group, value_dim, dtype=torch.int8, clusters=150):
    """The index; NaN wherever no cluster exists, and a run of clusters that do not."""
    sizes = integers(0, 40, rows, clusters)
    sizes[:, clusters // 3 : clusters // 2] = 0
    chosen = torch.rand(rows, clusters, device=DEVICE) < 0.2
    logits = torch.randn(rows, group, clusters, device=DEVICE)
    means = torch.randint(-127, 128, (rows, clusters, value_dim), dtype=torch.int8, device=DEVICE)
    scales = torch.rand(rows, clusters, device=DEVICE) * 0.01
    if dtype != torch.int8:
        means = means.to(dtype) / 100
        means[sizes == 0] = float("nan")
    scales[sizes == 0] = float("nan")
    logits.masked_fill_((sizes == 0)[:, None], float("nan"))
    return Estimated(logits, sizes, chosen, means, scales)


def check(query, recent, attended, estimated, **options):
    options = {"scale": query.shape[-1] ** -0.5, **options}
    with force_backend("triton"):
        out = attend(query, recent, attended, estimated, **options)
    expected = attend_reference(query, recent, attended, estimated, **options)
    assert out.dtype == query.dtype
    torch.testing.assert_close(out, expected, atol=TOLERANCE[query.dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "value_dim"),
    [(1, 1, 64, 64), (3, 3, 80, 80), (2, 16, 96, 64), (1, 5, 128, 128), (2, 4, 256, 256), (1, 20, 16, 24)],
)
def test_equals_reference(rows, group, head_dim, value_dim, dtype):
    width = head_dim + value_dim
    query = torch.randn(rows, group, head_dim, device=DEVICE).to(dtype)
    estimated = make_estimated(rows, group, value_dim)
    check(query, make_recent(rows, width, dtype), make_attended(rows, width, dtype), estimated)


@pytest.mark.parametrize("dtype", [*DTYPES[:2]])
@pytest.mark.parametrize("index_dtype", [torch.float32, "model"])
def test_floating_mean_values(dtype, index_dtype):
    query = torch.randn(2, 4, 64, device=DEVICE).to(dtype)
    estimated = make_estimated(2, 4, 64, dtype if index_dtype == "model" else index_dtype)
    check(query, make_recent(2, 128, dtype), make_attended(2, 128, dtype), estimated)


@pytest.mark.parametrize("parts", ["recent", "attended", "estimated"])
def test_parts_may_be_missing(parts):
    query = torch.randn(3, 4, 64, device=DEVICE).half()
    attended = make_attended(3, 128, torch.float16) if parts == "attended" else None
    estimated = make_estimated(3, 4, 64) if parts == "estimated" else None
    check(query, make_recent(3, 128, torch.float16), attended, estimated)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_attention_sinks(softcap, has_sinks):
    query = torch.randn(3, 4, 64, device=DEVICE).half() * 3
    sinks = torch.randn(3, 4, device=DEVICE) * 3 if has_sinks else None
    check(
        query, make_recent(3, 128, torch.float16), make_attended(3, 128, torch.float16), make_estimated(3, 4, 64),
        softcap=softcap, attention_sinks=sinks,
    )  # fmt: skip


def test_large_logits():
    query = torch.randn(2, 4, 64, device=DEVICE).half() * 100
    estimated = make_estimated(2, 4, 64)
    estimated.logits.mul_(100)
    check(query, make_recent(2, 128, torch.float16), make_attended(2, 128, torch.float16), estimated)


@pytest.mark.parametrize("block_size", [1, 6, 16, 64])
def test_block_sizes(block_size):
    query = torch.randn(2, 4, 64, device=DEVICE).half()
    attended = make_attended(2, 128, torch.float16, max_blocks=9, num_slots=9, block_size=block_size)
    check(query, make_recent(2, 128, torch.float16), attended, make_estimated(2, 4, 64))


@pytest.mark.parametrize("window_length", [0, 1, 64, 300])
def test_dense_window(window_length):
    query = torch.randn(2, 2, 32, device=DEVICE).half()
    recent = make_recent(2, 64, torch.float16, sink_capacity=16, window_capacity=300, window_length=window_length)
    recent.num_sinks.fill_(3)
    recent.tokens[:, :3] = 1.0
    check(query, recent, None, None)


def test_several_tiles_a_piece(monkeypatch):
    monkeypatch.setattr(kernel, "PROGRAMS", 4)
    monkeypatch.setattr(kernel, "TILE_BYTES", 4096)
    monkeypatch.setattr(kernel, "ESTIMATE_TILE_BYTES", 1024)
    query = torch.randn(2, 4, 64, device=DEVICE).half()
    check(query, make_recent(2, 128, torch.float16), make_attended(2, 128, torch.float16), make_estimated(2, 4, 64))
