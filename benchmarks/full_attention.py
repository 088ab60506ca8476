"""The strongest peer: all keys and values on the GPU, one query attending to all of them by the fastest SDPA there is.

SDPA's flash kernel splits the keys of a single query over the GPU by itself; how well depends on the shape. So several
ways to call it compete on the very shape, and the fastest serves the benchmark:

=============  ================================================================================================
``gqa``        flash with ``enable_gqa``, as transformers calls it without a mask
``folded``     the query heads of a KV head as so many queries, flash without groups
``split n``    the keys cut into n pieces that flash takes for heads, merged by log-sum-exp (FlashDecoding)
``cudnn``      cuDNN's kernel with ``enable_gqa``; ``cudnn folded`` as above
``default``    whatever SDPA picks
=============  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from benchmarks.rows import captured, time_steps
from tiered_kv.kernels.flash import attend_piece

NAME = "bench_full_kv"
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
SPLITS = (4, 8, 16, 32)


def gqa(query, key, value, scale: float, backend: SDPBackend | None = None) -> torch.Tensor:
    """``[batch, query_heads, 1, dim]`` against ``[batch, kv_heads, tokens, dim]``."""
    if backend is None:
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)


def folded(query, key, value, scale: float, backend: SDPBackend = SDPBackend.FLASH_ATTENTION) -> torch.Tensor:
    """The group as the query's length."""
    batch, heads, _, dim = query.shape
    q = query.reshape(batch, key.shape[1], -1, dim)
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, key, value, scale=scale).reshape(batch, heads, 1, dim)


def split(query, key, value, scale: float, pieces: int) -> torch.Tensor:
    """FlashDecoding by hand: pieces of the keys as heads, then their outputs weighed by exp(lse)."""
    batch, kv_heads, tokens, dim = key.shape
    q = query.reshape(batch, kv_heads, 1, -1, dim).expand(-1, -1, pieces, -1, -1).flatten(1, 2)
    k, v = (x.view(batch, kv_heads * pieces, tokens // pieces, dim) for x in (key, value))
    out, lse = attend_piece(q, k, v, causal=False, scale=scale)
    weight = lse.reshape(batch, kv_heads, pieces, -1, 1).softmax(2)
    return (out.reshape(batch, kv_heads, pieces, -1, dim) * weight).sum(2).to(query.dtype).reshape(query.shape)


def candidates(tokens: int, device: torch.device) -> dict[str, Attention]:
    """Every way that may serve keys of that length, by name."""
    if device.type != "cuda":
        return {"default": gqa}
    splits = {f"split {n}": partial(split, pieces=n) for n in SPLITS if tokens % n == 0 and tokens >= 256 * n}
    return {
        "default": gqa,
        "gqa": partial(gqa, backend=SDPBackend.FLASH_ATTENTION),
        "folded": folded,
        "cudnn": partial(gqa, backend=SDPBackend.CUDNN_ATTENTION),
        "cudnn folded": partial(folded, backend=SDPBackend.CUDNN_ATTENTION),
        **splits,
    }


@torch.no_grad()
def fastest(
    config: Any, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[str, Attention, dict[str, float]]:
    """The fastest candidate on this shape, and the µs of one layer's attention for each that runs at all."""
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query = torch.randn(batch, heads, 1, dim, dtype=dtype, device=device)
    key, value = torch.randn(2, batch, kv_heads, tokens, dim, dtype=dtype, device=device)
    choices, times, last_error = candidates(tokens, device), {}, RuntimeError("no candidate")
    for name, attend in choices.items():
        try:
            call = captured(partial(_ten_times, attend, query, key, value, dim**-0.5))
            times[name] = round(time_steps(call, steps=10, measurements=3).ms * 100, 1)
        except RuntimeError as error:  # the backend does not take this shape
            last_error = error
    if not times:
        raise last_error
    best = min(times, key=lambda name: times[name])
    return best, choices[best], times


def _ten_times(attend: Attention, *inputs: Any) -> None:
    for _ in range(10):
        attend(*inputs)


class FullKVLayer(CacheLayerMixin):
    """Preallocated keys and values of a context whose last place takes the newest token, again and again.

    That keeps the length fixed and the mask away: the fastest a graph can be, if of no use beyond one token.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: it is born full."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


@torch.no_grad()
def full_cache(config: Any, batch: int, context: int, device: torch.device, dtype: torch.dtype) -> Cache:
    """``context`` tokens, the newest included, in buffers of random keys and values."""
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    pairs = (torch.empty(2, *shape, dtype=dtype, device=device).normal_() for _ in range(config.num_hidden_layers))
    return Cache(layers=[FullKVLayer(keys, values) for keys, values in pairs])


def register(attend: Attention) -> None:
    """Let ``attn_implementation=NAME`` attend that way; there is no mask function of that name, so no mask is made."""

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return attend(query, key, value, scaling).transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attention)
