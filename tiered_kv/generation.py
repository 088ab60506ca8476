"""What happens around ``generate()``: the cache it gets, and the prompt prefilled in chunks before it starts."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, fields
from types import MethodType
from typing import Any

import torch

from tiered_kv import attention
from tiered_kv.cache import TieredCache
from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.graphs import DecodeGraph
from tiered_kv.planning import check_memory, kv_shape
from tiered_kv.prefetch import Prefetcher

Progress = Callable[[int, int], None]


@dataclass
class Dispatch:
    """What a dispatched model carries: its options, how it was before, and the cache it used last."""

    config: TieredKVConfig
    text_config_key: str | None
    previous_attention: str
    graph: DecodeGraph | None = None
    prefetcher: Prefetcher | None = None
    previous_forward: Callable[..., Any] | None = None
    previous_generate: Callable[..., Any] | None = None
    last_stats: dict[str, Any] | None = None
    _last_cache: Callable[[], TieredCache | None] = field(default=lambda: None)

    def watch(self, cache: TieredCache) -> None:
        self._last_cache = weakref.ref(cache)

    def stats(self) -> dict[str, Any]:
        """Numbers of the newest cache, as it is or as it was when ``generate()`` ended."""
        cache = self._last_cache()
        if cache is not None:
            return self._with_graph(cache.stats())
        if self.last_stats is None:
            raise TieredKVError("kv_cache_stats(): nothing was generated yet")
        return self.last_stats

    def note_end(self, cache: TieredCache) -> None:
        """Keep the numbers of a cache that may go now."""
        self.last_stats = self._with_graph(cache.stats())

    def _with_graph(self, stats: dict[str, Any]) -> dict[str, Any]:
        captures, replays = (self.graph.captures, self.graph.replays) if self.graph else (0, 0)
        return stats | {"graph_captures": captures, "graph_replays": replays}

    def __deepcopy__(self, memo: dict) -> Dispatch:
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.init and not f.name.startswith("_")}
        bound = ("graph", "prefetcher", "previous_forward", "previous_generate")
        return Dispatch(**kept | {name: deepcopy(kept[name], memo) for name in bound})


def generate(self: Any, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """``generate()`` of a dispatched model: as the model's own, with a :class:`TieredCache` unless told otherwise."""
    dispatch: Dispatch = self._tiered_kv
    stock = dispatch.previous_generate or MethodType(type(self).generate, self)
    names = list(inspect.signature(type(self).generate).parameters)[2:]
    kwargs |= dict(zip(names, args, strict=False))
    if not _wants_tiered_cache(self, kwargs):
        return stock(inputs, **kwargs)
    cache = kwargs.get("past_key_values") or TieredCache(self.config, dispatch.config)
    kwargs["past_key_values"] = cache
    dispatch.watch(cache)
    try:
        _prepare(self, cache, inputs, kwargs)
        return stock(inputs, **kwargs)
    finally:
        attention.clear()
        dispatch.note_end(cache)


def _wants_tiered_cache(model: Any, kwargs: dict[str, Any]) -> bool:
    if _option(model, kwargs, "use_cache") is False or kwargs.get("cache_implementation"):
        return False
    given = kwargs.get("past_key_values")
    return given is None or isinstance(given, TieredCache)


