"""GPU memory of keys, values and index, as a share of what the full cache would take.

python -m benchmarks.memory            # 1 x 128k, with and without the spread term
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks import fill, ours, peers, rows, shapes

BARS = {False: 0.12, True: 0.14}
"""Largest share, without and with the spread term (issue 6)."""
COLUMNS = ("batch", "context", "spread", "gpu_cache_size", "share", "window", "cluster_cache", "index", "bar", "won")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = rows.arguments(__doc__, "memory")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=131072)
    ours.add_arguments(parser)
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.smoke:
        options.shape, options.context = "tiny", 700
    device, out = rows.device_of(options), rows.open_rows("memory", options)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shapes.model_config(options.shape)
    for spread in (0.0, 0.5):
        kv_config = replace(ours.kv_config(options), spread=spread)
        cache = fill.fill_tiered(config, kv_config, options.batch, options.context, device, dtype)
        stats = cache.stats()
        full = stats["kv_full_bytes"]
        shares = {name: round(stats[f"{name}_bytes"] / full, 4) for name in ("window", "cluster_cache", "index")}
        judged = rows.verdict(stats["kv_gpu_bytes"] / full, BARS[spread > 0])
        out.add(
            what="memory", shape=options.shape, batch=options.batch, context=options.context, spread=spread,
            gpu_cache_size=kv_config.gpu_cache_size, share=judged.pop("ratio"), **shares, **judged,
            settings=kv_config.to_dict(), stats=ours.memory_stats(cache),
        )  # fmt: skip
        cache.close()
        peers.release()
    print(rows.table(out.rows, COLUMNS))


if __name__ == "__main__":
    main()
