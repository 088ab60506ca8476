"""Memory, planned before it is taken: refuse in one sentence that says what would fit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVMemoryError
from tiered_kv.layer import SLAB_SEGMENTS
from tiered_kv.offload.plan import (
    GIB,
    KVShape,
    MemoryPlan,
    TierOptions,
    free_gpu_bytes,
    free_host_bytes,
    longest_context,
    plan_memory,
)

ACTIVATIONS_PER_TOKEN = 12
"""Hidden-size vectors a token of a prefill chunk takes at its widest, in numbers of the model's dtype: the gated MLP of
Llama-3.1-8B keeps two of 3.5 hidden sizes, residual, norm and attention besides."""


def kv_shape(config: Any, dtype: torch.dtype) -> KVShape:
    """What a model with this transformers configuration keeps of a token in its full-attention layers."""
    from tiered_kv.cache import layer_types

    text = config.get_text_config(decoder=True)
    types = layer_types(text)[0]
    layer = text.per_layer_config[types.index("full_attention")]
    heads = layer.num_attention_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return KVShape(
        layers=types.count("full_attention"),
        kv_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        value_dim=getattr(layer, "v_head_dim", None) or head_dim,
        item_bytes=dtype.itemsize,
    )


def tier_options(config: TieredKVConfig) -> TierOptions:
    """The part of the options that memory depends on."""
    return TierOptions(
        dense_until=config.dense_until,
        num_sink_tokens=config.num_sink_tokens,
        window_tokens=config.window_size + config.decode_segment,
        prefill_tokens=max(config.prefill_chunk, config.prefill_segment),
        unclustered_tokens=config.prefill_segment + config.window_size,
        slab_tokens=SLAB_SEGMENTS * config.decode_segment,
        num_slots=config.num_slots,
        block_size=config.block_size,
        tokens_per_cluster=config.tokens_per_cluster,
        max_cluster_tokens=config.max_cluster_tokens,
        index_item_bytes=1 if config.index_dtype == "int8" else None,
        has_variances=config.spread > 0,
    )


def check_memory(shape: KVShape, config: TieredKVConfig, device: torch.device, context: int, batch: int) -> MemoryPlan:
    """The plan for ``batch`` sequences of ``context`` tokens.

    Raises:
        TieredKVMemoryError: It does not fit what is free, or the limits of ``config``.
    """
    options, is_one_memory = tier_options(config), device.type != "cuda"
    gpu, host = _limits(config, device)

    def fits(plan: MemoryPlan) -> bool:
        total = plan.gpu + plan.host if is_one_memory else 0
        return plan.gpu <= gpu and plan.host <= host and total <= host

    plan = plan_memory(shape, options, context, batch)
    if fits(plan):
        return plan
    is_host = is_one_memory or plan.host > host
    needed, there = (plan.host + plan.gpu * is_one_memory, host) if is_host else (plan.gpu, gpu)
    fitting = longest_context(shape, options, batch, fits)
    raise TieredKVMemoryError(
        f"{batch} x {context} tokens need {needed / GIB:.2f} GiB of {'host' if is_host else 'GPU'} memory for keys and"
        f" values and {there / GIB:.2f} GiB are free; "
        + (f"{batch} x {fitting} tokens would fit" if fitting else "no context would fit")
    )


def _limits(config: TieredKVConfig, device: torch.device) -> tuple[int, int]:
    gpu, host = free_gpu_bytes(device), free_host_bytes()
    return min(gpu, config.gpu_memory_limit or gpu), min(host, config.host_memory_limit or host)


def infer_auto_kv_config(
    model: Any,
    *,
    max_context_length: int,
    max_memory: Mapping[int | str, int | str] | None = None,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    config: TieredKVConfig | None = None,
) -> tuple[dict[int | str, int], TieredKVConfig]:
    """Options and a ``max_memory`` for ``device_map="auto"`` that leave room for a context of the given length.

    Args:
        model: A model, or its configuration.
        max_context_length: Tokens of prompt and answer together.
        max_memory: Memory there is, as accelerate has it: ``{0: "24GiB", "cpu": "64GiB"}``; what is free when left out.
            Keys and values are planned for the first GPU named.
        batch_size: Sequences at a time.
        dtype: Of keys and values; the model's when left out.
        config: Options to start from. Where they do not fit, the GPU cluster cache shrinks to one budget, then the
            spread term goes, then the budget is halved, down to 512 tokens.

    Returns:
        ``max_memory`` for the weights, and the options.

    Raises:
        TieredKVMemoryError: No options make the context fit.
    """
    model_config = getattr(model, "config", model)
    dtype = dtype or getattr(model_config, "dtype", None) or torch.bfloat16
    memory = _parse_memory(max_memory)
    first_gpu = next((key for key in memory if key != "cpu"), "cpu")
    shape = kv_shape(model_config, dtype)
    hidden = model_config.get_text_config(decoder=True).hidden_size
    for candidate in _smaller_and_smaller(config or TieredKVConfig()):
        plan = plan_memory(shape, tier_options(candidate), max_context_length, batch_size)
        activations = ACTIVATIONS_PER_TOKEN * hidden * dtype.itemsize * batch_size * candidate.prefill_chunk
        left = dict(memory)
        left[first_gpu] -= plan.gpu + min(activations, memory[first_gpu] // 4)
        left["cpu"] = left.get("cpu", 0) - plan.host
        if min(left.values()) > 0:
            return left, candidate
    raise TieredKVMemoryError(
        f"{batch_size} x {max_context_length} tokens take {plan.gpu / GIB:.2f} GiB on the GPU and"
        f" {plan.host / GIB:.2f} GiB of host memory at the least, more than max_memory has"
    )


def _smaller_and_smaller(config: TieredKVConfig) -> list[TieredKVConfig]:
    steps = [config, dataclasses.replace(config, gpu_cache_size=1.0)]
    steps.append(dataclasses.replace(steps[-1], spread=0.0))
    while steps[-1].token_budget > 512:
        steps.append(dataclasses.replace(steps[-1], token_budget=max(512, steps[-1].token_budget // 2)))
    return steps


def _parse_memory(max_memory: Mapping[int | str, int | str] | None) -> dict[int | str, int]:
    if max_memory is None:
        gpus: dict[int | str, int] = {
            i: free_gpu_bytes(torch.device("cuda", i)) for i in range(torch.cuda.device_count())
        }
        return gpus | {"cpu": free_host_bytes()}
    return {key: parse_bytes(value) for key, value in max_memory.items()}


def parse_bytes(size: int | str) -> int:
    """``"24GiB"``, ``"500 MB"`` or a number of bytes.

    Raises:
        ValueError: Not a size.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(I?)B?", size.strip().upper())
    if match is None:
        raise ValueError(f"expected a size such as '24GiB' or a number of bytes, got {size!r}")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))
