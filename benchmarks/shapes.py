"""Models of a known size with random weights: speed depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B: 128 KiB of keys and values a token in bf16
    "8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    ),
    # Llama-3.2-1B: 32 KiB a token
    "1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
    ),
    # seconds on a CPU
    "tiny": dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=256,
    ),
}  # fmt: skip


def model_config(shape: str) -> LlamaConfig:
    """A Llama configuration that minds neither the length of a context nor any token."""
    return LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=1 << 21,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.02,
    )


@torch.no_grad()
def make_model(shape: str, device: torch.device, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model with random weights, made where it will run: bf16 on the GPU, float32 on the CPU."""
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(shape), dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
