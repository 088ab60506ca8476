"""The tiered cache as transformers knows caches: layers of ours for full attention, nearly stock ones for the rest."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

from tiered_kv import attention
from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.layer import TieredLayer
from tiered_kv.lockstep import Lane
from tiered_kv.sliding import SlidingBuffer
from tiered_kv.stats import collect_stats

UNSUPPORTED = {
    "doge": "it derives its mask from the values",
    "diffllama": "it repeats values after the cache",
    "jetmoe": "it repeats keys and values after the cache",
}
"""Model types that cannot use a tiered cache although nothing in their configuration tells, and why."""


def on_device_of_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a layer's method with the device of its first tensor as the current one, which kernels are launched on.

    PyTorch's own operations do without; Triton's do not, and a model spread over several GPUs sets no device.
    """

    @functools.wraps(method)
    def run(layer: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return method(layer, tensor, *args, **kwargs)

    return run


class LayerGroup:
    """What the layers of one cache share: options, lanes, and what is known of left padding.

    It knows the tiered layers, and they don't know it, so that a dropped cache gives its memory back at once.
    """

    def __init__(self, config: TieredKVConfig, is_shared: bool) -> None:
        self.config, self.is_shared = config, is_shared
        self.layers: list[TieredLayer] = []
        self.padding: list[int] | None = None
        self._lanes: dict[tuple[torch.device, int | None], Lane] = {}
        self._seen_mask: torch.Tensor | None = None

    def lane(self, device: torch.device, sliding_window: int | None = None) -> Lane:
        """The lane of the tiered layers on ``device``, or of its sliding layers with that window."""
        key = device, sliding_window
        if key not in self._lanes:  # no setdefault: a lane that is not needed would cost a launch a layer and step
            self._lanes[key] = Lane(device)
        return self._lanes[key]

    @property
    def lanes(self) -> list[Lane]:
        """The lanes that decode steps go through."""
        return [lane for lane in self._lanes.values() if lane.members]

    def new_layer(self, key: torch.Tensor, value: torch.Tensor) -> TieredLayer:
        """A layer for keys and values like these; layers come in the model's order."""
        lane = self.lane(key.device)
        layer = TieredLayer(self.config, lane.clock, self.is_shared)
        layer.start(key, value)
        self.layers.append(layer)
        lane.members.append(layer)
        return layer

    def remove(self, layer: TieredLayer) -> None:
        """Forget a layer and give its memory back."""
        layer.close()
        self.layers.remove(layer)
        self.lane(layer.device).members.remove(layer)
        self.set_padding(None)

    def set_padding(self, padding: list[int] | None) -> None:
        """Take the left padding of each sequence from elsewhere than a mask."""
        self.padding, self._seen_mask = padding, None

    def note_mask(self, mask: torch.Tensor | None) -> None:
        """Learn from ``mask`` ``[batch, tokens]`` how much left padding there is; looked at once a forward pass.

        Raises:
            TieredKVError: Padding elsewhere than on the left.
        """
        if mask is not None and mask is not self._seen_mask:
            if mask.ndim != 2:
                raise TieredKVError(
                    f"attention_mask: expected [batch, tokens], got {list(mask.shape)}: the mask is not the causal one"
                    " (but packed or bidirectional), or the context exceeds the model's sliding window"
                )
            self._seen_mask, self.padding = mask, _left_padding(mask)


class TieredCacheLayer(CacheLayerMixin):
    """A :class:`~tiered_kv.layer.TieredLayer` behind transformers' cache layer interface."""

    is_sliding = False
    is_compileable = False  # True would make generate() run torch.compile over the model
    is_croppable = True

    def __init__(self, group: LayerGroup) -> None:
        super().__init__()
        self.group = group
        self.tiered: TieredLayer | None = None
        self._is_decoding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.tiered = self.group.new_layer(key_states, value_states)
        self.is_initialized = True

    @on_device_of_tensors
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Store new keys and values ``[batch, kv_heads, tokens, dim]`` and return them, tagged with this layer."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.tiered is not None
        self._check_batch(key_states)
        self._is_decoding = key_states.shape[2] == 1 and self.tiered.has_begun
        if self._is_decoding:
            self.group.lane(self.device).begin_decode(self.tiered)
            self.tiered.append(key_states, value_states)
        else:
            self.tiered.add_chunk(key_states, value_states)
        return attention.tag(self, key_states, value_states)

    @on_device_of_tensors
    def attend(self, query: torch.Tensor, padding_mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Attention of ``[batch, query_heads, queries, head_dim]`` to all this layer holds."""
        assert self.tiered is not None
        if self._is_decoding:
            return self.tiered.attend_token(query, **options)
        self.group.note_mask(padding_mask)
        if self.tiered.left_padding != self.group.padding:
            self.tiered.set_left_padding(self.group.padding)
        return self.tiered.attend_chunk(query, **options)

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens kept on the device."""
        return 0 if self.tiered is None else self.tiered.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return 0 if self.tiered is None else self.tiered.batch

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens; a negative number, or a positive length to keep, as transformers has it."""
        count = int(tokens_to_remove)
        if self.tiered is not None and count:
            count = -count if count < 0 else max(0, self.tiered.length - count)
            self.tiered.crop(min(count, self.tiered.length))
            self.group.set_padding(self.tiered.left_padding)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was; the host store is not copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.tiered is not None:
            self.tiered.select_sequences(torch.arange(self.batch_size)[indices.cpu()].tolist())
            self.group.set_padding(self.tiered.left_padding)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        if self.tiered is not None:
            self.group.remove(self.tiered)
        self.tiered, self.is_initialized = None, False

    def offload(self) -> None:
        """Nothing: the layer moves its own data."""

    def prefetch(self) -> None:
        """Nothing: the layer moves its own data."""

    def _check_batch(self, key_states: torch.Tensor) -> None:
        if key_states.shape[0] != self.batch_size:
            raise TieredKVError(
                f"the cache holds {self.batch_size} sequences, got {key_states.shape[0]}; use batch_repeat_interleave()"
                " to expand a prefilled cache, or a new cache"
            )


class SlidingCacheLayer(DynamicSlidingWindowLayer):
    """transformers' sliding-window layer, but for decode steps, which it takes in a :class:`SlidingBuffer`.

    Args:
        sliding_window: Tokens a query attends to, itself included.
        group: What the cache's layers share.
    """

    def __init__(self, sliding_window: int, group: LayerGroup) -> None:
        super().__init__(sliding_window)
        self.group = group
        self.buffer: SlidingBuffer | None = None

    @on_device_of_tensors
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Take new keys and values; a decode step's stay in the buffer and come back tagged with this layer."""
        has_begun = self.get_seq_length() > max(self.group.padding or [0])  # as in a tiered layer
        if key_states.shape[2] > 1 or not has_begun or self.record_past:
            self._leave_buffer()
            return super().update(key_states, value_states, *args, **kwargs)
        buffer = self.buffer or self._enter_buffer()
        self._lane.begin_decode(buffer)
        buffer.append(key_states, value_states)
        return attention.tag(self, key_states, value_states)

    @on_device_of_tensors
    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """Attention of the newest token's query; the buffer knows what is padding."""
        assert self.buffer is not None
        return self.buffer.attend(query, **options)

    def get_seq_length(self) -> int:
        return self.cumulative_length if self.buffer is None else self.buffer.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self.cumulative_length = self.get_seq_length()
        return super().get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        self._leave_buffer()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        self._leave_buffer()
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._leave_buffer()
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._leave_buffer()
        super().batch_repeat_interleave(repeats)

    def reset(self) -> None:
        self._leave_buffer()
        self.cumulative_length, self.is_initialized = 0, False

    @property
    def _lane(self) -> Lane:
        return self.group.lane(self.device, self.sliding_window)

    def _enter_buffer(self) -> SlidingBuffer:
        assert self.keys is not None
        assert self.values is not None
        self.buffer = SlidingBuffer(
            self.keys, self.values, sliding_window=self.sliding_window, seen=self.cumulative_length,
            padding=self.group.padding, clock=self._lane.clock,
        )  # fmt: skip
        self._lane.members.append(self.buffer)
        self.keys = self.values = None
        return self.buffer

    def _leave_buffer(self) -> None:
        """Back to keys and values as transformers keeps them."""
        if self.buffer is not None:
            self.keys, self.values = self.buffer.newest()
            self.cumulative_length = self.buffer.seen
            self._lane.members.remove(self.buffer)
            self.buffer = None


class TieredCache(Cache):
    """A KV cache whose full-attention layers live in tiers; pass it as ``past_key_values``.

    The model's attention implementation must be ``"tiered_kv"``: :func:`~tiered_kv.dispatch_kv_cache` sets it, and
    ``model.set_attn_implementation("tiered_kv")`` does after a cache has been made.

    Args:
        config: The model's configuration.
        kv_config: Options of the tiers; the defaults when left out.

    Raises:
        TieredKVError: The model cannot use a tiered cache.

    Example:

    ```python
    >>> model = dispatch_kv_cache(model, kv_config)
    >>> cache = TieredCache(model.config, kv_config)
    >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    >>> cache.stats()["hit_rate"]
    ```
    """

    def __init__(self, config: PreTrainedConfig, kv_config: TieredKVConfig | None = None) -> None:
        attention.register()
        self.kv_config = TieredKVConfig() if kv_config is None else kv_config
        text_config = config.get_text_config(decoder=True)
        types, options = layer_types(text_config)
        self.group = LayerGroup(self.kv_config, is_shared=bool(getattr(text_config, "num_kv_shared_layers", None)))
        super().__init__(layers=[self._new_layer(kind, options) for kind in types])

    def _new_layer(self, kind: str, options: dict[str, Any]) -> Any:
        if kind == "full_attention":
            return TieredCacheLayer(self.group)
        if kind == "sliding_attention":
            return SlidingCacheLayer(options["sliding_window"], self.group)
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)

    def capture_obstacle(self) -> str | None:
        """Why decode steps of this cache cannot be captured in a CUDA graph, if so."""
        others = {type(layer) for layer in self.layers} - {TieredCacheLayer, SlidingCacheLayer}
        if others:
            return f"layers of kind {', '.join(sorted(kind.__name__ for kind in others))} change their addresses"
        if len({layer.device for layer in self.group.layers}) > 1:
            return "the model's layers are on several devices"
        return None

    @property
    def is_decoding(self) -> bool:
        """Whether every layer took its last token in a decode step."""
        has_begun = all(layer.has_begun for layer in self.group.layers[:1])
        return has_begun and all(layer.buffer is not None for layer in self._sliding_layers)

    @property
    def can_roll_back(self) -> bool:
        """Whether :meth:`crop` can drop the newest token: not once a sliding window has left the first one behind."""
        return all(
            getattr(layer, "record_past", True)
            or (isinstance(layer, SlidingCacheLayer) and layer.get_seq_length() < layer.sliding_window)
            for layer in self.layers
        )

    @property
    def _sliding_layers(self) -> list[SlidingCacheLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlidingCacheLayer)]

    def stats(self) -> dict[str, Any]:
        """Counters and memory by tier; waits for the device. See :func:`tiered_kv.stats.collect_stats`."""
        return collect_stats(self.group.layers)

    def close(self) -> None:
        """Forget every token and give all memory back; the cache is then as new."""
        self.reset()


