"""What a context takes, by tier, before any of it is taken; and what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from tiered_kv.offload.host_store import POSITION_BYTES

GIB = 1 << 30
INDEX_WORDS = 6
"""4-byte numbers the index keeps per cluster beside its vectors: three scales, size, start, first block."""


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What a model keeps of a token.

    Attributes:
        layers: Layers in tiers.
        kv_heads: KV heads a layer.
        head_dim: Numbers a key.
        value_dim: Numbers a value.
        item_bytes: Bytes a number.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return self.layers * self.kv_heads * (self.head_dim + self.value_dim) * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """The options of a cache that its memory depends on; see :class:`tiered_kv.TieredKVConfig`.

    Attributes:
        window_tokens: Most tokens of the window while it decodes.
        prefill_tokens: Tokens of a prompt that a layer works on at a time.
        unclustered_tokens: Tokens of a prompt that may be left at its end: less than a segment, and the window.
        slab_tokens: Tokens that host memory is taken for at a time.
    """

    dense_until: int
    num_sink_tokens: int
    window_tokens: int
    prefill_tokens: int
    unclustered_tokens: int
    slab_tokens: int
    num_slots: int
    block_size: int
    tokens_per_cluster: int
    max_cluster_tokens: int
    index_item_bytes: int | None
    has_variances: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by tier for all layers and sequences.

    Attributes:
        window: Sinks and window; or everything, where all is attended exactly.
        cluster_cache: The GPU cluster cache.
        index: What the GPU knows of the clusters.
        prefill: On the GPU until the first decode step: what a layer works on, and what all layers have not clustered.
        host: Pinned host memory.
        full: What all keys and values would take.
    """

    window: int
    cluster_cache: int
    index: int
    prefill: int
    host: int
    full: int

    @property
    def gpu(self) -> int:
        """On the GPU in all, at the worst moment."""
        return self.window + self.cluster_cache + self.index + self.prefill


def plan_memory(shape: KVShape, options: TierOptions, context: int, batch: int) -> MemoryPlan:
    """Memory that ``batch`` sequences of ``context`` tokens take."""
    full = shape.token_bytes * context * batch
    if context <= options.dense_until:
        return MemoryPlan(window=full, cluster_cache=0, index=0, prefill=0, host=0, full=full)
    per_token = shape.token_bytes * batch
    rows = shape.layers * shape.kv_heads * batch
    unclustered = max(0, min(options.unclustered_tokens, context) - options.window_tokens)
    stored = context + options.slab_tokens
    return MemoryPlan(
        window=per_token * (options.num_sink_tokens + options.window_tokens),
        cluster_cache=per_token * options.num_slots * options.block_size,
        index=rows * _index_bytes(shape, options, context),
        prefill=4 * per_token // shape.layers * min(options.prefill_tokens, context) + per_token * unclustered,
        host=(per_token + rows * POSITION_BYTES) * stored,
        full=full,
    )


def _index_bytes(shape: KVShape, options: TierOptions, context: int) -> int:
    """Of one KV head: vectors, scales and places of its clusters, and the table of their blocks."""
    clusters = context // options.tokens_per_cluster + context // options.max_cluster_tokens + 512
    item = options.index_item_bytes or shape.item_bytes
    numbers = shape.head_dim * (2 if options.has_variances else 1) + shape.value_dim
    blocks = context // options.block_size + clusters
    return clusters * (numbers * item + 4 * INDEX_WORDS) + 4 * blocks


def longest_context(shape: KVShape, options: TierOptions, batch: int, fits: Callable[[MemoryPlan], bool]) -> int:
    """The longest context, in tokens, whose plan fits; 0 when none does."""
    low, high = 0, 1 << 27
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(plan_memory(shape, options, middle, batch)) else (low, middle - 1)
    return low


def free_gpu_bytes(device: torch.device) -> int:
    """Memory that tensors on ``device`` can still take; on the CPU that of the host."""
    if device.type != "cuda":
        return free_host_bytes()
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return min(free + reserved, int(share * total)) - allocated if share < 1.0 else free + reserved - allocated


def free_host_bytes() -> int:
    """Memory the host can still give, within the limits of the control group this process is in."""
    free = psutil.virtual_memory().available
    limit, used = _cgroup("memory.max", "memory.limit_in_bytes"), _cgroup("memory.current", "memory.usage_in_bytes")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _cgroup(*names: str) -> int | None:
    for path in (Path("/sys/fs/cgroup") / names[0], Path("/sys/fs/cgroup/memory") / names[1]):
        try:
            return int(path.read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return None
