"""What the host stored comes back bit for bit, and the bytes next to it did not move."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.offload import host_store
from tiered_kv.offload.host_store import HostStore
from tiered_kv.offload.pinned import HostArena
from tiered_kv.offload.streams import engine_for

WIDTH = 24


def make_store(reserve_tokens: int = 1 << 14, slab_tokens: int = 100, dtype: torch.dtype = torch.float32) -> HostStore:
    """A store whose whole reservation is poisoned: an element written by mistake shows, as does one left out."""
    engine = engine_for(DEVICE)
    store = HostStore(
        WIDTH,
        dtype,
        reserve_tokens=reserve_tokens,
        slab_tokens=slab_tokens,
        pin=DEVICE.type == "cuda",
        engine=engine,
    )
    poison(store)
    return store


def poison(store: HostStore) -> None:
    store.tokens.fill_(float("nan"))
    store.positions.fill_(-7)


def segment(rows: int, tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Random bits, NaN payloads and infinities among them, and shuffled positions."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, tokens, WIDTH * dtype.itemsize // 2), generator=generator)
    positions = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(rows)]) + 1000 * seed
    return bits.to(torch.int16).view(dtype).to(DEVICE), positions.int().to(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.int16)


def append(store: HostStore, tokens: torch.Tensor, positions: torch.Tensor) -> int:
    first = store.append(tokens, positions)
    store.engine.finish_offloads()
    return first


def assert_holds(store: HostStore, first: int, tokens: torch.Tensor, positions: torch.Tensor) -> None:
    rows, count, _ = tokens.shape
    assert torch.equal(bits(store.read(first, rows, count)), bits(tokens))
    assert torch.equal(store.read_positions(first, rows, count), positions.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_for_bit(dtype):
    store = make_store(dtype=dtype)
    pieces = [segment(3, 37, 1, dtype), segment(1, 1, 2, dtype), segment(5, 13, 3, dtype)]
    firsts = [append(store, *piece) for piece in pieces]
    for first, piece in zip(firsts, pieces, strict=True):
        assert_holds(store, first, *piece)


def test_the_bytes_next_to_a_segment_are_not_touched():
    store = make_store()
    append(store, *segment(1, 1))
    poison(store)  # again: memory is zeroed where it is page-locked, when a slab is taken
    first = append(store, *segment(3, 37))
    after = first + 3 * 37
    assert store.tokens[:first].isnan().all()
    assert store.tokens[after:].isnan().all()
    assert (store.positions[after:] == -7).all()
    second = append(store, *segment(2, 11, 5))
    assert second == after
    assert_holds(store, first, *segment(3, 37))
    assert store.tokens[after + 22 :].isnan().all()


def test_rows_follow_each_other():
    store = make_store()
    tokens, positions = segment(4, 9)
    first = append(store, tokens, positions)
    for row in range(4):
        assert torch.equal(bits(store.tokens[first + 9 * row : first + 9 * (row + 1)]), bits(tokens[row]))


def test_a_strided_segment_is_stored_as_it_reads():
    store = make_store()
    tokens, positions = segment(3, 40)
    piece, places = tokens[:, 5:30], positions[:, 5:30]
    assert_holds(store, append(store, piece, places), piece, places)


def test_no_segment_crosses_two_slabs(monkeypatch):
    slabs = []
    commit = HostArena.commit

    def note(self, num_bytes):
        offset = commit(self, num_bytes)
        slabs.append((self, offset, num_bytes))
        return offset

    monkeypatch.setattr(host_store.HostArena, "commit", note)
    store = make_store(slab_tokens=700)
    for seed, (rows, tokens) in enumerate([(2, 300), (1, 1), (3, 333), (1, 5), (2, 2500), (1, 7), (1, 699)]):
        first = append(store, *segment(rows, tokens, seed))
        start, end = first * store.bytes_per_token, (first + rows * tokens) * store.bytes_per_token
        whole = [o <= start and end <= o + n for arena, o, n in slabs if arena is store._token_arena]
        assert sum(whole) == 1


def test_a_move_to_a_larger_reservation_keeps_numbers_and_content():
    store = make_store(reserve_tokens=1, slab_tokens=512)
    kept = []
    for seed in range(12):
        piece = segment(2, 301, seed)
        kept.append((append(store, *piece), piece))
    assert store.moves >= 2
    assert [first for first, _ in kept] == sorted({first for first, _ in kept})
    for first, piece in kept:
        assert_holds(store, first, *piece)


def test_a_view_read_before_a_move_keeps_its_content():
    store = make_store(reserve_tokens=1, slab_tokens=512)
    piece = segment(2, 200)
    view = store.read(append(store, *piece), 2, 200)
    while not store.moves > 1:
        append(store, *segment(2, 301, 4))
    assert torch.equal(bits(view), bits(piece[0]))


def test_memory_in_use_is_counted_in_slabs():
    store = make_store(slab_tokens=100)
    assert store.num_bytes == 0
    append(store, *segment(1, 10))
    one_slab = store.num_bytes
    assert one_slab >= 100 * (store.bytes_per_token + 4)
    append(store, *segment(1, 10))
    assert store.num_bytes == one_slab


def test_a_copy_of_the_cache_reads_the_same_store():
    store = make_store()
    assert copy.deepcopy(store) is store
