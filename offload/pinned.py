"""Host memory that grows in slabs at one address: reserved once, committed and page-locked piece by piece.

``pin_memory=True`` rounds sizes up to powers of two and took 0.8 s a GiB; ``cudaHostRegister`` on memory of exact size
took 0.07 s a GiB and copies as fast (H200, PCIe 5; DESIGN.md "What was measured").
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import weakref

import torch

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
_HUGE_PAGE = 2 << 20
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context


class HostArena:
    """A reserved range of host memory of which the first ``committed_bytes`` are in use.

    Args:
        capacity_bytes: Size of the reservation. Address space only: no memory is taken before :meth:`commit`.
        pin: Page-lock what is committed, so that the GPU may read it directly.
        device: The GPU that reads it, which is waited for before pages are unlocked; the current one when left out.
    """

    def __init__(self, capacity_bytes: int, pin: bool, device: torch.device | None = None) -> None:
        self.capacity_bytes = _round_up(capacity_bytes, mmap.PAGESIZE)
        self.committed_bytes = 0
        self.pin = pin
        self._map = _reserve(self.capacity_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned: list[int] = []
        self._finalizer = weakref.finalize(self, _unpin, self._pinned, device)

    def commit(self, num_bytes: int) -> int:
        """Put the next ``num_bytes``, rounded up to whole pages, to use and return their offset.

        Raises:
            MemoryError: The reservation is used up, or the system refuses to page-lock the memory.
        """
        offset, num_bytes = self.committed_bytes, _round_up(num_bytes, mmap.PAGESIZE)
        if offset + num_bytes > self.capacity_bytes:
            raise MemoryError(
                f"host arena of {self.capacity_bytes} bytes has no room for {num_bytes} more after {offset}"
            )
        if self.pin:
            self._fault_in(offset, num_bytes)
            self._pin(self.bytes.data_ptr() + offset, num_bytes)
        self.committed_bytes += num_bytes
        return offset

    def close(self) -> None:
        """Unlock the pages; dropping the arena does the same. The memory goes when the last tensor over it does."""
        self._finalizer()

    def _fault_in(self, offset: int, num_bytes: int) -> None:
        """Take the pages, huge ones where they fit, on all cores: page-locking would take them one by one, on one."""
        if num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes)
        self.bytes[offset : offset + num_bytes].zero_()

    def _pin(self, address: int, num_bytes: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if error != 0:
            raise MemoryError(f"could not page-lock {num_bytes} bytes of host memory (cudaHostRegister error {error})")
        self._pinned.append(address)


def _reserve(capacity_bytes: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, capacity_bytes)
    return mmap.mmap(-1, capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def _unpin(addresses: list[int], device: torch.device | None) -> None:
    if addresses:
        torch.cuda.synchronize(device)  # a copy may still be under way
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
