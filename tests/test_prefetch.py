"""Fetching ahead changes time, never tokens."""

import warnings

import pytest
import torch

from tests.tiny import DEVICE, make_model
from tiered_kv import TieredCache, TieredKVConfig, dispatch_kv_cache, kv_cache_dispatched, remove_kv_dispatch
from tiered_kv.kernels.count import AHEAD_COUNTERS, count_ahead, count_ahead_reference, new_counters
from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.lookup import SlotTables, assign_slots
from tiered_kv.kernels.select import Selection

OPTIONS = dict(
    token_budget=64, num_sink_tokens=4, window_size=8, decode_segment=24, prefill_segment=64, prefill_chunk=64,
    tokens_per_cluster=4, max_cluster_tokens=16, block_size=4, gpu_cache_size=3.0,
)  # fmt: skip


def generate(model, new_tokens=40):
    ids = torch.randint(3, 90, (2, 300), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
def test_tokens_are_the_same_and_guesses_are_used(family):
    model = make_model(family)
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS)):
        expected = generate(model)
        without = model.kv_cache_stats()
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, prefetch="next_layer")), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fetches nothing ahead")
        tokens = generate(model)
        stats = model.kv_cache_stats()
    assert torch.equal(tokens, expected)
    assert without["guesses"] == 0
    assert stats["guesses"] > 0
    assert 0 < stats["used_prefetched_tokens"] <= stats["prefetched_tokens"] <= stats["guessed_tokens"]
    assert stats["recalled_tokens"] < without["recalled_tokens"], "what was fetched ahead is not missed at the layer"


def test_a_model_built_otherwise_is_left_alone_with_a_word():
    model = make_model("phi3")  # one projection for queries, keys and values
    with pytest.warns(UserWarning, match="fetches nothing ahead: its layers are built"):
        dispatch_kv_cache(model, TieredKVConfig(**OPTIONS, prefetch="next_layer"))
    generate(model, 5)
    assert model.kv_cache_stats()["guesses"] == 0
    remove_kv_dispatch(model)


def test_a_query_computed_otherwise_is_noticed():
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    projection = attention.q_proj.forward
    attention.q_norm = torch.nn.Identity()
    attention.q_proj.forward = lambda x: projection(x)
    attention.q_norm.forward = lambda x: -x  # what the attention module itself does not apply
    dispatch_kv_cache(model, TieredKVConfig(**OPTIONS, prefetch="next_layer"))
    with pytest.warns(UserWarning, match="computes its queries in a way"):
        generate(model, 5)
    assert model.kv_cache_stats()["guesses"] == 0


def test_a_first_step_that_raised_leaves_nothing_to_verify(monkeypatch):
    model, ids = make_model("llama"), torch.randint(3, 90, (1, 200), device=DEVICE)
    with torch.no_grad(), kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, prefetch="next_layer")):
        cache = TieredCache(model.config, TieredKVConfig(**OPTIONS))
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", lambda hidden: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, :1], past_key_values=cache)
        model(ids, past_key_values=TieredCache(model.config, TieredKVConfig(**OPTIONS)))
        generate(model, 5)
        assert model.kv_cache_stats()["guesses"] > 0


def test_a_layer_on_another_device_is_not_fetched_for():
    """Its weights are there, and the hidden state is still here."""
    model, ids = make_model("llama"), torch.randint(3, 90, (1, 200), device=DEVICE)
    config = TieredKVConfig(**OPTIONS, prefetch="next_layer", cuda_graph=False)
    with torch.no_grad(), kv_cache_dispatched(model, config):
        cache = TieredCache(model.config, config)
        for tokens in (ids, ids[:, :1], ids[:, :1]):
            model(tokens, past_key_values=cache)
        first, second = cache.group.layers[1:]
        before = [int(layer.ahead_counters[0]) for layer in (first, second)]
        first.device = torch.device("meta")
        model(ids[:, :1], past_key_values=cache)
        assert int(first.ahead_counters[0]) == before[0]
        assert int(second.ahead_counters[0]) == before[1] + first.rows


def test_dispatching_leaves_no_hook_behind():
    model = dispatch_kv_cache(make_model("llama"), TieredKVConfig(**OPTIONS, prefetch="next_layer"))
    assert any(layer._forward_pre_hooks for layer in model.model.layers)
    remove_kv_dispatch(model)
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.layers)


def test_what_was_fetched_ahead_counts_as_used_when_the_step_selects_it():
    rows, slots = 2, 6
    tables = SlotTables(
        *(torch.full((rows, n), -1, dtype=torch.int32, device=DEVICE) for n in (20, slots)),
        *(torch.zeros(rows, slots, dtype=torch.int32, device=DEVICE) for _ in "ab"),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )
    guess = torch.tensor([[3, 4, 5, -1], [7, 8, -1, -1]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([[4, 1, 2, 0], [3, 4, 0, 0]], dtype=torch.int32, device=DEVICE)
    assign_slots(tables, torch.tensor([[5, -1, -1, -1], [-1] * 4], dtype=torch.int32, device=DEVICE), policy="lru")
    guessed_slots, missed = assign_slots(tables, guess, policy="lru")
    assign_slots(tables, torch.tensor([[3, 9, 5, -1], [8, 1, 2, -1]], dtype=torch.int32, device=DEVICE), policy="lru")
    selection = Selection(guess, guess, guess, lengths)
    for backend, count in (("torch", count_ahead_reference), ("torch", count_ahead), ("triton", count_ahead)):
        counters = new_counters(DEVICE, AHEAD_COUNTERS)
        with force_backend(backend):
            count(counters, selection, guessed_slots, missed, tables)
        assert counters.tolist() == [2, 14, 12, 8]  # fetched 3, 4, 7, 8; used 3 and 8


def test_the_first_decode_step_is_enough_to_know_the_model():
    model = make_model("llama")
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, prefetch="next_layer")):
        generate(model, 3)  # the prompt's token, one step that verifies, one that may come from a graph
        assert model.kv_cache_stats()["guesses"] > 0
