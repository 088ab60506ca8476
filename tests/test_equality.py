"""With budget to spare, tokens are those of the stock model, on every path."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import (
    FAMILIES,
    SHARING,
    assert_same,
    generate,
    make_model,
    ones,
    padded_prompt,
    prompt,
    small_config,
    stock_generate,
)
from tiered_kv import TieredCache, dispatch_kv_cache

NEW_TOKENS = 40
SEED = 1
PATHS = {"dense": {}, "sparse": {"dense_context": 0}}
PIECES = {"one-piece": {"prefill_chunk": 1024}, "chunks": {}}
# Of a 150-token prompt: no padding, a chunk cut by padding, three whole chunks of padding and more, a row shorter than
# sinks and window, and a row of one token.
PADDING = [0, 41, 117, 143, 149]


def prompts(kind: str) -> dict[str, torch.Tensor]:
    return ones(prompt(150, seed=SEED)) if kind == "single" else padded_prompt(150, PADDING, seed=SEED)


@pytest.mark.parametrize("kind", ["single", "left-padded"])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_equal_stock(family, path, pieces, kind):
    inputs = prompts(kind)
    model = dispatch_kv_cache(make_model(family), small_config(**PATHS[path], **PIECES[pieces]))
    cache = TieredCache(model.config, model._tiered_kv.config)
    chunks = count_prefill_forwards(model)
    actual = generate(model, inputs, NEW_TOKENS, past_key_values=cache)
    assert_same(actual, stock_generate(family, inputs, NEW_TOKENS))
    assert chunks == ([44, 32, 32, 32, 10] if pieces == "chunks" else [150])
    segments = [s.length for s in cache.group.layers[0].segments]
    assert segments == (
        [] if path == "dense" else [36, 32, 32, 32, 16, 16, 16]
    )  # four of the prompt, three of decoding
    assert (cache.stats()["selected_tokens"] > 0) == (path == "sparse")


@pytest.mark.parametrize("kind", ["single", "left-padded"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", SHARING)
def test_layers_that_share_keys_and_values(family, path, kind):
    inputs = prompts(kind)
    model = dispatch_kv_cache(make_model(family), small_config(**PATHS[path]))
    new_tokens = 32  # Gemma 4's 40th is so sensitive that the stock model's SDPA is 1e-4 off its eager attention
    assert_same(generate(model, inputs, new_tokens), stock_generate(family, inputs, new_tokens))
    assert model.kv_cache_stats()["tiered_layers"] == 2


def count_prefill_forwards(model) -> list[int]:
    """Lengths of the multi-token forwards of the model's decoder from now on."""
    lengths: list[int] = []

    def note(module, args, kwargs):
        ids = kwargs.get("input_ids")
        if ids is not None and ids.shape[1] > 1:
            lengths.append(ids.shape[1])

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return lengths
