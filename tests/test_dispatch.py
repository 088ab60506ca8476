"""Dispatching leaves no trace: the model is as it was found, also when something raised on the way."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import weakref

import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.tiny import DEVICE, make_model, padded_prompt, prompt, small_config
from tiered_kv import (
    TieredCache,
    TieredKVConfig,
    TieredKVError,
    attention,
    dispatch_kv_cache,
    kv_cache_dispatched,
    kv_cache_stats,
    remove_kv_dispatch,
)
from tiered_kv.layer import TieredLayer
from tiered_kv.offload.pinned import HostArena

IDS = prompt(90, seed=1)
SPARSE = small_config(dense_context=0)


def traces(model) -> dict:
    """All that dispatching may touch."""
    hooks = {
        (name, kind): dict(getattr(module, kind))
        for name, module in model.named_modules()
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    }
    return {
        "attributes": {name: id(value) for name, value in model.__dict__.items() if not name.startswith("_")},
        "private": sorted(name for name in model.__dict__ if name.startswith("_")),
        "modules": {name: sorted(module.__dict__) for name, module in model.named_modules()},
        "attention": [config._attn_implementation for config in configs(model)],
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "hooks": hooks,
        "forward": model.forward,
        "generate": model.generate,
        "parameters": [p.data_ptr() for p in model.parameters()],
    }


def configs(model) -> list:
    own = [module.config for module in model.modules() if hasattr(module, "config")]
    return [config for i, config in enumerate(own) if not any(config is other for other in own[:i])]


def break_down(model, monkeypatch, call: int = 1) -> None:
    """Let attention through the cache raise, in the decode step of that number."""
    attend, calls = TieredLayer.attend_token, iter(range(10**6))

    def attend_or_raise(self, *args, **kwargs):
        if next(calls) >= call * model.config.num_hidden_layers + 1:
            raise ZeroDivisionError("an accident")
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(TieredLayer, "attend_token", attend_or_raise)


@pytest.mark.parametrize("found", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_the_model_is_as_it_was_found(family, found):
    model = make_model(family)
    if family != "gpt_oss":  # it has no SDPA
        model.set_attn_implementation(found)
    before = traces(model)
    assert dispatch_kv_cache(model, SPARSE) is model
    assert traces(model) != before
    model.generate(IDS, max_new_tokens=4)
    assert remove_kv_dispatch(model) is model
    assert traces(model) == before
    assert remove_kv_dispatch(model) is model
    assert traces(model) == before


@pytest.mark.parametrize("way", ["remove", "with"])
def test_the_model_is_as_it_was_found_after_an_accident(way, monkeypatch):
    model = make_model()
    before, expected = traces(model), model.generate(IDS, max_new_tokens=4).tolist()
    with monkeypatch.context() as patch:
        break_down(model, patch)
        if way == "with":
            with pytest.raises(ZeroDivisionError), kv_cache_dispatched(model, SPARSE):
                model.generate(IDS, max_new_tokens=4)
        else:
            dispatch_kv_cache(model, SPARSE)
            with pytest.raises(ZeroDivisionError):
                model.generate(IDS, max_new_tokens=4)
            remove_kv_dispatch(model)
    assert traces(model) == before
    assert model.generate(IDS, max_new_tokens=4).tolist() == expected


def test_an_accident_does_not_spoil_the_next_call(monkeypatch):
    model = dispatch_kv_cache(make_model(), SPARSE)
    expected = make_model().generate(IDS, max_new_tokens=4).tolist()
    with monkeypatch.context() as patch:
        break_down(model, patch)
        with pytest.raises(ZeroDivisionError):
            model.generate(IDS, max_new_tokens=4)
    assert model.generate(IDS, max_new_tokens=4).tolist() == expected
    assert model.generate(IDS, max_new_tokens=4, use_cache=False).tolist() == expected


def test_an_accident_between_cache_and_attention_of_a_direct_call():
    """The tag that was not taken must not make the next, innocent call look like one that rebuilds its keys."""
    model = dispatch_kv_cache(make_model(), SPARSE)
    cache = TieredCache(model.config, SPARSE)
    try:
        AttentionInterface.register(attention.NAME, lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(IDS, past_key_values=cache)
    finally:
        attention.register()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, make_model()(IDS).logits, atol=1e-4, rtol=0)


def test_dispatching_anew_takes_the_new_options():
    model = make_model()
    before = traces(model)
    dispatch_kv_cache(model, token_budget=512)
    dispatch_kv_cache(model, token_budget=64, dense_context=0)
    assert model._tiered_kv.config == TieredKVConfig(token_budget=64, dense_context=0)
    remove_kv_dispatch(model)
    assert traces(model) == before


def test_a_with_block_inside_another():
    model = make_model()
    before = traces(model)
    with kv_cache_dispatched(model, token_budget=512):
        with kv_cache_dispatched(model, token_budget=64):
            assert model._tiered_kv.config.token_budget == 64
        assert model._tiered_kv.config.token_budget == 512
    assert traces(model) == before


def test_what_was_set_on_the_instance_before_is_kept():
    """Someone else's wrappers, as PEFT or accelerate put them there."""
    model = make_model()
    stock_generate, stock_forward, calls = model.generate, model.forward, []
    model.generate = lambda *args, **kwargs: calls.append("generate") or stock_generate(*args, **kwargs)
    model.forward = lambda *args, **kwargs: calls.append("forward") or stock_forward(*args, **kwargs)
    before = traces(model)
    dispatch_kv_cache(model, SPARSE)
    assert model.generate(IDS, max_new_tokens=2).tolist() == stock_generate(IDS, max_new_tokens=2).tolist()
    assert {"generate", "forward"} == set(calls)
    remove_kv_dispatch(model)
    assert traces(model) == before


