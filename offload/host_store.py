"""The host store of a layer: every clustered token, in cluster order, key and value side by side.

An append-only log. A token is found by its number in the log, so rows, segments and forks of a cache may point wherever
they like, and reordering beams or forking a prefilled cache copies nothing here.
"""

from __future__ import annotations

import math
import mmap

import torch

from tiered_kv.offload.pinned import HostArena
from tiered_kv.offload.streams import TransferEngine

POSITION_BYTES = 4


class HostStore:
    """Append-only store of tokens and their positions in host memory.

    Args:
        width: Numbers a token: ``head_dim + value_dim``.
        dtype: Of the keys and values.
        reserve_tokens: Tokens, counted per KV head and sequence, to reserve address space for; the store moves to a
            larger reservation when they do not suffice.
        slab_tokens: Least number of tokens that memory is taken for at a time. A segment never crosses two slabs: they
            are page-locked one by one, and a copy may not span two locked ranges.
        pin: Page-lock the memory.
        engine: Copies to and from the device.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        *,
        reserve_tokens: int,
        slab_tokens: int,
        pin: bool,
        engine: TransferEngine,
    ) -> None:
        self.width, self.dtype, self.pin, self.engine = width, dtype, pin, engine
        self.moves = 0
        self._next = self._end = 0  # of the slab in use, in tokens
        self._granule = _tokens_in_whole_pages(self.bytes_per_token)
        self._slab_tokens = slab_tokens
        self._reserve(reserve_tokens)

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Host memory in use, positions included."""
        return self._token_arena.committed_bytes + self._position_arena.committed_bytes

    def append(self, tokens: torch.Tensor, positions: torch.Tensor) -> int:
        """Copy a segment to the host and return the number of its first token.

        Row r's tokens get the numbers from ``first + r · tokens_per_row`` on.

        Args:
            tokens: ``[rows, tokens, width]`` on the device.
            positions: ``[rows, tokens]`` int32 place of each token in its sequence.
        """
        count = tokens.shape[0] * tokens.shape[1]
        first = self._allocate(count)
        self.engine.offload(tokens.flatten(0, 1), self.tokens[first : first + count])
        self.engine.offload(positions.flatten(), self.positions[first : first + count])
        return first

    def read(self, first: int, rows: int, tokens: int) -> torch.Tensor:
        """A stored segment ``[rows, tokens, width]``, as a view of host memory."""
        return self.tokens[first : first + rows * tokens].view(rows, tokens, self.width)

    def read_positions(self, first: int, rows: int, tokens: int) -> torch.Tensor:
        """Positions of a stored segment ``[rows, tokens]`` int32, as a view of host memory."""
        return self.positions[first : first + rows * tokens].view(rows, tokens)

    def __deepcopy__(self, memo: dict) -> HostStore:
        return self  # append-only: a copy of the cache reads the same tokens and appends its own

    def _allocate(self, count: int) -> int:
        if self._next + count > self._end:
            self._start_slab(max(count, self._slab_tokens))
        first = self._next
        self._next += count
        return first

    def _start_slab(self, tokens: int) -> None:
        tokens = -(-tokens // self._granule) * self._granule
        if self._end + tokens > self._capacity_tokens:
            self._move(2 * (self._end + tokens))
        self._token_arena.commit(tokens * self.bytes_per_token)
        self._position_arena.commit(tokens * POSITION_BYTES)
        self._next, self._end = self._end, self._end + tokens

    def _reserve(self, tokens: int) -> None:
        tokens = -(-tokens // self._granule) * self._granule
        self._capacity_tokens = tokens
        self._token_arena = HostArena(tokens * self.bytes_per_token, self.pin, self.engine.device)
        self._position_arena = HostArena(tokens * POSITION_BYTES, self.pin, self.engine.device)
        self.tokens = self._token_arena.bytes.view(self.dtype).view(-1, self.width)
        self.positions = self._position_arena.bytes.view(torch.int32)

    def _move(self, tokens: int) -> None:
        """Move to a larger reservation: addresses change, token numbers do not. ``moves`` counts it."""
        self.engine.finish_offloads()
        arenas, stored, positions = (self._token_arena, self._position_arena), self.tokens, self.positions
        self._reserve(tokens)
        if self._end:
            self._token_arena.commit(self._end * self.bytes_per_token)
            self._position_arena.commit(self._end * POSITION_BYTES)
        self.tokens[: self._next].copy_(stored[: self._next])
        self.positions[: self._next].copy_(positions[: self._next])
        for arena in arenas:
            arena.close()
        self.moves += 1


def _tokens_in_whole_pages(bytes_per_token: int) -> int:
    """The least number of tokens whose keys, values and positions all end on a page boundary."""
    page = mmap.PAGESIZE
    return math.lcm(page // math.gcd(page, bytes_per_token), page // POSITION_BYTES)
