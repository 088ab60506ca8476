"""Put a model on a tiered KV cache and take it off again, as accelerate puts models on devices."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiered_kv import attention, generation
from tiered_kv.cache import TieredCache
from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.graphs import DecodeGraph
from tiered_kv.prefetch import Prefetcher


def dispatch_kv_cache(model: Any, config: TieredKVConfig | None = None, **options: Any) -> Any:
    """Make plain ``model.generate()`` use a tiered KV cache, from here on.

    The model is changed in place and returned: its attention implementation becomes ``"tiered_kv"``, ``generate`` makes
    a :class:`TieredCache` when it is given none, and ``model.kv_cache_stats()`` tells what the newest one did.
    :func:`remove_kv_dispatch` undoes all of it.

    Args:
        model (`PreTrainedModel`):
            A decoder-only model with full-attention layers.
        config (`TieredKVConfig`, *optional*):
            Options of the cache.
        **options:
            Options by name, instead of ``config``.

    Raises:
        TieredKVError: The model cannot use a tiered cache; it is left as it was.

    Example:

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
    >>> model = dispatch_kv_cache(model, TieredKVConfig(token_budget=2048))
    >>> model.generate(**inputs, max_new_tokens=256)
    ```
    """
    if config is not None and options:
        raise ValueError("give either config or options by name, not both")
    config = TieredKVConfig.from_dict(options) if config is None else config
    if hasattr(model, "_tiered_kv"):
        remove_kv_dispatch(model)
    _check_model(model)
    key = _text_config_key(model)
    previous = model.config.get_text_config(decoder=True)._attn_implementation
    _set_attention(model, key, attention.NAME)
    if model.config.get_text_config(decoder=True)._attn_implementation != attention.NAME:
        raise TieredKVError(f"{type(model).__name__} does not call attention through transformers' attention interface")
    model._tiered_kv = generation.Dispatch(config, key, previous)
    if config.cuda_graph is not False:
        _install_graph(model, model._tiered_kv)
    if config.prefetch == "next_layer":
        model._tiered_kv.prefetcher = Prefetcher(model)
    model._tiered_kv.previous_generate = model.__dict__.get("generate")
    model.generate = types.MethodType(generation.generate, model)
    model.kv_cache_stats = types.MethodType(kv_cache_stats, model)
    return model


def remove_kv_dispatch(model: Any) -> Any:
    """Undo :func:`dispatch_kv_cache`; the model is returned as it was found, also one that was not dispatched."""
    dispatch = model.__dict__.pop("_tiered_kv", None)
    if dispatch is None:
        return model
    model.__dict__.pop("kv_cache_stats", None)
    _put_back(model, "generate", dispatch.previous_generate)
    if dispatch.graph is not None:
        _put_back(model, "forward", dispatch.previous_forward)
    if dispatch.prefetcher is not None:
        dispatch.prefetcher.remove()
    _set_attention(model, dispatch.text_config_key, dispatch.previous_attention)
    return model


@contextmanager
def kv_cache_dispatched(model: Any, config: TieredKVConfig | None = None, **options: Any) -> Iterator[Any]:
    """:func:`dispatch_kv_cache` for the length of a ``with`` block, undone also when the block raises."""
    outer = model.__dict__.get("_tiered_kv")
    try:
        yield dispatch_kv_cache(model, config, **options)
    finally:
        remove_kv_dispatch(model)
        if outer is not None:
            dispatch_kv_cache(model, outer.config)


def kv_cache_stats(model: Any) -> dict[str, Any]:
    """What the model's newest tiered cache did and holds; see :func:`tiered_kv.stats.collect_stats`."""
    dispatch = getattr(model, "_tiered_kv", None)
    if dispatch is None:
        raise TieredKVError("kv_cache_stats(): the model has no tiered cache; call dispatch_kv_cache(model) first")
    return dispatch.stats()


def _check_model(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise TieredKVError(f"{type(model).__name__} is an encoder-decoder model; a tiered cache serves decoders only")
    attention.register()
    TieredCache(model.config)  # raises for a model without layers to keep in tiers


def _install_graph(model: Any, dispatch: generation.Dispatch) -> None:
    """Let decode steps come from a CUDA graph, which a model on the CPU never notices."""
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    moved = places & {"cpu", "disk"} if len(places) > 1 else set()
    refusal = "accelerate moves the model's weights, so their addresses change" if moved else None
    dispatch.previous_forward = model.__dict__.get("forward")
    dispatch.graph = DecodeGraph(model.forward, refusal)
    model.forward = dispatch.graph


def _put_back(model: Any, name: str, found: Any) -> None:
    """What was set on the instance before, or nothing, so that the class's own shows again."""
    model.__dict__.pop(name, None)
    if found is not None:
        setattr(model, name, found)


def _text_config_key(model: Any) -> str | None:
    """Name of the sub-configuration of the text decoder, where the model has several."""
    text = model.config.get_text_config(decoder=True)
    keys = [key for key in getattr(model.config, "sub_configs", {}) if getattr(model.config, key, None) is text]
    return keys[0] if text is not model.config and keys else None


def _set_attention(model: Any, key: str | None, implementation: str) -> None:
    model.set_attn_implementation({key: implementation} if key else implementation)
