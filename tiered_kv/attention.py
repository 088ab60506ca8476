"""What transformers calls: the attention function and the mask function registered under the name ``"tiered_kv"``.

``update()`` of a tiered cache layer returns the new keys and values as views that carry their layer as an attribute;
the attention function finds it there. A model that computes new keys or values after ``update()`` loses the attribute,
and is refused, since what it attends to is not what the cache holds.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from tiered_kv.errors import TieredKVError

if TYPE_CHECKING:
    from tiered_kv.cache import SlidingCacheLayer, TieredCacheLayer

NAME = "tiered_kv"
_TAG = "_tiered_kv_layer"
_untaken = threading.local()


def register() -> None:
    """Make ``attn_implementation="tiered_kv"`` known to transformers; nothing else does, importing included."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, tiered_attention)
    AttentionMaskInterface.register(NAME, tiered_mask)


def tag(
    layer: TieredCacheLayer | SlidingCacheLayer, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh views of key and value that carry their cache layer to the attention function."""
    key, value = key.view_as(key), value.view_as(value)
    setattr(key, _TAG, layer)
    setattr(value, _TAG, layer)
    _untaken.is_set = True
    return key, value


def clear() -> bool:
    """Forget, and tell, whether a layer was tagged and not attended to, as an exception between the two leaves it."""
    was_set = getattr(_untaken, "is_set", False)
    _untaken.is_set = False
    return was_set


def tiered_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention through the tiered cache where ``key`` came from one, and plain attention everywhere else.

    Returns:
        ``[batch, queries, query_heads, value_dim]`` and ``None`` (attention weights are never formed).

    Raises:
        TieredKVError: The model changes keys or values after ``update()``.
    """
    layer: TieredCacheLayer | SlidingCacheLayer | None = getattr(key, _TAG, None)
    was_taken = not clear()
    is_whole = layer is getattr(value, _TAG, None)
    if layer is not None and is_whole:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = layer.attend(query, attention_mask, scale=scale, softcap=softcap, attention_sinks=s_aux)
        return out.transpose(1, 2).contiguous(), None
    if layer is not None or not was_taken:
        raise TieredKVError(
            f"{type(module).__name__} rebuilds keys or values after the cache (as latent attention does), "
            "so a tiered cache cannot serve it; use the model's own cache"
        )
    return _plain_attention(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)


def tiered_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask for a kind of layer: the 2D padding mask as it is where attention is causal, SDPA's everywhere else.

    Causal are full-attention layers, and sliding ones that no token has left yet, if their keys end with the newest
    token; those of a static cache do not.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    clear()  # a forward pass begins with its masks
    tokens = None if isinstance(q_offset, torch.Tensor) else q_offset + q_length
    if tokens == kv_length and kv_offset == 0:
        is_causal = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        if is_causal if local_size is None else tokens <= local_size:
            return attention_mask
    kwargs["allow_is_causal_skip"] = False  # no mask means, to us, that the queries end where the keys do
    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, local_size=local_size, **kwargs,
    )  # fmt: skip


def _plain_attention(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs):
    """SDPA, for sliding layers and other caches; with softcap or learned sinks, which SDPA drops, in plain torch."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = _as_4d(attention_mask, query, key)
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~_causal(query, key) if mask is None else ~mask, torch.finfo(torch.float32).min)
    if s_aux is not None:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], dim=3)
    weights = torch.softmax(logits, dim=3)[..., : key.shape[2]].to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), None


def _as_4d(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask SDPA understands; full-attention layers of other caches get the 2D one, which has to become causal."""
    queries, tokens = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim == 2:
        return mask[:, None, None, -tokens:].bool() & _causal(query, key)
    if mask is None and 1 < queries < tokens:
        return _causal(query, key)[None, None]
    return mask


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    queries, tokens = query.shape[2], key.shape[2]
    return torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)