def _prepare(model: Any, cache: TieredCache, inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Bring ``cache`` to where the stock ``generate()`` handles it rightly, all but the prompt's last chunk in it."""
    if _option(model, kwargs, "output_attentions"):
        raise TieredKVError("output_attentions: a tiered cache never forms attention weights")
    _unset(model, kwargs, "cache_implementation")
    chunk = _unset(model, kwargs, "prefill_chunk_size")  # stock: restarts a warm cache at position 0
    if any(_option(model, kwargs, name) for name in _ASSISTED):
        if cache.get_seq_length():
            raise TieredKVError(
                "assisted decoding needs a fresh cache: transformers feeds a prefilled one the whole prompt again"
            )
        return
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    mask = kwargs.get("attention_mask")
    if ids is None or ids.dim() != 2 or _has_other_inputs(kwargs):
        return
    if mask is not None and mask.shape[1] != ids.shape[1]:
        return  # only the new tokens were given
    if mask is None:
        mask = kwargs["attention_mask"] = _infer_mask(model, kwargs, ids)
    _reopen_full_cache(cache, ids.shape[1])
    copies = max(_option(model, kwargs, "num_beams") or 1, _option(model, kwargs, "num_return_sequences") or 1)
    _check_room(model, cache, ids, copies, _context_length(model, kwargs, ids.shape[1]))
    is_warm = cache.get_seq_length() > 0
    if copies > 1 and is_warm:
        return
    prefill(model, cache, ids, mask, chunk_tokens=chunk)
    if copies > 1 and cache.get_seq_length():
        cache.batch_repeat_interleave(copies)


def _context_length(model: Any, kwargs: dict[str, Any], prompt_tokens: int) -> int:
    """Tokens of prompt and answer together, as far as options tell; a model's own ``max_length`` is no intention."""
    new_tokens = _option(model, kwargs, "max_new_tokens")
    return max(prompt_tokens, kwargs.get("max_length") or 0) if new_tokens is None else prompt_tokens + new_tokens


def _check_room(model: Any, cache: TieredCache, ids: torch.Tensor, copies: int, context: int) -> None:
    """Refuse a fresh prompt that will not fit; one that continues a cache has taken most of its memory already."""
    if cache.get_seq_length() == 0:
        check_memory(kv_shape(model.config, model.dtype), cache.kv_config, ids.device, context, len(ids) * copies)


_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")


def _option(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An option of ``generate()``: as given, else of the given ``generation_config``, else of the model's."""
    if name in kwargs:
        return kwargs[name]
    configs = kwargs.get("generation_config"), model.generation_config
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def _unset(model: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Take an option away from the stock ``generate()``, wherever it is set, and return what it was."""
    value = _option(model, kwargs, name)
    if value is not None:
        kwargs[name] = None
    return value


def _has_other_inputs(kwargs: dict[str, Any]) -> bool:
    """Whether the model gets more than ids and mask (positions, embeddings, images), which its own code prepares."""
    tensors = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    return not tensors <= {"input_ids", "attention_mask"}


def _infer_mask(model: Any, kwargs: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    """The mask transformers makes up when none is given: padding tokens are padding, unless they also end a text."""
    pad, end = _option(model, kwargs, "pad_token_id"), _option(model, kwargs, "eos_token_id")
    ends = end if isinstance(end, list) else [end]
    return torch.ones_like(ids) if pad is None or pad in ends else ids.ne(pad).long()


def _reopen_full_cache(cache: TieredCache, prompt_tokens: int) -> None:
    """Drop the prompt's last token from a cache that holds all of it, so that there is a token left to feed."""
    held = cache.get_seq_length()
    if held < prompt_tokens:
        return
    if held > prompt_tokens:
        raise TieredKVError(
            f"the cache holds {held} tokens and the prompt has {prompt_tokens}: give the whole text, or only its new"
            " tokens with the attention_mask of the whole text; to go back in the text, crop() the cache first"
        )
    if not cache.can_roll_back:
        raise TieredKVError(
            "the cache holds the whole prompt already, and its sliding layers have dropped what they would need to go"
            " back by a token; prefill all but the prompt's last token"
        )
    cache.crop(-1)


@torch.no_grad()
def prefill(
    model: Any,
    cache: TieredCache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    on_progress: Progress | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Feed a prompt to ``cache`` in chunks, all but the last of them, which ``generate()`` takes with the full ids.

    Chunks end where segments do, so that no more than a window stays on the device between them.

    Args:
        model: A dispatched causal language model.
        cache: Continued from where it is.
        input_ids: ``[batch, tokens]`` the whole prompt, what ``cache`` holds included.
        attention_mask: ``[batch, tokens]``, left padding marked by 0.
        on_progress: Called with the tokens done and the tokens in all, after each chunk.
        chunk_tokens: Tokens a chunk, instead of the config's ``prefill_chunk``.
    """
    total = input_ids.shape[1]
    positions = _positions(input_ids, attention_mask)
    for start, end in _chunks(cache, total, chunk_tokens):
        model.base_model(
            input_ids=input_ids[:, start:end],
            attention_mask=None if attention_mask is None else attention_mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        if on_progress is not None:
            on_progress(end, total)


def _positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None:
        return (mask.long().cumsum(1) - 1).clamp(min=0)
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def _chunks(cache: TieredCache, total: int, chunk_tokens: int | None) -> Iterator[tuple[int, int]]:
    """Chunks that leave at least two tokens: a single one would be taken for a decode step."""
    config = cache.kv_config
    tokens = chunk_tokens or -(-config.prefill_chunk // config.prefill_segment) * config.prefill_segment
    start = cache.get_seq_length()
    end = tokens + (config.num_sink_tokens + config.window_size if chunk_tokens is None else 0)
    while end <= total - 2:
        if end > start:
            yield start, end
            start = end
        end += tokens
