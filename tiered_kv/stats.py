"""What a cache did and what it holds, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tiered_kv.kernels.count import AHEAD_COUNTERS, COUNTERS
from tiered_kv.layer import TieredLayer


def collect_stats(layers: Sequence[TieredLayer]) -> dict[str, Any]:
    """Counters of all layers together, rates derived from them, and memory by tier in bytes. Waits for the device.

    Returns:
        ``lookups`` (rows times layers times steps that selected clusters), ``selected_clusters``, ``selected_tokens``,
        ``selected_blocks``, ``missed_blocks``, ``recalled_tokens``: sums since the cache was made;
        ``guesses``, ``guessed_tokens``, ``prefetched_tokens``, ``used_prefetched_tokens``: of the prefetcher; what it
        fetched in vain is the difference of the last two, what the layers corrected are ``recalled_tokens``;
        ``hit_rate``: share of selected tokens that were on the GPU when their layer looked them up, those fetched ahead
        included, ``None`` before any was selected;
        ``tokens_per_lookup``, ``clusters_per_lookup``: averages, or ``None``;
        ``recalled_bytes``: from host to GPU during decode, prefetched ones included;
        ``kv_gpu_bytes`` = ``window_bytes`` + ``cluster_cache_bytes`` + ``index_bytes``; ``kv_host_bytes``; and
        ``kv_full_bytes``: what all keys and values would take on the GPU;
        ``context_length``, ``num_clusters`` (of the longest layer), ``tiered_layers``.
    """
    totals = _totals(layers)
    memory = _memory(layers)
    recalled = sum(
        (int(layer.counters[-1]) + int(layer.ahead_counters[2])) * layer.width * layer.dtype.itemsize
        for layer in layers
    )
    return {
        **totals,
        "hit_rate": _ratio(totals["selected_tokens"] - totals["recalled_tokens"], totals["selected_tokens"]),
        "tokens_per_lookup": _ratio(totals["selected_tokens"], totals["lookups"]),
        "clusters_per_lookup": _ratio(totals["selected_clusters"], totals["lookups"]),
        "recalled_bytes": recalled,
        **memory,
        "context_length": max((layer.length for layer in layers), default=0),
        "num_clusters": max((layer.index.num_clusters for layer in layers), default=0),
        "tiered_layers": len(layers),
    }


def _totals(layers: Sequence[TieredLayer]) -> dict[str, int]:
    names = COUNTERS + AHEAD_COUNTERS
    if not layers:
        return dict.fromkeys(names, 0)
    counters = torch.stack([torch.cat([layer.counters, layer.ahead_counters]).cpu() for layer in layers])
    return dict(zip(names, counters.sum(0).tolist(), strict=True))


def _memory(layers: Sequence[TieredLayer]) -> dict[str, int]:
    window = sum(layer.window.num_bytes for layer in layers)
    cluster_cache = sum(layer.cluster_cache.num_bytes for layer in layers if layer.cluster_cache is not None)
    index = sum(layer.index.num_bytes for layer in layers)
    return {
        "window_bytes": window,
        "cluster_cache_bytes": cluster_cache,
        "index_bytes": index,
        "kv_gpu_bytes": window + cluster_cache + index,
        "kv_host_bytes": sum(layer.store.num_bytes for layer in layers if layer.store is not None),
        "kv_full_bytes": sum(layer.rows * layer.length * layer.width * layer.dtype.itemsize for layer in layers),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
