"""One generation, timed: the numbers behind the command line's summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, TextStreamer, set_seed

from tiered_kv.cache import TieredCache
from tiered_kv.config import TieredKVConfig
from tiered_kv.dispatch import kv_cache_dispatched
from tiered_kv.generation import prefill
from tiered_kv.planning import check_memory, kv_shape

CPU_PREFILL_CHUNK = 1024
"""Tokens between two reports of progress on the CPU, where 8192 take the smallest model half a minute."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, greedily at temperature 0, and when to stop: after so many, or after a text."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: str | None = None

    def options(self) -> dict[str, Any]:
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}


@dataclass(frozen=True)
class Timed:
    """What a generation gave and how long it took.

    Attributes:
        token_ids: The new tokens.
        text: Their text, without special tokens.
        prompt_tokens: Length of the prompt.
        ttft_s: Seconds from the start of prefill to the first new token.
        second_token_s: Seconds from the start to the second one, ``None`` without: that step clusters the prompt.
        tokens_per_s: Rate of the tokens after the second; ``None`` without any.
        stats: What the cache did and holds; at least ``hit_rate``, ``recalled_bytes``, ``kv_gpu_bytes``,
            ``kv_host_bytes`` and ``kv_full_bytes``.
    """

    token_ids: list[int]
    text: str
    prompt_tokens: int
    ttft_s: float
    second_token_s: float | None
    tokens_per_s: float | None
    stats: dict[str, Any]


class StopAfter(StoppingCriteria):
    """Ends a generation once its text holds ``stop``."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, stop: str) -> None:
        self.tokenizer, self.prompt_tokens, self.stop = tokenizer, prompt_tokens, stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        found = [self.stop in self.tokenizer.decode(row[self.prompt_tokens :]) for row in input_ids]
        return torch.tensor(found, device=input_ids.device)


class Watch(TextStreamer):
    """A streamer that passes text on as it is complete, and notes when each token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], on_first: Callable[[], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text, self.on_first = on_text, on_first
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            if len(self.times) == 1:
                self.on_first()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def generate_tiered(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    kv_config: TieredKVConfig,
    *,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timed:
    """Generate from ``input_ids`` ``[1, tokens]`` with a tiered cache; ``model`` is left as it was found.

    Args:
        on_text: Called with each piece of new text.
        on_progress: Called with the tokens prefilled and those of the prompt, the last time at the first new token.

    Raises:
        TieredKVMemoryError: There is no room; raised before anything is computed.
    """
    total = input_ids.shape[1]
    shape, longest = kv_shape(model.config, model.dtype), total + sampling.max_new_tokens
    watch = Watch(tokenizer, on_text, lambda: on_progress(total, total))
    chunk = CPU_PREFILL_CHUNK if input_ids.device.type == "cpu" else None
    with kv_cache_dispatched(model, kv_config):
        cache = TieredCache(model.config, kv_config)
        try:
            check_memory(shape, kv_config, input_ids.device, longest, 1)
            set_seed(sampling.seed)
            start = time.perf_counter()
            prefill(model, cache, input_ids, on_progress=on_progress, chunk_tokens=chunk)
            new = _generate(model, tokenizer, input_ids, cache, watch, sampling)
            return _timed(tokenizer, new, total, start, watch.times, cache.stats())
        finally:
            cache.close()


def generate_full(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    *,
    sampling: Sampling,
    on_text: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timed:
    """As :func:`generate_tiered`, with the model's stock cache, all of it on the device; prefill is one step."""
    total = input_ids.shape[1]
    watch = Watch(tokenizer, on_text, lambda: on_progress(total, total))
    cache = DynamicCache(config=model.config)
    set_seed(sampling.seed)
    start = time.perf_counter()
    new = _generate(model, tokenizer, input_ids, cache, watch, sampling)
    return _timed(tokenizer, new, total, start, watch.times, _full_stats(cache))


def _generate(
    model: Any, tokenizer: Any, input_ids: torch.Tensor, cache: Any, watch: Watch, sampling: Sampling
) -> list[int]:
    prompt_tokens = input_ids.shape[1]
    stops = [] if sampling.stop is None else [StopAfter(tokenizer, prompt_tokens, sampling.stop)]
    tokens = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        streamer=watch,
        stopping_criteria=StoppingCriteriaList(stops),
        max_new_tokens=sampling.max_new_tokens,
        **sampling.options(),
    )
    return tokens[0, prompt_tokens:].tolist()


def _timed(
    tokenizer: Any, new: list[int], prompt_tokens: int, start: float, times: list[float], stats: dict[str, Any]
) -> Timed:
    has_second = len(times) > 1
    decode_s = times[-1] - times[1] if has_second else 0
    return Timed(
        token_ids=new,
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        ttft_s=times[0] - start,
        second_token_s=times[1] - start if has_second else None,
        tokens_per_s=(len(times) - 2) / decode_s if decode_s > 0 else None,
        stats=stats,
    )


def _full_stats(cache: DynamicCache) -> dict[str, Any]:
    layers: list[Any] = cache.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)
    return {"hit_rate": None, "recalled_bytes": 0, "kv_gpu_bytes": held, "kv_host_bytes": 0, "kv_full_bytes": held}
