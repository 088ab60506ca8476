"""The one place where an option is named, checked and given its default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POLICIES = ("lru", "lfu", "lru_lfu")
PREFETCH = ("off", "next_layer")
INDEX_DTYPES = ("int8", "model")


@dataclass(frozen=True, kw_only=True)
class TieredKVConfig:
    """Options of a :class:`~tiered_kv.TieredCache`; frozen, and checked when built.

    Args:
        token_budget: Tokens attended per KV head and step besides sinks and window. Contexts of at most this many
            tokens stay wholly on the GPU and are attended exactly.
        num_sink_tokens: First tokens of a sequence (after left padding); always attended, always on the GPU.
        window_size: Newest tokens that are always attended and never clustered.
        decode_segment: Tokens that gather beyond ``window_size`` before they are clustered and sent to the host.
        prefill_segment: Tokens of a prompt clustered in one go.
        prefill_chunk: Tokens a forward pass of our own chunked prefill takes; rounded up to whole segments.
        tokens_per_cluster: Average tokens a cluster. 16 beat 80 on every task measured (DESIGN.md, "Quality").
        max_cluster_tokens: Larger clusters are cut into pieces of this many tokens.
        kmeans_iterations: Rounds of spherical k-means.
        center_keys: Subtract a segment's mean key before clustering by direction.
        block_size: Tokens a block, the unit the GPU cluster cache is allocated in. A cluster takes one or more.
        gpu_cache_size: Size of the GPU cluster cache in budgets, at least 1.
        policy: Which cluster leaves the GPU cache first: ``"lru"``, ``"lfu"`` (aged) or ``"lru_lfu"``. Changes time,
            never tokens.
        prefetch: ``"next_layer"`` starts recall for a layer while the one before it computes, from a guessed query;
            ``"off"`` recalls when the layer selects. Changes time, never tokens.
        prefetch_share: Share of the token budget, best-scored first, that a guess may fetch ahead.
        index_dtype: Storage of centroids, mean values and variances: ``"int8"`` with one scale a cluster, or
            ``"model"`` for the model's own dtype. int8 lost nothing measurable at half the memory.
        estimate: Add the estimate of every cluster not attended (size · exp(score), mean value) to the output.
        spread: Share of the second-order term ½·qᵀΣq, from the clusters' per-channel key variance, added to scores and
            estimates; 0 stores no variances.
        spread_limit: Upper bound of that term in the estimate (natural log units).
        dense_context: Context length up to which attention is exact and nothing is clustered; ``None`` means
            ``token_budget``.
        cuda_graph: Replay decode steps from a CUDA graph; ``None`` means where the model and its layers allow it.
        pin_memory: Page-lock the host store so that the GPU can read it directly; ``None`` means when the model is on
            CUDA.
        host_memory_limit: Most bytes the host store may take; ``None`` means what the machine (or its cgroup) has free.
        gpu_memory_limit: Most bytes KV and index may take on the GPU; ``None`` means what is free.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is out of range, or two of them contradict each other.
    """

    token_budget: int = 2048
    num_sink_tokens: int = 16
    window_size: int = 64
    decode_segment: int = 320
    prefill_segment: int = 8192
    prefill_chunk: int = 8192
    tokens_per_cluster: int = 16
    max_cluster_tokens: int = 64
    kmeans_iterations: int = 10
    center_keys: bool = True
    block_size: int = 8
    gpu_cache_size: float = 2.0
    policy: str = "lru"
    prefetch: str = "off"
    prefetch_share: float = 0.75
    index_dtype: str = "int8"
    estimate: bool = True
    spread: float = 0.5
    spread_limit: float = 1.5
    dense_context: int | None = None
    cuda_graph: bool | None = None
    pin_memory: bool | None = None
    host_memory_limit: int | None = None
    gpu_memory_limit: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        for name, least in _LEAST.items():
            _check_least(name, getattr(self, name), least)
        _check_choice("policy", self.policy, POLICIES)
        _check_choice("prefetch", self.prefetch, PREFETCH)
        _check_choice("index_dtype", self.index_dtype, INDEX_DTYPES)
        for name in ("spread", "prefetch_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}: expected a share between 0 and 1, got {getattr(self, name)}")
        _check_order("tokens_per_cluster", self.tokens_per_cluster, "max_cluster_tokens", self.max_cluster_tokens)
        _check_order("max_cluster_tokens", self.max_cluster_tokens, "token_budget", self.token_budget)
        _check_order("tokens_per_cluster", self.tokens_per_cluster, "decode_segment", self.decode_segment)
        _check_order("decode_segment", self.decode_segment, "prefill_segment", self.prefill_segment)

    @property
    def dense_until(self) -> int:
        """Context length in tokens up to which attention is exact."""
        return self.token_budget if self.dense_context is None else self.dense_context

    @property
    def max_selected_blocks(self) -> int:
        """Blocks a selection may take: enough for a budget of clusters of average size or larger, whatever their sizes.

        Cutting clusters of n₁ + n₂ + … = ``token_budget`` tokens into blocks takes at most
        ``token_budget / block_size`` blocks and one more per cluster.
        """
        return -(-self.token_budget // self.block_size) + -(-self.token_budget // self.tokens_per_cluster)

    @property
    def num_slots(self) -> int:
        """Blocks the GPU cluster cache holds per KV head."""
        return max(self.max_selected_blocks, round(self.gpu_cache_size * self.max_selected_blocks))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> TieredKVConfig:
        """The config of these options; a name that is not an option raises :class:`ValueError`."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}: expected one of {', '.join(known)}")
        return cls(**options)


_LEAST: dict[str, float] = {
    "token_budget": 1,
    "num_sink_tokens": 0,
    "window_size": 1,
    "decode_segment": 1,
    "prefill_segment": 1,
    "prefill_chunk": 2,
    "tokens_per_cluster": 1,
    "max_cluster_tokens": 1,
    "kmeans_iterations": 1,
    "block_size": 1,
    "gpu_cache_size": 1.0,
    "prefetch_share": 0.0,
    "spread": 0.0,
    "spread_limit": 0.0,
    "dense_context": 0,
    "host_memory_limit": 1,
    "gpu_memory_limit": 1,
}
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}


def _check_type(name: str, annotation: str, value: Any) -> None:
    allowed = tuple(t for part in annotation.split(" | ") for t in _TYPES[part])
    is_stray_bool = isinstance(value, bool) and bool not in allowed
    if is_stray_bool or not isinstance(value, allowed):
        raise TypeError(f"{name}: expected {annotation}, got {value!r} of type {type(value).__name__}")


def _check_least(name: str, value: float | None, least: float) -> None:
    if value is None:
        return
    if not value >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    if value == math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def _check_order(small: str, small_value: int, large: str, large_value: int) -> None:
    if small_value > large_value:
        raise ValueError(f"{small}: expected at most {large} = {large_value}, got {small_value}")
