"""A few decode steps of one layer, small enough for compute-sanitizer.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m benchmarks.sanitize

Every kernel of the decode path runs, and of clustering, at a shape whose tiles are partly empty; recall reads pinned
host memory; a window fills up and becomes a segment.
"""

from __future__ import annotations

import torch

from tiered_kv import TieredKVConfig
from tiered_kv.layer import TieredLayer
from tiered_kv.lockstep import Lane

BATCH, KV_HEADS, GROUP, HEAD_DIM = 1, 2, 4, 64
CONFIG = TieredKVConfig(
    token_budget=128, decode_segment=16, prefill_segment=256, prefill_chunk=256, gpu_cache_size=1.1, policy="lru_lfu"
)


def steps(count: int = 24) -> torch.Tensor:
    """The output of the last of ``count`` decode steps after a prompt of 700 tokens."""
    device = torch.device("cuda")
    lane = Lane(device)
    layer = TieredLayer(CONFIG, lane.clock)
    lane.members.append(layer)
    query, key, value = (
        torch.randn(BATCH, heads, 700, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )
    layer.start(key, value)
    layer.add_chunk(key, value)
    layer.attend_chunk(query, scale=HEAD_DIM**-0.5)
    for i in range(count):
        lane.begin_decode(layer)
        layer.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        out = layer.attend_token(query[:, :, i : i + 1] * 3, scale=HEAD_DIM**-0.5)
    return out


if __name__ == "__main__":
    torch.manual_seed(0)
    print("finite:", bool(steps().isfinite().all()))
