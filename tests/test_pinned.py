"""Host memory that grows at one address: what is committed is usable, page-locked when asked, and given back."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import psutil
import pytest
import torch

from tiered_kv.offload import pinned
from tiered_kv.offload.pinned import HostArena

PAGE = mmap.PAGESIZE


@pytest.fixture
def registered(monkeypatch) -> dict[int, int]:
    """A CUDA runtime that only keeps books: address → bytes page-locked."""
    gc.collect()  # arenas that wait for it were locked by the real runtime
    books: dict[int, int] = {}

    def register(address: int, num_bytes: int, flags: int) -> int:
        books[address] = num_bytes
        return 0

    def unregister(address: int) -> int:
        del books[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(pinned.torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned.torch.cuda, "synchronize", lambda device: None)
    return books


def test_commits_follow_each_other_in_whole_pages():
    arena = HostArena(10 * PAGE, pin=False)
    assert [arena.commit(1), arena.commit(PAGE + 1), arena.commit(PAGE)] == [0, PAGE, 3 * PAGE]
    assert arena.committed_bytes == 4 * PAGE


def test_what_was_written_stays_when_more_is_committed():
    arena = HostArena(8 * PAGE, pin=False)
    arena.commit(2 * PAGE)
    address = arena.bytes.data_ptr()
    arena.bytes[: 2 * PAGE] = 171
    arena.commit(6 * PAGE)
    assert arena.bytes.data_ptr() == address
    assert (arena.bytes[: 2 * PAGE] == 171).all()


def test_a_full_reservation_says_how_much_there_was_and_is_left_as_it_was():
    arena = HostArena(3 * PAGE, pin=False)
    arena.commit(2 * PAGE)
    with pytest.raises(MemoryError, match=f"{3 * PAGE} bytes has no room for {2 * PAGE} more after {2 * PAGE}"):
        arena.commit(2 * PAGE)
    assert arena.commit(PAGE) == 2 * PAGE


def test_a_reservation_takes_no_memory_and_no_file():
    process = psutil.Process()
    files, resident = process.num_fds(), process.memory_info().rss
    arena = HostArena(1 << 32, pin=False)
    arena.commit(1 << 20)
    assert process.num_fds() == files
    assert process.memory_info().rss - resident < 64 << 20  # far below the 4 GiB reserved
    arena.bytes[: 1 << 20] = 1


def test_every_commit_is_page_locked_for_itself(registered):
    arena = HostArena(8 * PAGE, pin=True)
    arena.commit(3 * PAGE)
    arena.commit(PAGE)
    start = arena.bytes.data_ptr()
    assert registered == {start: 3 * PAGE, start + 3 * PAGE: PAGE}


@pytest.mark.parametrize("way", ["close", "close twice", "drop"])
def test_pages_are_unlocked(registered, way):
    arena = HostArena(8 * PAGE, pin=True)
    arena.commit(PAGE)
    arena.commit(PAGE)
    if way != "drop":
        arena.close()
    if way == "close twice":
        arena.close()
    del arena
    gc.collect()
    assert registered == {}


def test_the_device_that_reads_the_pages_is_waited_for(registered, monkeypatch):
    """Of several GPUs, the current one need not be it."""
    waited = []
    monkeypatch.setattr(pinned.torch.cuda, "synchronize", waited.append)
    arena = HostArena(8 * PAGE, pin=True, device=torch.device("cuda", 1))
    arena.commit(PAGE)
    arena.close()
    assert waited == [torch.device("cuda", 1)]


def test_memory_outlives_its_arena_while_a_tensor_reads_it():
    arena = HostArena(4 * PAGE, pin=False)
    arena.commit(PAGE)
    view = arena.bytes[:PAGE]
    view.fill_(9)
    del arena
    gc.collect()
    assert (view == 9).all()


def test_a_refused_page_lock_is_a_memory_error(monkeypatch):
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(pinned.torch.cuda, "cudart", lambda: runtime)
    arena = HostArena(4 * PAGE, pin=True)
    with pytest.raises(MemoryError, match=f"could not page-lock {PAGE} bytes"):
        arena.commit(PAGE)
    assert arena.committed_bytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_sees_committed_pages_as_pinned_until_they_are_unlocked():
    arena = HostArena(1 << 24, pin=True)
    arena.commit(1 << 20)
    committed = arena.bytes[: 1 << 20]
    assert committed.is_pinned()
    assert not arena.bytes[1 << 20 :].is_pinned()
    arena.close()
    assert not committed.is_pinned()