def layer_types(config: PreTrainedConfig) -> tuple[list[str], dict[str, Any]]:
    """Kind of each layer and options of the stock ones.

    Configurations without ``layer_types`` call every layer sliding as soon as they name a window, even one that the
    model never fills; such layers are full-attention layers for us.
    """
    reason = UNSUPPORTED.get(config.model_type)
    if reason is not None:
        raise TieredKVError(f"{config.model_type} models cannot use a tiered cache: {reason}")
    types, options = get_layer_types_and_kwargs(config)
    window = options.get("sliding_window")
    longest = getattr(config, "max_position_embeddings", None)
    if window is not None and longest is not None and window >= longest:
        types = ["full_attention" if t == "sliding_attention" else t for t in types]
    if "full_attention" not in types:
        raise TieredKVError(f"{config.model_type} has no full-attention layer, so there is nothing to keep in tiers")
    return types, options


def _left_padding(mask: torch.Tensor) -> list[int] | None:
    """Zeros at the beginning of each row of a 2D mask; ``None`` when there are none. Waits for the device."""
    is_token = mask.bool()
    padding = (~is_token).int().cumprod(1).sum(1)
    present = is_token.sum(1)
    counts, tokens = torch.stack([padding, present]).tolist()
    if any(c + t != mask.shape[1] for c, t in zip(counts, tokens, strict=True)):
        raise TieredKVError("attention_mask: expected padding on the left only, got gaps or padding on the right")
    return counts if any(counts) else None
