"""Recall started a layer early: guess the next tiered layer's query from the input of the layer before it.

The hidden state changes little from one layer to the next (so InfiniGen, arXiv 2406.19707, argues too), so the next
layer's own norm, query projection and rotary embedding, applied to this layer's input, give a query close to the real
one. What it selects is fetched on a stream of its own while this layer computes; at its turn the layer selects exactly
and recalls what the guess has missed. So a guess changes time, never tokens.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tiered_kv.cache import TieredCache, TieredCacheLayer

AGREEMENT = 0.02
"""Relative difference up to which a query computed here from a layer's own input counts as the layer's query: half
precision differs by some 1e-3 where kernels are chosen by shape; another formula differs by tenths."""


class QueryGuesser:
    """Computes the query of one decoder layer as its attention module does, for a hidden state of one token.

    Args:
        decoder_layer: With ``input_layernorm`` and ``self_attn.q_proj``, as nearly all decoders have them.
        rotary: The model's rotary embedding module.

    Raises:
        AttributeError: The layer is built differently.
    """

    def __init__(self, decoder_layer: Any, rotary: Any) -> None:
        self.norm, self.attention = decoder_layer.input_layernorm, decoder_layer.self_attn
        self.projection, self.head_dim = self.attention.q_proj, self.attention.head_dim
        self.query_norm = getattr(self.attention, "q_norm", None)
        self._rotate = sys.modules[type(self.attention).__module__].apply_rotary_pos_emb
        self._rotary = rotary
        self._has_kinds = "layer_type" in inspect.signature(rotary.forward).parameters

    def __call__(self, hidden: torch.Tensor, position_ids: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """The query ``[batch, query_heads, 1, head_dim]`` for ``hidden`` ``[batch, 1, hidden_size]``.

        Positions and rotary embeddings may be on another device, from which accelerate would move them at the layer.
        """
        query = self.projection(self.norm(hidden)).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None:
            query = self.query_norm(query)
        if self._has_kinds:  # the layer before may be a sliding one, with another rotary base
            embeddings = self._rotary(hidden, position_ids.to(hidden.device), "full_attention")
        query = query.transpose(1, 2)
        return self._rotate(query, query, *(x.to(hidden.device) for x in embeddings))[0]


class Prefetcher:
    """Hooks on a model's decoder layers that fetch ahead for the tiered layer that follows.

    Attributes:
        obstacle: Why nothing is fetched ahead, once that is known; it is said once.
    """

    def __init__(self, model: Any) -> None:
        self.obstacle: str | None = None
        self._handles: list[Any] = []
        self._own: tuple[int, torch.Tensor] | None = None
        self._is_verified = False
        try:
            layers, rotary = model.base_model.layers, model.base_model.rotary_emb
            kinds = TieredCache(model.config).layers
            tiered = [i for i, layer in enumerate(kinds) if isinstance(layer, TieredCacheLayer) and i > 0]
            guessers = {i: QueryGuesser(layers[i], rotary) for i in tiered}
        except AttributeError as error:
            self._give_up(f"its layers are built in a way that is not known here ({error})")
            return
        for i, guesser in guessers.items():
            self._hook(layers[i - 1].register_forward_pre_hook, partial(self._fetch, i, guesser))
        for i in tiered[:1]:
            self._hook(layers[i].register_forward_pre_hook, partial(self._guess_own, i, guessers[i]))
            self._hook(layers[i].register_forward_hook, self._verify)

    def remove(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, register: Callable[..., Any], function: Callable[..., Any]) -> None:
        self._handles.append(register(function, with_kwargs=True))

    def _fetch(self, index: int, guesser: QueryGuesser, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before the layer that precedes the one at ``index``."""
        layer = _decoding_layer(kwargs, args, index)
        if layer is not None and self._is_verified and layer.can_fetch_ahead():
            with layer.engine.ahead():
                query = guesser(args[0], kwargs["position_ids"], kwargs["position_embeddings"])
                layer.fetch_ahead(query, source=args[0])

    def _guess_own(self, index: int, guesser: QueryGuesser, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """For a layer's own input the guess must be its true query; that is looked at once, in an eager step."""
        self._own = None  # a step that raised may have left it
        layer = _decoding_layer(kwargs, args, index)
        is_captured = args[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if layer is not None and not self._is_verified and not is_captured:
            layer.keeps_query = True
            self._own = index, guesser(args[0], kwargs["position_ids"], kwargs["position_embeddings"])

    def _verify(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if self._own is None:
            return
        (index, guess), self._own = self._own, None
        layer = kwargs["past_key_values"].layers[index].tiered
        query, layer.keeps_query, layer.query = layer.query, False, None
        if query is None:
            return  # a token of a sequence that is all padding so far: no decode step
        self._is_verified = guess.shape == query.shape and bool((guess - query).norm() <= AGREEMENT * query.norm())
        if not self._is_verified:
            self._give_up(f"{type(module).__name__} computes its queries in a way that is not known here")

    def _give_up(self, reason: str) -> None:
        self.obstacle = reason
        self.remove()
        warnings.warn(f"tiered_kv fetches nothing ahead: {reason}", stacklevel=2)


def _decoding_layer(kwargs: dict[str, Any], args: tuple, index: int) -> Any:
    """The tiered layer at ``index`` in a decode step whose hidden state is on the layer's device, else ``None``."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, TieredCache) or not args or args[0].shape[1] != 1:
        return None
    layer = cache.layers[index]
    tiered = layer.tiered if isinstance(layer, TieredCacheLayer) else None
    return tiered if tiered is not None and tiered.device == args[0].device else None
