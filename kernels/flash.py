"""Exact attention of many queries over one piece of the context, with its log-sum-exp, and the merging of pieces.

Softmax over a union of disjoint pieces:  out = Σ_p exp(lse_p - lse)·out_p,  lse = log Σ_p exp(lse_p)
(FlashAttention, arXiv 2205.14135; the order of tokens does not matter, so cluster-ordered pieces serve as they are).
PyTorch's own flash kernels do the work; logits with a softcap, which they do not know, take the blockwise form below.
"""

from __future__ import annotations

import torch

from tiered_kv.kernels.dispatch import tl, triton, use_triton

QUERY_BLOCK = 512
LEAST_CUDNN_TOKENS = 512
"""cuDNN makes a plan for every new shape; shorter pieces are not worth one."""
MERGE_TILE = 4096
"""Numbers a program merges; untuned."""


def attend_piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one piece.

    Args:
        query: ``[batch, query_heads, queries, head_dim]``.
        key: ``[batch, kv_heads, tokens, head_dim]``; ``kv_heads`` divides ``query_heads``.
        value: ``[batch, kv_heads, tokens, value_dim]``.
        causal: Query i sees tokens up to i (then ``queries`` equals ``tokens``); otherwise it sees all.

    Returns:
        ``out`` ``[batch, query_heads, queries, value_dim]`` in the query's dtype and ``lse``
        ``[batch, query_heads, queries]`` float32.
    """
    if softcap is None and key.shape[-1] == value.shape[-1] and key.shape[-1] % 8 == 0 and key.shape[-1] <= 256:
        if query.is_cuda and query.dtype != torch.float32:
            flash = _cudnn if _suits_cudnn(query, key) else _flash_cuda
            return flash(query, key, value, causal, scale)
        if query.is_cuda:
            return _efficient_cuda(query, key, value, causal, scale)
        if query.device.type == "cpu":
            return _flash_cpu(query, key, value, causal, scale)
    return attend_piece_reference(query, key, value, causal=causal, scale=scale, softcap=softcap)


def merge_pieces(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two disjoint pieces, in float32, from the attention over each.

    Args:
        out, other_out: ``[batch, heads, queries, value_dim]``; ``out`` is overwritten when it is float32.
        lse, other_lse: ``[batch, heads, queries]`` float32; ``lse`` is overwritten likewise.
    """
    if not use_triton(out):
        return merge_pieces_reference(out, lse, other_out, other_lse)
    merged = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
    lse, other_lse = lse.contiguous(), other_lse.contiguous()
    batch, heads, queries, dim = out.shape
    dim_padded = triton.next_power_of_2(dim)
    tile = max(1, MERGE_TILE // dim_padded)
    merge_kernel[(triton.cdiv(queries, tile), heads, batch)](
        merged, out, lse, other_out, other_lse, heads, queries,
        *merged.stride()[:3], *out.stride()[:3], *other_out.stride()[:3],
        DIM=dim, DIM_PADDED=dim_padded, TILE=tile, num_warps=4,
    )  # fmt: skip
    return merged, lse


@triton.jit
def merge_kernel(
    merged_ptr, out_ptr, lse_ptr, other_ptr, other_lse_ptr, heads, queries,
    merged_batch, merged_head, merged_query, out_batch, out_head, out_query, other_batch, other_head, other_query,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head."""
    query = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    dim = tl.arange(0, DIM_PADDED)
    in_range = query < queries
    mask = in_range[:, None] & (dim < DIM)[None, :]
    at = (batch * heads + head) * queries + query
    lse = tl.load(lse_ptr + at, mask=in_range, other=0.0)
    other_lse = tl.load(other_lse_ptr + at, mask=in_range, other=0.0)
    largest = tl.maximum(lse, other_lse)
    total = largest + tl.log(tl.exp(lse - largest) + tl.exp(other_lse - largest))
    weight, other_weight = tl.exp(lse - total), tl.exp(other_lse - total)
    out_at = out_ptr + batch * out_batch + head * out_head + query.to(tl.int64)[:, None] * out_query + dim[None, :]
    other_at = other_ptr + batch * other_batch + head * other_head
    other_at += query.to(tl.int64)[:, None] * other_query + dim[None, :]
    merged_at = merged_ptr + batch * merged_batch + head * merged_head
    merged_at += query.to(tl.int64)[:, None] * merged_query + dim[None, :]
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
    out += tl.load(other_at, mask=mask, other=0.0).to(tl.float32) * other_weight[:, None]
    tl.store(merged_at, out, mask=mask)
    tl.store(lse_ptr + at, total, mask=in_range)


def merge_pieces_reference(out, lse, other_out, other_lse) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch."""
    merged = torch.logaddexp(lse, other_lse)
    weight = torch.exp(lse - merged)[..., None]
    return torch.lerp(other_out.float(), out.float(), weight), merged


def _suits_cudnn(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether cuDNN's kernel is the faster one, as it is from Hopper on.

    32 heads, 8192 × 8192 tokens, head_dim 128, bf16, H200, torch 2.11: 0.90 ms against 1.71 ms of FlashAttention 2
    with causality, 1.64 against 3.07 ms without.
    """
    if min(query.shape[2], key.shape[2]) < LEAST_CUDNN_TOKENS or query.shape[3] > 128:
        return False
    is_new = torch.cuda.get_device_capability(query.device) >= (9, 0)
    return is_new and torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()


def _cudnn(query, key, value, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse[..., 0]


def _flash_cuda(query, key, value, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _efficient_cuda(query, key, value, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def _flash_cpu(query, key, value, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse.float()


def _repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1) if heads != x.shape[1] else x


def attend_piece_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch and float32, in blocks of queries so that no queries × tokens matrix is held."""
    key, value = _repeat_heads(key, query.shape[1]).float(), _repeat_heads(value, query.shape[1]).float()
    outs, lses = [], []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = query[:, :, start : start + QUERY_BLOCK].float()
        end = start + block.shape[2] if causal else key.shape[2]
        out, lse = _attend_block(block, key[:, :, :end], value[:, :, :end], start if causal else None, scale, softcap)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2).to(query.dtype), torch.cat(lses, dim=2)


def _attend_block(query, key, value, start: int | None, scale: float, softcap: float | None):
    logits = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if start is not None:
        place = torch.arange(key.shape[2], device=key.device)
        logits.masked_fill_(place > (start + torch.arange(query.shape[2], device=key.device))[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=3)
    return torch.matmul(torch.exp(logits - lse[..., None]), value), lse