def test_config_and_options_together_are_refused():
    with pytest.raises(ValueError, match="either config or options"):
        dispatch_kv_cache(make_model(), SPARSE, token_budget=7)


def test_a_copy_of_a_dispatched_model_works_on_its_own():
    model = dispatch_kv_cache(make_model(), SPARSE)
    expected = model.generate(IDS, max_new_tokens=8).tolist()
    twin = copy.deepcopy(model)
    for weight in model.parameters():
        weight.data.zero_()
    assert twin.generate(IDS, max_new_tokens=8).tolist() == expected
    assert twin.kv_cache_stats()["context_length"] == 97
    remove_kv_dispatch(model)
    assert twin.generate(IDS, max_new_tokens=8).tolist() == expected
    remove_kv_dispatch(twin)
    assert traces(twin)["private"] == traces(make_model())["private"]
    assert twin.generate(IDS, max_new_tokens=8).tolist() == expected


def test_saving_a_dispatched_model_saves_the_model(tmp_path):
    model = dispatch_kv_cache(make_model(), SPARSE)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert loaded.config._attn_implementation == "sdpa"
    assert loaded.generate(IDS, max_new_tokens=4).tolist() == model.generate(IDS, max_new_tokens=4).tolist()


# Nothing is left


@pytest.fixture
def arenas(monkeypatch) -> list:
    """Weak references to all host memory reserved from here on."""
    made: list = []
    reserve = HostArena.__init__

    def note(self, *args, **kwargs):
        reserve(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(HostArena, "__init__", note)
    return made


@pytest.mark.parametrize("accident", [False, True])
def test_memory_goes_when_generate_ends(accident, arenas, monkeypatch):
    """At once, not when Python next collects garbage: a cache is no part of a cycle."""
    model = dispatch_kv_cache(make_model(), SPARSE)
    gc.collect()
    gc.disable()
    try:
        if accident:
            break_down(model, monkeypatch)
            with pytest.raises(ZeroDivisionError) as caught:
                model.generate(IDS, max_new_tokens=4)
            del caught
        else:
            model.generate(IDS, max_new_tokens=4)
        assert len(arenas) == 2 * model.config.num_hidden_layers
        assert [arena for arena in arenas if arena() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("way", ["close", "reset", "drop"])
def test_memory_of_a_cache_goes_with_it(way, arenas):
    model = dispatch_kv_cache(make_model(), SPARSE)
    cache = TieredCache(model.config, SPARSE)
    model.generate(IDS, max_new_tokens=4, past_key_values=cache)
    assert all(arena() is not None for arena in arenas)
    if way == "drop":
        del cache
    else:
        getattr(cache, way)()
    assert all(arena() is None for arena in arenas)


def test_memory_stays_while_a_copy_needs_it(arenas):
    model = dispatch_kv_cache(make_model(), SPARSE)
    cache = TieredCache(model.config, SPARSE)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    fork = copy.deepcopy(cache)
    cache.close()
    whole = torch.cat([IDS, prompt(9)], dim=1)
    assert model.generate(whole, max_new_tokens=4, past_key_values=fork).tolist() == (
        make_model().generate(whole, max_new_tokens=4).tolist()
    )
    fork.close()
    assert all(arena() is None for arena in arenas)


def test_no_file_is_left_open():
    model = make_model()
    with kv_cache_dispatched(model, SPARSE):
        model.generate(IDS, max_new_tokens=4)  # whatever is opened once is open now
    files = open_files()
    with kv_cache_dispatched(model, SPARSE):
        model.generate(IDS, max_new_tokens=4)
    assert open_files() == files


def open_files() -> list[str]:
    """What is open but the driver's own files, of which CUDA opens and closes some as it takes memory."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(link for link in links if not link.startswith("/dev/nvidia"))


def test_importing_and_making_a_config_registers_nothing():
    import subprocess
    import sys

    code = (
        "import tiered_kv, sys; tiered_kv.TieredKVConfig();"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules;"
        "import transformers; from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS;"
        "assert 'tiered_kv' not in ALL_ATTENTION_FUNCTIONS.valid_keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# What is refused


def tiny(model_type: str, **options):
    small = dict(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small | options)).eval().to(DEVICE)


def deepseek_v3():
    return tiny(
        "deepseek_v3",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=2,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
    )


def test_latent_attention_is_refused_at_the_first_forward():
    model = dispatch_kv_cache(deepseek_v3(), SPARSE)
    for _ in range(2):
        with pytest.raises(TieredKVError, match=r"DeepseekV3Attention rebuilds keys or values .* latent attention"):
            model.generate(IDS, max_new_tokens=4)
    assert model.generate(IDS, max_new_tokens=4, use_cache=False).shape == (1, 94)
    remove_kv_dispatch(model)
    assert model.generate(IDS, max_new_tokens=4).shape == (1, 94)


UNSUPPORTED = {
    "diffllama": (dict(), "diffllama models .* repeats values after the cache"),
    "jetmoe": (dict(kv_channels=16, num_local_experts=2, num_experts_per_tok=1), "jetmoe .* keys and values"),
    "doge": (dict(), "doge .* derives its mask from the values"),
    "bloom": (dict(n_head=2), "does not call attention through transformers' attention interface"),
    "mamba": (dict(state_size=4), "mamba has no full-attention layer"),
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_that_cannot_are_refused_by_name_and_left_alone(family):
    options, reason = UNSUPPORTED[family]
    model = tiny(family, **options)
    before = traces(model)
    with pytest.raises(TieredKVError, match=reason):
        dispatch_kv_cache(model)
    assert traces(model) == before


def test_an_encoder_decoder_model_is_refused():
    config = AutoConfig.for_model("t5", vocab_size=97, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config)
    before = traces(model)
    with pytest.raises(TieredKVError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        dispatch_kv_cache(model)
    assert traces(model) == before


def test_a_model_that_only_slides_is_refused():
    with pytest.raises(TieredKVError, match="mistral has no full-attention layer"):
        dispatch_kv_cache(make_model("mistral", sliding_window=16))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("hole", ["right", "gap"])
def test_padding_elsewhere_than_on_the_left_is_refused(hole, family):
    model = dispatch_kv_cache(make_model(family), SPARSE)
    inputs = padded_prompt(30, [0, 4])
    inputs["attention_mask"][1, -3 if hole == "right" else 10 :] = 0
    inputs["attention_mask"][1, 20:] = hole == "gap"
    with pytest.raises(TieredKVError, match="attention_mask: expected padding on the left only"):
        model.generate(**inputs, max_new_tokens=4)
    with pytest.raises(TieredKVError, match="attention_mask: expected padding on the left only"):
        model(**inputs, past_key_values=TieredCache(model.config, SPARSE))


def test_a_mask_that_is_not_causal_is_refused():
    model = dispatch_kv_cache(make_model(), SPARSE)
    mask = torch.ones(1, 1, 90, 90, dtype=torch.bool, device=DEVICE)
    with pytest.raises(TieredKVError, match="expected \\[batch, tokens\\], got \\[1, 1, 90, 90\\]"):
        model(IDS, attention_mask=mask, past_key_values=TieredCache(model.config, SPARSE))


def test_page_locking_without_cuda_is_refused():
    if DEVICE.type == "cuda":
        pytest.skip("needs a model on the CPU")
    model = dispatch_kv_cache(make_model(), small_config(pin_memory=True))
    with pytest.raises(TieredKVError, match="pin_memory: expected a model on CUDA, got one on cpu"):
        model.generate(IDS, max_new_tokens=4)


# Statistics


def test_statistics_before_anything_was_generated():
    model = make_model()
    with pytest.raises(TieredKVError, match="call dispatch_kv_cache"):
        kv_cache_stats(model)
    dispatch_kv_cache(model, SPARSE)
    with pytest.raises(TieredKVError, match="nothing was generated yet"):
        model.kv_cache_stats()
    model.generate(IDS, max_new_tokens=4, use_cache=False)
    with pytest.raises(TieredKVError, match="nothing was generated yet"):
        model.kv_cache_stats()


def test_statistics_of_a_fresh_cache():
    stats = TieredCache(make_model().config, SPARSE).stats()
    assert stats["hit_rate"] is None
    assert stats["tokens_per_lookup"] is None
    assert {stats[name] for name in ("kv_gpu_bytes", "kv_host_bytes", "kv_full_bytes", "context_length")} == {0}


def test_statistics_add_up():
    model = dispatch_kv_cache(make_model(), small_config(dense_context=0, token_budget=24))
    model.generate(**padded_prompt(90, [0, 41]), max_new_tokens=31)
    stats = model.kv_cache_stats()
    layers, rows, token_bytes = 3, 2 * 2, 2 * 16 * 4
    assert stats["tiered_layers"] == layers
    assert stats["context_length"] == 120
    assert stats["lookups"] == 30 * layers * rows
    assert stats["kv_full_bytes"] == 120 * layers * rows * token_bytes
    assert stats["kv_gpu_bytes"] == stats["window_bytes"] + stats["cluster_cache_bytes"] + stats["index_bytes"]
    assert stats["kv_host_bytes"] >= 100 * layers * rows * token_bytes
    assert stats["recalled_bytes"] == stats["recalled_tokens"] * token_bytes
    assert stats["hit_rate"] == pytest.approx(1 - stats["recalled_tokens"] / stats["selected_tokens"])
    assert 0 < stats["tokens_per_lookup"] <= 24
    assert stats["clusters_per_lookup"] == stats["selected_clusters"] / stats["lookups"]


def test_statistics_of_a_context_within_the_budget():
    model = dispatch_kv_cache(make_model(), small_config())
    model.generate(IDS, max_new_tokens=4)
    stats = model.kv_cache_stats()
    assert stats["lookups"] == stats["kv_host_bytes"] == stats["num_clusters"] == 0
    assert stats["hit_rate"] is None
