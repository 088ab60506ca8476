"""Decode from a CUDA graph: the same tokens, no wait on the host, and an honest word where it cannot be.

Without CUDA a stand-in captures and replays (``tests/graph_stand_in.py``).
"""

import copy
import warnings

import pytest
import torch

from tests import graph_stand_in
from tests.tiny import DEVICE, LOGITS_TOLERANCE, make_model, small_config
from tiered_kv import TieredCache, TieredKVConfig, dispatch_kv_cache, kv_cache_dispatched
from tiered_kv.kernels.dispatch import force_backend

needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")

OPTIONS = dict(
    token_budget=64, num_sink_tokens=4, window_size=8, decode_segment=24, prefill_segment=64, prefill_chunk=64,
    tokens_per_cluster=4, max_cluster_tokens=16, block_size=4,
)  # fmt: skip


@pytest.fixture(autouse=True)
def graphs_on_the_cpu(request, monkeypatch):
    if DEVICE.type == "cpu" and "the_cpu_runs_eagerly" not in request.node.name:
        graph_stand_in.install(monkeypatch)


def prompt(batch: int = 1, tokens: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 90, (batch, tokens), generator=generator).to(DEVICE)


def generate(model, ids, new_tokens=70, **options):
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_replayed_step_gives_what_an_eager_one_gives(family, batch):
    model, ids = make_model(family), prompt(batch)
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=False)):
        expected, expected_logits = generate(model, ids)
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=True)), warnings.catch_warnings():
        if family != "gpt_oss":  # its experts are routed on the host
            warnings.simplefilter("error")
        tokens, logits = generate(model, ids)
        stats = model.kv_cache_stats()
    assert torch.equal(tokens, expected)
    assert (logits - expected_logits).abs().max() < 1e-4
    if family != "gpt_oss":
        assert stats["graph_replays"] == 68, "all but the prefill's token and the warm-up step"
        assert 1 <= stats["graph_captures"] <= 4


def test_dense_contexts_are_captured_too():
    model, ids = make_model("llama"), prompt(2, 40)
    expected, _ = generate(model, ids)
    with kv_cache_dispatched(model, TieredKVConfig(token_budget=4096)):
        tokens, _ = generate(model, ids)
        assert model.kv_cache_stats()["graph_replays"] == 68
    assert torch.equal(tokens, expected)


@needs_cuda
def test_decode_never_waits_for_the_device():
    model, ids = make_model("llama"), prompt()
    with torch.no_grad(), kv_cache_dispatched(model, TieredKVConfig(**OPTIONS)):
        cache = TieredCache(model.config, TieredKVConfig(**OPTIONS))
        model(ids, past_key_values=cache)
        token = ids[:, :1]
        for _ in range(3):
            model(input_ids=token, past_key_values=cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(100):
                token = model(input_ids=token, past_key_values=cache).logits.argmax(-1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert cache.get_seq_length() == 300 + 103


@needs_cuda
def test_kernels_and_references_generate_the_same_tokens():
    model, ids = make_model("llama"), prompt()
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS)):
        tokens, _ = generate(model, ids)
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=False)), force_backend("torch"):
        expected, _ = generate(model, ids)
    assert torch.equal(tokens, expected)


def test_multi_turn_captures_again_and_stays_right():
    model, ids = make_model("gemma3_text"), prompt()
    outputs = []
    for use_graph in (False, True):
        with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=use_graph)):
            cache = TieredCache(model.config, TieredKVConfig(**OPTIONS))
            first, _ = generate(model, ids, 20, past_key_values=cache)
            second, _ = generate(model, torch.cat([first, ids[:, :50]], 1), 20, past_key_values=cache)
            outputs.append(second)
    assert torch.equal(*outputs)


def test_a_copy_of_a_dispatched_model_decodes_on_its_own():
    model, ids = dispatch_kv_cache(make_model("llama"), TieredKVConfig(**OPTIONS)), prompt()
    expected, _ = generate(model, ids, 10)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tokens, _ = generate(twin, ids, 10)
    assert torch.equal(tokens, expected)


def test_the_cpu_runs_eagerly_and_says_nothing():
    model = make_model("llama").cpu()
    with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS)), warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model, prompt().cpu(), 5)
        assert model.kv_cache_stats()["graph_replays"] == 0


def test_beams_are_reordered_in_place():
    model, ids = make_model("llama"), prompt()
    outputs, stats = [], {}
    for use_graph in (False, True):
        with kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=use_graph)):
            outputs.append(model.generate(ids, max_new_tokens=40, num_beams=3, do_sample=False))
            stats = model.kv_cache_stats()
    assert torch.equal(*outputs)
    assert stats["graph_replays"] > 30
    assert stats["graph_captures"] <= 4


def test_a_cache_cropped_between_steps_is_captured_again_where_it_must_be():
    model, ids = make_model("llama"), prompt()
    outputs = []
    for use_graph in (False, True):
        with torch.no_grad(), kv_cache_dispatched(model, TieredKVConfig(**OPTIONS, cuda_graph=use_graph)):
            cache = TieredCache(model.config, TieredKVConfig(**OPTIONS))
            generate(model, ids, 20, past_key_values=cache)
            cache.crop(-60)  # into the prompt's segments
            outputs.append(generate(model, torch.cat([ids[:, :240], ids[:, :90]], 1), 20, past_key_values=cache)[0])
    assert torch.equal(*outputs)


def test_a_step_captured_without_segments_is_captured_again_when_there_is_one():
    """crop() leaves the index's tables where they are, and nothing in them."""
    model, ids = make_model("llama"), prompt(1, 90)
    outputs = []
    for use_graph in (False, True):
        config = small_config(dense_context=0, cuda_graph=use_graph)
        with kv_cache_dispatched(model, config):
            cache = TieredCache(model.config, config)
            first, _ = generate(model, ids, 24, past_key_values=cache)
            cache.crop(-100)
            outputs.append(generate(model, first[:, :14], 24, past_key_values=cache)[1])
    assert (outputs[1] - outputs[0]).abs().max() < LOGITS_TOLERANCE
