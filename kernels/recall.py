"""Recall: copy the missing blocks from the host store into their slots.

On the GPU one kernel reads pinned host memory over PCIe (zero-copy): no host work, no synchronisation, any number of
pieces. PCIe needs about 100 KB in flight (50 GB/s for 2 µs). A program takes a few blocks and asks for all their bytes
before it stores the first one; a program without a miss ends after one load, so the grid need not know their number.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import check_contiguous, tl, triton, use_triton

# Untuned. 4 blocks of 8 tokens × 512 bytes are 16 KiB in flight a program when all of them missed.
BLOCKS_PER_PROGRAM = 4
NUM_WARPS = 4
AHEAD_PROGRAMS = 24
"""Programs of a recall that runs beside the model's own kernels: enough bytes in flight for PCIe (24 of 16 KiB), on few
of the multiprocessors, which programs that wait for the host may otherwise fill: with one program for each group of
blocks (6144 at 8 sequences of 32k) fetching ahead cost 3.7 ms a token on an H200. Not yet measured with 24."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit
def recall_kernel(
    host_address, start_ptr, length_ptr, slot_ptr, missed_ptr, cache_ptr, max_blocks, num_slots, groups, last_group,
    BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_SIZE_PADDED: tl.constexpr,
    WORDS: tl.constexpr, WORDS_PADDED: tl.constexpr,
):  # fmt: skip
    """Groups of a few neighbouring blocks of one row, each a tile of tokens × words."""
    token = tl.arange(0, BLOCKS * BLOCK_SIZE_PADDED)
    within = token % BLOCK_SIZE_PADDED
    word = tl.arange(0, WORDS_PADDED)
    host_ptr = tl.multiple_of(host_address.to(cache_ptr.dtype), 16)
    for group in range(tl.program_id(0), last_group, tl.num_programs(0)):
        row = (group // groups).to(tl.int64)
        block = group % groups * BLOCKS + token // BLOCK_SIZE_PADDED
        place = row * max_blocks + block
        missed = tl.load(missed_ptr + place, mask=block < max_blocks, other=0) != 0
        if tl.max(missed.to(tl.int32), axis=0) != 0:
            length = tl.load(length_ptr + place, mask=missed, other=0)
            start = tl.load(start_ptr + place, mask=missed, other=0).to(tl.int64)
            slot = tl.load(slot_ptr + place, mask=missed, other=0)
            mask = (within < length)[:, None] & (word[None, :] < WORDS)
            words = tl.load(host_ptr + (start + within)[:, None] * WORDS + word[None, :], mask=mask)
            cached = (row * num_slots + slot) * BLOCK_SIZE + within
            tl.store(cache_ptr + cached[:, None] * WORDS + word[None, :], words, mask=mask)


def recall_blocks(
    host: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    missed: torch.Tensor,
    cache: torch.Tensor,
    *,
    programs: int | None = None,
) -> None:
    """Copy every missed block from ``host`` to its slot in ``cache``.

    Args:
        host: ``[tokens, width]`` the host store; ``width`` is key and value of a token side by side. Page-locked and
            mapped when ``cache`` is on a GPU.
        starts: ``[rows, max_blocks]`` int32 first token of a block in ``host``.
        lengths: ``[rows, max_blocks]`` int32 tokens of a block; the rest of the slot keeps what it held.
        slots: ``[rows, max_blocks]`` int32 destination.
        missed: ``[rows, max_blocks]`` bool which blocks to copy.
        cache: ``[rows, slots, block_size, width]`` the GPU cluster cache, written in place.
        programs: Most programs to copy with, when something else should run beside it.
    """
    if not use_triton(cache):
        return recall_blocks_reference(host, starts, lengths, slots, missed, cache)
    check_contiguous(host=host, starts=starts, lengths=lengths, slots=slots, missed=missed, cache=cache)
    if host.data_ptr() % 16:
        raise ValueError(f"host: expected an address that is a multiple of 16, got {host.data_ptr():#x}")
    rows, num_slots, block_size, width = cache.shape
    max_blocks = starts.shape[1]
    token_bytes = width * cache.element_size()
    word_bytes = max(size for size in _WORDS if token_bytes % size == 0)
    block_size_padded = triton.next_power_of_2(block_size)
    groups = triton.cdiv(max_blocks, BLOCKS_PER_PROGRAM)
    recall_kernel[(min(rows * groups, programs or rows * groups),)](
        host.data_ptr(), starts, lengths, slots, missed.view(torch.uint8), cache.view(_WORDS[word_bytes]),
        max_blocks, num_slots, groups, rows * groups,
        BLOCKS=BLOCKS_PER_PROGRAM, BLOCK_SIZE=block_size, BLOCK_SIZE_PADDED=block_size_padded,
        WORDS=token_bytes // word_bytes, WORDS_PADDED=triton.next_power_of_2(token_bytes // word_bytes),
        num_warps=NUM_WARPS,
    )  # fmt: skip


def recall_blocks_reference(host, starts, lengths, slots, missed, cache) -> None:
    """The same in plain torch. With ``cache`` on a GPU this is the one place in decode where the host waits for it."""
    row, place = missed.nonzero(as_tuple=True)
    inside = torch.arange(cache.shape[2], device=cache.device)
    token, valid = starts[row, place, None] + inside, inside < lengths[row, place, None]
    piece = host[token.masked_fill(~valid, 0).to(host.device).long()].to(cache.device)
    slot = slots[row, place].long()
    cache[row, slot] = torch.where(valid[..., None], piece, cache[row, slot])
