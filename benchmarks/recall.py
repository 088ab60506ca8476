"""Bandwidth of recall: the kernel that gathers pieces of pinned host memory, beside a pinned copy in the same run.

    python -m benchmarks.recall

A piece is a block of the host store at a random place; its bytes are contiguous. The copy is one ``cudaMemcpyAsync`` of
as many contiguous bytes. Both move other bytes at every call. GB/s are 10^9 bytes a second; higher is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import rows
from tiered_kv.kernels.recall import recall_blocks
from tiered_kv.offload.pinned import HostArena

WIDTH = 256
"""Numbers a token: head_dim 128, key and value; 512 bytes in bf16."""
ROWS = 8
CALLS = 8
BAR = 0.85
"""Least share of the copy's bandwidth, from 1 MiB on in pieces of 8-16 KiB (issue 6)."""
COLUMNS = ("what", "piece_kib", "mib", "gbps", "gbps_p10", "gbps_p90", "ratio", "bar", "won")


def host_tokens(num_bytes: int, device: torch.device) -> tuple[HostArena, torch.Tensor]:
    """Pinned random tokens ``[tokens, WIDTH]``, and the arena that holds them."""
    arena = HostArena(num_bytes, pin=device.type == "cuda")
    arena.commit(num_bytes)
    tokens = arena.bytes.view(torch.bfloat16).view(-1, WIDTH)
    some = torch.randn(min(len(tokens), 1 << 16), WIDTH, device=device).to(torch.bfloat16)
    for first in range(0, len(tokens), len(some)):
        tokens[first : first + len(some)].copy_(some[: len(tokens) - first])
    return arena, tokens


def recall_call(host: torch.Tensor, piece_tokens: int, num_bytes: int, device: torch.device) -> Callable[[], None]:
    """A call that recalls ``num_bytes`` in pieces of ``piece_tokens``, all missed, into slots in random order."""
    blocks = max(1, num_bytes // (ROWS * piece_tokens * WIDTH * host.element_size()))
    pieces = len(host) // piece_tokens
    starts = (torch.randint(pieces, (ROWS, blocks), device=device) * piece_tokens).int()
    lengths = torch.full_like(starts, piece_tokens)
    slots = torch.rand(ROWS, blocks, device=device).argsort(1).int()
    missed = torch.ones(ROWS, blocks, dtype=torch.bool, device=device)
    cache = torch.empty(ROWS, blocks, piece_tokens, WIDTH, dtype=host.dtype, device=device)
    call = partial(recall_blocks, host, starts, lengths, slots, missed, cache)
    call()
    _check(host, starts, slots, cache)
    return call


def _check(host: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """The last block of the last row has arrived, bit for bit."""
    start, slot = int(starts[-1, -1]), int(slots[-1, -1])
    expected = host[start : start + cache.shape[2]].to(cache.device)
    assert torch.equal(cache[-1, slot].view(torch.int16), expected.view(torch.int16)), "recall is wrong"


def copy_call(host: torch.Tensor, num_bytes: int, device: torch.device) -> Callable[[], None]:
    """A call that copies ``num_bytes`` from a random place."""
    tokens = num_bytes // (WIDTH * host.element_size())
    first = int(torch.randint(max(1, len(host) - tokens + 1), ()))
    target = torch.empty(tokens, WIDTH, dtype=host.dtype, device=device)
    return partial(target.copy_, host[first : first + tokens], non_blocking=True)


def bandwidth(calls: list[Callable[[], object]], num_bytes: int, in_graph: bool, measurements: int) -> dict[str, float]:
    """GB/s over all calls in a row; the recall kernel replayed from a graph, as in a decode step."""

    def all_calls() -> None:
        for call in calls:
            call()

    run = rows.captured(all_calls) if in_graph else all_calls
    timing = rows.time_steps(run, steps=4, measurements=measurements).fields()
    figures = {"gbps": timing["ms"], "gbps_p10": timing["ms_p90"], "gbps_p90": timing["ms_p10"]}
    return {name: round(num_bytes * len(calls) / ms / 1e6, 2) for name, ms in figures.items()}


def compare(host: torch.Tensor, num_bytes: int, pieces: list[int], out: rows.Rows, device: torch.device) -> None:
    """The copy first, then the kernel at each piece size."""
    copies = [copy_call(host, num_bytes, device) for _ in range(CALLS)]
    copied = out.add(what="copy", mib=num_bytes / 2**20, **bandwidth(copies, num_bytes, False, 9))
    for piece in pieces:
        calls = [recall_call(host, piece // (WIDTH * 2), num_bytes, device) for _ in range(CALLS)]
        found = bandwidth(calls, num_bytes, True, 9)
        bar = BAR if piece >= 8192 and num_bytes >= 1 << 20 else None
        judged = rows.verdict(found["gbps"] / copied["gbps"], bar, most=False)
        out.add(what="recall", piece_kib=piece / 1024, mib=num_bytes / 2**20, **found, **judged)


def main(arguments: list[str] | None = None) -> None:
    parser = rows.arguments(__doc__, "recall")
    parser.add_argument("--mib", type=float, nargs="+", default=[1, 4, 16, 64], help="bytes a call")
    parser.add_argument("--pieces", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="bytes a piece")
    parser.add_argument("--host-mib", type=int, default=4096, help="host memory that pieces are scattered over")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.smoke:
        options.mib, options.host_mib = [0.25], 1
    device, out = rows.device_of(options), rows.open_rows("recall", options)
    arena, host = host_tokens(options.host_mib << 20, device)
    for mib in options.mib:
        compare(host, int(mib * 2**20), options.pieces, out, device)
    arena.close()
    print(rows.table(out.rows, COLUMNS))


if __name__ == "__main__":
    main()
