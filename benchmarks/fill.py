"""Caches as a long prompt leaves them, without the prompt: random keys and values, taken in by the caches' own code.

A tiered cache is filled segment by segment through its layers' ``update()``: real clustering, a real host store. Keys
lie around centres of very unequal weight, so that cluster sizes vary as they do in models; every row has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from tiered_kv import TieredCache, TieredKVConfig, attention

TOKENS_PER_CENTRE = 12
HOST_BYTES = 100 << 30
"""Most that a fill may pin; the machine has 128 GiB."""
STATIC_ROOM = 512
"""Tokens that a static cache takes beyond the context."""


def clustered_keys(rows: int, tokens: int, dim: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """``[rows, tokens, dim]`` keys around centres whose weights fall off like a power, with an offset and noise."""
    device = generator.device
    centres = tokens // TOKENS_PER_CENTRE + 1
    weight = torch.arange(1, centres + 1, device=device, dtype=torch.float32) ** -0.7
    of = torch.multinomial(weight.expand(rows, -1), tokens, replacement=True, generator=generator)
    centre = _normal((rows, centres, dim), dtype, generator) + 2 * _normal((rows, 1, dim), dtype, generator)
    keys = centre.gather(1, of[..., None].expand(-1, -1, dim))
    return keys.add_(_normal((rows, tokens, dim), dtype, generator), alpha=0.5)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def _sizes(config: Any) -> tuple[int, int]:
    """KV heads and head_dim."""
    return config.num_key_value_heads, config.head_dim


@torch.no_grad()
def fill_tiered(
    config: Any,
    kv_config: TieredKVConfig,
    batch: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> TieredCache:
    """A :class:`TieredCache` of a model that has seen ``context`` tokens, ready for a decode step."""
    heads, dim = _sizes(config)
    generator = torch.Generator(device).manual_seed(seed)
    cache = TieredCache(config, kv_config)
    for number, layer in enumerate(cache.layers):
        for tokens in _chunks(kv_config, context):
            keys = clustered_keys(batch * heads, tokens, dim, dtype, generator).view(batch, heads, tokens, dim)
            cache.update(keys, _normal(tuple(keys.shape), dtype, generator), number)
        attention.clear()  # nothing will attend to what update() has tagged
        layer.tiered.make_room()
    for lane in cache.group.lanes:
        lane.make_room()
    return cache


def _chunks(kv_config: TieredKVConfig, context: int) -> Iterator[int]:
    """Chunks that end where prefill segments do, as the library's own chunked prefill has them."""
    tokens = kv_config.prefill_segment + kv_config.num_sink_tokens + kv_config.window_size
    while context:
        tokens = min(tokens, context)
        yield tokens
        context, tokens = context - tokens, kv_config.prefill_segment


def with_gpu_cache(cache: TieredCache, gpu_cache_size: float) -> TieredCache:
    """The same cache with an empty GPU cluster cache of another size: seconds cheaper than filling anew."""
    options = cache.kv_config.to_dict() | {"gpu_cache_size": gpu_cache_size}
    cache.kv_config = cache.group.config = TieredKVConfig(**options)
    for layer in cache.group.layers:
        layer.config, layer.cluster_cache = cache.kv_config, None
        layer._tiers()[1].reserve_blocks(layer.index.block_capacity)
    return cache


def _random_kv(
    config: Any, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Keys and values of layer after layer, ``[2, batch, heads, tokens, dim]``, made where they are."""
    heads, dim = _sizes(config)
    for _ in range(config.num_hidden_layers):
        yield torch.empty(2, batch, heads, tokens, dim, dtype=dtype, device=device).normal_()


@torch.no_grad()
def fill_dynamic(
    config: Any, batch: int, context: int, device: torch.device, dtype: torch.dtype, offloading: bool = False
) -> DynamicCache:
    """transformers' :class:`DynamicCache` with ``context`` tokens, all but one layer on the host if ``offloading``."""
    cache = DynamicCache(config=config, offloading=offloading)
    for layer, (keys, values) in zip(cache.layers, _random_kv(config, batch, context, device, dtype), strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if offloading:
            layer.offload()
    if offloading:
        cache.layers[0].prefetch()
    return cache


@torch.no_grad()
def fill_static(config: Any, batch: int, context: int, device: torch.device, dtype: torch.dtype) -> StaticCache:
    """transformers' :class:`StaticCache` with ``context`` tokens and room for ``STATIC_ROOM`` more."""
    cache = StaticCache(config=config, max_cache_len=context + STATIC_ROOM)
    heads, dim = _sizes(config)
    for layer in cache.layers:
        like = torch.empty(batch, heads, 1, dim, dtype=dtype, device=device)
        layer.lazy_initialization(like, like)
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context)
    return cache
