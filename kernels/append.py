"""Append a token to a window: write its key and value side by side at a place that only the device knows."""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton


@triton.jit
def append_kernel(
    buffer_ptr, key_ptr, value_ptr, length_ptr, capacity, offset,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One row: its key, then its value."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED)
    place = tl.load(length_ptr) - 1 + offset
    target = buffer_ptr + (row * capacity + place) * (KEY_DIM + VALUE_DIM)
    tl.store(target + dim, tl.load(key_ptr + row * KEY_DIM + dim, mask=dim < KEY_DIM), mask=dim < KEY_DIM)
    value = tl.load(value_ptr + row * VALUE_DIM + dim, mask=dim < VALUE_DIM)
    tl.store(target + KEY_DIM + dim, value, mask=dim < VALUE_DIM)


def append_token(
    buffer: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor, offset: int
) -> None:
    """Write the newest token at place ``length - 1 + offset`` of every row.

    Args:
        buffer: ``[rows, places, head_dim + value_dim]``, written in place.
        key: ``[batch, kv_heads, 1, head_dim]`` with ``batch * kv_heads`` = ``rows``.
        value: ``[batch, kv_heads, 1, value_dim]``.
        length: ``[1]`` int32 length of the window, this token included.
        offset: Places before the window.
    """
    if not use_triton(buffer):
        append_token_reference(buffer, key, value, length, offset)
        return
    rows, places, _ = buffer.shape
    key_dim, value_dim = key.shape[3], value.shape[3]
    append_kernel[(rows,)](
        buffer, key.contiguous(), value.contiguous(), length, places, offset,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, PADDED=triton.next_power_of_2(max(key_dim, value_dim)), num_warps=1,
    )  # fmt: skip


def append_token_reference(buffer, key, value, length, offset: int) -> None:
    """The same in plain torch."""
    buffer.index_copy_(1, length.long() - 1 + offset, torch.cat([key, value], dim=3).flatten(0, 1))
