"""Memory plans: what is planned is what is taken, and a refusal names what would fit."""

import re

import pytest
import torch
from transformers import LlamaConfig

from tests.tiny import DEVICE, make_model
from tiered_kv import TieredCache, TieredKVConfig, TieredKVMemoryError, infer_auto_kv_config, kv_cache_dispatched
from tiered_kv.layer import TieredLayer
from tiered_kv.offload.plan import GIB, plan_memory
from tiered_kv.planning import check_memory, kv_shape, parse_bytes, tier_options

LLAMA_8B = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336
)
SMALL = TieredKVConfig(
    token_budget=64,
    decode_segment=32,
    prefill_segment=128,
    prefill_chunk=128,
    tokens_per_cluster=8,
    max_cluster_tokens=32,
)


def test_an_8b_model_keeps_128_kib_a_token():
    assert kv_shape(LLAMA_8B, torch.bfloat16).token_bytes == 128 * 1024


def test_the_plan_covers_what_a_run_takes_and_not_much_more():
    model = make_model("llama")
    ids = torch.randint(3, 90, (2, 1500), device=DEVICE)
    with kv_cache_dispatched(model, SMALL):
        cache = TieredCache(model.config, SMALL)
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=5)
    stats = cache.stats()
    plan = plan_memory(kv_shape(model.config, torch.float32), tier_options(SMALL), stats["context_length"], 2)
    assert stats["kv_full_bytes"] == plan.full
    assert 0.5 * plan.gpu < stats["kv_gpu_bytes"] <= plan.gpu
    assert 0.7 * plan.host < stats["kv_host_bytes"] <= plan.host


@pytest.mark.parametrize("tokens", [100, 207, 209, 340, 900])
def test_the_plan_covers_the_worst_moment(tokens, monkeypatch):
    """That is when a prompt has ended just before a segment would be full: all of it waits in every layer's window."""
    model = make_model("llama", num_hidden_layers=8)
    ids = torch.randint(3, 90, (2, tokens), device=DEVICE)
    seen = []
    attend = TieredLayer.attend_chunk

    def attend_and_see(self, *args, **kwargs):
        out = attend(self, *args, **kwargs)
        seen.append(cache.stats())
        return out

    monkeypatch.setattr(TieredLayer, "attend_chunk", attend_and_see)
    with kv_cache_dispatched(model, SMALL):
        cache = TieredCache(model.config, SMALL)
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=2)
        seen.append(cache.stats())
    plan = plan_memory(kv_shape(model.config, torch.float32), tier_options(SMALL), tokens, 2)
    assert max(stats["window_bytes"] for stats in seen) <= plan.window + plan.prefill
    assert max(stats["kv_gpu_bytes"] for stats in seen) <= plan.gpu
    assert seen[-1]["kv_host_bytes"] <= plan.host


def test_a_refusal_names_a_context_that_fits():
    shape, config = kv_shape(LLAMA_8B, torch.bfloat16), TieredKVConfig(host_memory_limit=4 * GIB)
    with pytest.raises(TieredKVMemoryError, match=r"1 x 131072 tokens need .* GiB of host memory") as error:
        check_memory(shape, config, DEVICE, 131072, 1)
    fitting = int(re.search(r"1 x (\d+) tokens would fit", str(error.value))[1])
    assert 8192 < fitting < 40000
    check_memory(shape, config, DEVICE, fitting, 1)


def test_generate_refuses_before_it_computes_and_leaves_the_cache_empty():
    model, config = make_model("llama"), TieredKVConfig(token_budget=64, host_memory_limit=1000)
    ids = torch.randint(3, 90, (1, 400), device=DEVICE)
    with kv_cache_dispatched(model, config):
        cache = TieredCache(model.config, config)
        with pytest.raises(TieredKVMemoryError):
            model.generate(ids, past_key_values=cache, max_new_tokens=5)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("options", [dict(max_new_tokens=20000), dict(max_length=20100)], ids=str)
def test_the_answer_is_planned_for_however_its_length_is_given(options):
    model, config = make_model("llama"), TieredKVConfig(token_budget=64, host_memory_limit=10_000_000)
    ids = torch.randint(3, 90, (1, 100), device=DEVICE)
    with kv_cache_dispatched(model, config), pytest.raises(TieredKVMemoryError, match="1 x 20100 tokens"):
        model.generate(ids, **options)


def test_inferred_options_leave_room_for_the_context():
    left, config = infer_auto_kv_config(LLAMA_8B, max_context_length=131072, max_memory={0: "24GiB", "cpu": "64GiB"})
    plan = plan_memory(kv_shape(LLAMA_8B, torch.bfloat16), tier_options(config), 131072, 1)
    assert config == TieredKVConfig()
    assert left[0] <= 24 * GIB - plan.gpu
    assert left["cpu"] == 64 * GIB - plan.host


def test_options_shrink_before_they_are_refused():
    _, config = infer_auto_kv_config(LLAMA_8B, max_context_length=131072, max_memory={0: "3GiB", "cpu": "64GiB"})
    assert config.gpu_cache_size == 1.0
    with pytest.raises(TieredKVMemoryError, match="more than max_memory has"):
        infer_auto_kv_config(LLAMA_8B, max_context_length=131072, max_memory={0: "3GiB", "cpu": "8GiB"})


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("500 MB", 500_000_000), (7, 7), ("1.5k", 1500), ("12", 12)]
)
def test_sizes_are_read_as_accelerate_reads_them(text, size):
    assert parse_bytes(text) == size


def test_a_size_that_is_none_is_refused():
    with pytest.raises(ValueError, match="expected a size"):
        parse_bytes("lots")
