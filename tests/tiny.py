"""Models small enough to compare token by token, and options small enough that every mechanism runs on short prompts.

The models are random: they attend broadly, so that a token left out anywhere shows in the logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tiered_kv import TieredKVConfig

torch.set_num_threads(1)  # operations of a few microseconds: threads only wait for each other

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LOGITS_TOLERANCE = 1e-4
"""Float32, logits of the order of 1 to 10: pieces merged by log-sum-exp differ from one softmax by a few 1e-6 a layer,
which norms and the head amplify; a single token of 150 left out changes logits by 1e-2 and more."""

VOCABULARY = 97
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=64,
    max_position_embeddings=2048,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    # groups of 3, head_dim twice hidden / heads
    "llama": dict(num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    # groups of 4 over a single KV head, an odd multiple of 8, norms of queries and keys
    "qwen3": dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=24),
    # no groups; head_dim 12 is not one that flash kernels take
    "mistral": dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=12, sliding_window=None
    ),
    # fused projections, rotary embedding of a part of the head
    "phi3": dict(
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gemma2": dict(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=_HYBRID,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
    ),
    "gemma3_text": dict(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=16,
        layer_types=_HYBRID,
    ),
    "gpt_oss": dict(
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_experts_per_tok=1,
        sliding_window=16,
        layer_types=_HYBRID,
    ),
}

SHARING: dict[str, dict[str, Any]] = {
    "gemma3n_text": dict(
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=[64] * 6,
        activation_sparsity_pattern=[0.0] * 6,
        num_kv_shared_layers=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    # full-attention layers have larger heads than sliding ones
    "gemma4_text": dict(
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 3,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
}
"""Families whose last layers attend to an earlier layer's keys and values."""


def make_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A random model of the family in float32 on the test device; the same one every time."""
    torch.manual_seed(1234)
    config = AutoConfig.for_model(family, **(_COMMON | (FAMILIES | SHARING)[family] | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(DEVICE)
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            parameter.data.normal_()  # they start uninitialised
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def small_config(**options: Any) -> TieredKVConfig:
    """Everything small; a budget that covers every test's context unless told otherwise."""
    small: dict[str, Any] = dict(
        token_budget=256,
        num_sink_tokens=4,
        window_size=8,
        decode_segment=16,
        prefill_segment=32,
        prefill_chunk=32,
        tokens_per_cluster=4,
        max_cluster_tokens=8,
        block_size=4,
    )
    return TieredKVConfig(**(small | options))


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids ``[batch, tokens]``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=generator).to(DEVICE)


def padded_prompt(tokens: int, padding: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids and mask of a batch whose row i begins with ``padding[i]`` padding tokens."""
    ids = prompt(tokens, len(padding), seed)
    mask = torch.arange(tokens, device=DEVICE) >= torch.tensor(padding, device=DEVICE)[:, None]
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], new_tokens: int = 24, **options: Any):
    """Greedy ``generate()``: the new tokens ``[batch, new_tokens]`` and their logits ``[..., vocabulary]``."""
    known = inputs["input_ids"].shape[1]
    options = {"do_sample": False, "max_new_tokens": new_tokens} | options
    out = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return out.sequences[:, known:], torch.stack(out.logits, dim=1)


@functools.cache
def _stock(family: str, key: tuple, new_tokens: int):
    ids, mask = (torch.tensor(rows, device=DEVICE) for rows in key)
    return generate(make_model(family), {"input_ids": ids, "attention_mask": mask}, new_tokens)


def stock_generate(family: str, inputs: dict[str, torch.Tensor], new_tokens: int = 24):
    """What the stock model with eager attention and its own cold cache generates."""
    key = tuple(tuple(map(tuple, inputs[name].tolist())) for name in ("input_ids", "attention_mask"))
    return _stock(family, key, new_tokens)


def assert_same(actual, expected) -> None:
    """The same tokens and, within ``LOGITS_TOLERANCE``, the same logits."""
    (tokens, logits), (expected_tokens, expected_logits) = actual, expected
    best = expected_logits.topk(2, dim=-1).values
    margin = (best[..., 0] - best[..., 1]).min().item()
    assert margin > 2 * LOGITS_TOLERANCE, (
        f"two tokens are tied ({margin:.1e}): this prompt proves nothing, take another"
    )
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logits, expected_logits, atol=LOGITS_TOLERANCE, rtol=0)


def ones(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
