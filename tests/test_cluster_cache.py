"""The GPU cluster cache: what is looked up lies in its slot afterwards, and the tables stay each other's inverse."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.kernels.select import Selection
from tiered_kv.offload.cluster_cache import ClusterCache
from tiered_kv.offload.host_store import HostStore
from tiered_kv.offload.streams import engine_for

ROWS, SLOTS, BLOCK, WIDTH, BLOCKS = 3, 7, 5, 12, 20


@pytest.fixture
def host() -> HostStore:
    """``BLOCKS`` blocks a row, one after the other, the last token of each odd one missing."""
    store = HostStore(
        WIDTH,
        torch.float32,
        reserve_tokens=4096,
        slab_tokens=512,
        pin=DEVICE.type == "cuda",
        engine=engine_for(DEVICE),
    )
    tokens = torch.randn(ROWS, BLOCKS * BLOCK, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    store.append(tokens, torch.zeros(ROWS, BLOCKS * BLOCK, dtype=torch.int32, device=DEVICE))
    store.engine.finish_offloads()
    return store


@pytest.fixture
def cache() -> ClusterCache:
    cache = ClusterCache(ROWS, SLOTS, BLOCK, WIDTH, torch.float32, DEVICE, "lru")
    cache.slots.fill_(float("nan"))
    cache.reserve_blocks(BLOCKS)
    return cache


def select(cache: ClusterCache, rows: list[list[int]]) -> tuple[Selection, torch.Tensor, torch.Tensor]:
    """Select the given blocks of each row, in their order: a cluster has one block, the first one the best score."""
    scores = torch.full((len(rows), BLOCKS), float("-inf"))
    for row, blocks in zip(scores, rows, strict=True):
        row[blocks] = -torch.arange(len(blocks), dtype=torch.float32)
    first_blocks = torch.arange(BLOCKS, dtype=torch.int32, device=DEVICE).repeat(len(rows), 1)
    row = torch.arange(len(rows), device=DEVICE, dtype=torch.int32)[:, None]
    return cache.select(
        scores.to(DEVICE),
        BLOCK - first_blocks % 2,
        (row * BLOCKS + first_blocks) * BLOCK,
        first_blocks,
        token_budget=SLOTS * BLOCK,
        max_blocks=SLOTS,
    )


def look_up(cache: ClusterCache, host: HostStore, rows: list[list[int]]) -> list[list[int]]:
    """Look up and recall, check that every selected block is in its slot, and return the blocks missed in each row."""
    chosen, slots, missed = select(cache, rows)
    cache.recall(host, chosen, slots, missed)
    for r, blocks in enumerate(rows):
        assert chosen.blocks[r, : len(blocks)].tolist() == blocks
        for i, _ in enumerate(blocks):
            start, length = int(chosen.starts[r, i]), int(chosen.lengths[r, i])
            held = cache.slots[r, int(slots[r, i]), :length].cpu()
            assert torch.equal(held, host.tokens[start : start + length])
    assert_tables_agree(cache)
    return [[int(b) for b, m in zip(bs, ms, strict=True) if m] for bs, ms in zip(chosen.blocks, missed, strict=True)]


def assert_tables_agree(cache: ClusterCache) -> None:
    """``slot_of`` and ``block_in`` are inverse to each other."""
    slot_of, block_in = cache.tables.slot_of.tolist(), cache.tables.block_in.tolist()
    for row_slots, row_blocks in zip(slot_of, block_in, strict=True):
        assert {b: s for b, s in enumerate(row_slots) if s >= 0} == {b: s for s, b in enumerate(row_blocks) if b >= 0}


def test_what_is_missing_is_recalled_and_nothing_else_is_written(cache, host):
    assert look_up(cache, host, [[3, 4], [0], []]) == [[3, 4], [0], []]
    filled = (~cache.slots.isnan()).all(-1).sum((1, 2))
    assert filled.tolist() == [4 + 5, 5, 0]  # block 3 is a token short


def test_a_second_look_up_finds_it(cache, host):
    look_up(cache, host, [[3, 4], [0], [19]])
    assert look_up(cache, host, [[4, 3], [1, 0], [19]]) == [[], [1], []]


def test_nothing_selected_in_a_step_is_evicted(cache, host):
    look_up(cache, host, [list(range(SLOTS))] * ROWS)
    assert look_up(cache, host, [[0, 1, 2, 10, 11, 12, 13]] * ROWS) == [[10, 11, 12, 13]] * ROWS


def test_forget_drops_blocks_from_a_number_on(cache, host):
    look_up(cache, host, [[2, 3, 4, 5], [9], [4]])
    cache.forget(4)
    assert_tables_agree(cache)
    assert look_up(cache, host, [[2, 3, 4, 5], [9], [4]]) == [[4, 5], [9], [4]]


def test_forgotten_slots_are_used_first(cache, host):
    look_up(cache, host, [list(range(SLOTS)), [], []])
    cache.forget(5)
    look_up(cache, host, [[10, 11], [], []])
    assert look_up(cache, host, [[0, 1, 2, 3, 4], [], []]) == [[], [], []]


def test_reserve_blocks_keeps_what_is_known(cache, host):
    look_up(cache, host, [[1], [2], [3]])
    cache.reserve_blocks(BLOCKS + 50)
    assert cache.tables.slot_of.shape == (ROWS, BLOCKS + 50)
    assert look_up(cache, host, [[1], [2], [3]]) == [[], [], []]
    cache.reserve_blocks(10)
    assert cache.tables.slot_of.shape == (ROWS, BLOCKS + 50)


def test_selected_rows_bring_their_slots_along(cache, host):
    look_up(cache, host, [[1, 2], [3], [4]])
    before = cache.slots.clone()
    cache.select_rows(torch.tensor([2, 0, 0], device=DEVICE))
    torch.testing.assert_close(cache.slots, before[[2, 0, 0]], rtol=0, atol=0, equal_nan=True)
    assert_tables_agree(cache)
    _, _, missed = select(cache, [[4], [1, 2], [1, 2]])
    assert not missed.any()


def test_copies_of_a_row_go_their_own_ways(cache, host):
    look_up(cache, host, [[1], [], []])
    cache.select_rows(torch.tensor([0, 0, 0], device=DEVICE))
    select(cache, [[1, 5], [1], [6]])
    _, _, missed = select(cache, [[5, 6], [5, 6], [5, 6]])
    assert missed[:, :2].tolist() == [[False, True], [True, True], [True, False]]


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru_lfu"])
def test_random_steps_keep_the_tables_right(host, policy):
    cache = ClusterCache(ROWS, SLOTS, BLOCK, WIDTH, torch.float32, DEVICE, policy)
    cache.reserve_blocks(BLOCKS)
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        sizes = torch.randint(0, SLOTS + 1, (ROWS,), generator=generator).tolist()
        look_up(cache, host, [torch.randperm(BLOCKS, generator=generator)[:n].sort().values.tolist() for n in sizes])
