"""The real thing: a :class:`~tiered_kv.TieredCache` prefilled and fed token by token, as ``generate()`` does it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.quality.schedule import Schedule
from tiered_kv import TieredCache, TieredKVConfig, dispatch_kv_cache, remove_kv_dispatch
from tiered_kv.generation import prefill


class TieredSession:
    """A model dispatched to a tiered cache, for the length of a ``with`` block.

    Args:
        model: A transformers causal language model.
        config: Options of the cache.
    """

    def __init__(self, model: Any, config: TieredKVConfig) -> None:
        self.model, self.config = dispatch_kv_cache(model, config), config
        self.cache: TieredCache | None = None

    def __enter__(self) -> TieredSession:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._drop_cache()
        remove_kv_dispatch(self.model)

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> None:
        """Take the prompt into a fresh cache."""
        self._drop_cache()
        self.cache = TieredCache(self.model.config, self.config)
        ids = torch.tensor([prompt], device=self.model.device)
        prefill(self.model, self.cache, ids)  # leaves the last chunk to the caller
        seen = self.cache.get_seq_length()
        self._forward(ids[:, seen:], seen)

    @torch.inference_mode()
    def decode(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        """Feed tokens one at a time; yields float32 logits ``[1, vocabulary]`` after each."""
        assert self.cache is not None
        first = self.cache.get_seq_length()
        for step, token in enumerate(tokens):
            ids = torch.full((1, 1), token, device=self.model.device)
            yield self._forward(ids, first + step)

    def _forward(self, ids: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
        out = self.model(input_ids=ids, position_ids=positions, past_key_values=self.cache, logits_to_keep=1)
        return out.logits[:, -1].float()

    def _drop_cache(self) -> None:
        if self.cache is not None:
            self.cache.close()
        self.cache = None


def schedule_of(config: TieredKVConfig) -> Schedule:
    """Sinks and window that this cache grants itself, for the methods it is compared with."""
    return Schedule(
        num_sink_tokens=config.num_sink_tokens,
        window_size=config.window_size,
        decode_segment=config.decode_segment,
        prefill_segment=config.prefill_segment,
    )
