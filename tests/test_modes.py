"""Every way of generating gives what the stock model gives with its own cold cache."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from tests.tiny import (
    LOGITS_TOLERANCE,
    assert_same,
    generate,
    make_model,
    ones,
    padded_prompt,
    prompt,
    small_config,
)
from tiered_kv import TieredCache, TieredKVError, dispatch_kv_cache

NEW_TOKENS = 24
IDS = prompt(90, seed=1)
REPETITIVE = prompt(15, seed=1).repeat(1, 6)
BATCH = padded_prompt(90, [0, 41, 83], seed=1)
MORE = prompt(21, seed=2)


@pytest.fixture
def stock():
    return make_model()


@pytest.fixture
def model():
    """Dispatched; the sparse path with everything selected, and prompts in chunks."""
    return dispatch_kv_cache(make_model(), small_config(dense_context=0))


@pytest.fixture
def cache(model) -> TieredCache:
    return new_cache(model)


def new_cache(model) -> TieredCache:
    return TieredCache(model.config, model._tiered_kv.config)


def tokens(model, *args, seed: int = 0, **options):
    """Tokens of ``generate()``, sampled from the same random numbers every time."""
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return model.generate(*args, **options).tolist()


def feed(model, cache: TieredCache, inputs: dict[str, torch.Tensor], count: int) -> None:
    """The first tokens of a padded batch, at the positions that ``generate()`` gives them."""
    mask = inputs["attention_mask"][:, :count]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(inputs["input_ids"][:, :count], attention_mask=mask, position_ids=positions, past_key_values=cache)


SAMPLING = dict(do_sample=True, temperature=0.9, top_p=0.95)
MODES = {
    "greedy": (ones(IDS), {}),
    "no mask": ({"input_ids": IDS}, {}),
    "one token": (ones(IDS[:, :1]), {}),
    "two tokens": (ones(IDS[:, :2]), {}),
    "nothing": ({}, {}),
    "left padding": (BATCH, {}),
    "left padding, no mask": ({"input_ids": BATCH["input_ids"]}, {}),
    "sampling": (ones(IDS), SAMPLING),
    "sampling a padded batch": (BATCH, SAMPLING),
    "several samples": (ones(IDS), SAMPLING | dict(num_return_sequences=3)),
    "several samples of a batch": (BATCH, SAMPLING | dict(num_return_sequences=2)),
    "beams": (ones(IDS), dict(num_beams=4, num_return_sequences=2)),
    "beams of a batch": (BATCH, dict(num_beams=3)),
    "beam samples": (ones(IDS), SAMPLING | dict(num_beams=3)),
    "repetition penalty": (ones(IDS), dict(repetition_penalty=1.3)),
    "prefill in chunks": (ones(IDS), dict(prefill_chunk_size=17)),
    "prefill in chunks of one": (ones(IDS[:, :9]), dict(prefill_chunk_size=1)),
    "prefill a padded batch in chunks": (BATCH, dict(prefill_chunk_size=16)),
    "prompt lookup": (ones(REPETITIVE), dict(prompt_lookup_num_tokens=4)),
    "positions given": (ones(IDS), dict(position_ids=torch.arange(90, device=IDS.device)[None] + 5)),
    "without cache": (ones(IDS), dict(use_cache=False)),
}


@pytest.mark.parametrize("mode", MODES)
def test_mode(mode, model, stock):
    inputs, options = MODES[mode]
    assert tokens(model, **inputs, **options) == tokens(stock, **inputs, **options)


@pytest.mark.parametrize(
    "mode", ["sampling", "several samples", "beams of a batch", "prefill a padded batch in chunks"]
)
def test_mode_of_a_hybrid_model(mode):
    inputs, options = MODES[mode]
    hybrid = dispatch_kv_cache(make_model("gemma3_text"), small_config(dense_context=0))
    assert tokens(hybrid, **inputs, **options) == tokens(make_model("gemma3_text"), **inputs, **options)


@pytest.mark.parametrize("assistant", ["same", "noisy", "dispatched"])
def test_assisted(assistant, model, stock):
    helper = make_model()
    if assistant == "noisy":
        torch.manual_seed(5)
        for weight in helper.parameters():
            weight.data += 0.05 * weight.std() * torch.randn_like(weight)
    if assistant == "dispatched":
        dispatch_kv_cache(helper, small_config(dense_context=0))
    assert tokens(model, **ones(IDS), assistant_model=helper) == tokens(stock, **ones(IDS))


@pytest.mark.parametrize("option", ["num_beams", "num_return_sequences", "prompt_lookup_num_tokens"])
@pytest.mark.parametrize("where", ["positional", "by name", "of the model", "beside the model's"])
def test_options_are_found_wherever_they_are_given(option, where, model, stock):
    value = {"num_beams": 3, "num_return_sequences": 2, "prompt_lookup_num_tokens": 4}[option]
    results = []
    for each in (model, stock):
        given = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=option == "num_return_sequences")
        setattr(given if where in ("positional", "by name") else each.generation_config, option, value)
        each.generation_config.do_sample = given.do_sample
        torch.manual_seed(0)
        if where == "positional":
            results.append(each.generate(REPETITIVE, given))
        elif where == "of the model":
            results.append(each.generate(REPETITIVE, max_new_tokens=NEW_TOKENS, do_sample=given.do_sample))
        else:
            results.append(each.generate(REPETITIVE, generation_config=given))
    assert results[0].tolist() == results[1].tolist()


def test_prefill_chunk_size_of_the_model(model, stock):
    model.generation_config.prefill_chunk_size = 19
    assert tokens(model, **ones(IDS)) == tokens(stock, **ones(IDS))


def test_a_cache_implementation_from_the_hub_is_ours_now(model, stock):
    model.generation_config.cache_implementation = "static"
    assert tokens(model, **ones(IDS)) == tokens(stock, **ones(IDS))
    assert model.kv_cache_stats()["selected_tokens"] > 0


# Several turns


@pytest.mark.parametrize("options", [{}, dict(prefill_chunk_size=13), SAMPLING], ids=str)
def test_a_second_turn_with_all_ids(options, model, stock, cache):
    first = torch.tensor(tokens(model, **ones(IDS), past_key_values=cache), device=IDS.device)
    whole = torch.cat([first, MORE], dim=1)
    second = tokens(model, **ones(whole), past_key_values=cache, **options)
    assert second == tokens(stock, **ones(whole), **{k: v for k, v in options.items() if k != "prefill_chunk_size"})
    assert cache.get_seq_length() == whole.shape[1] + NEW_TOKENS - 1


def test_a_second_turn_of_a_padded_batch(model, stock, cache):
    first = torch.tensor(tokens(model, **BATCH, past_key_values=cache), device=IDS.device)
    whole = torch.cat([first, prompt(21, batch=3, seed=2)], dim=1)
    new = whole.shape[1] - BATCH["attention_mask"].shape[1]
    mask = torch.nn.functional.pad(BATCH["attention_mask"], (0, new), value=1)
    inputs = {"input_ids": whole, "attention_mask": mask}
    assert tokens(model, **inputs, past_key_values=cache) == tokens(stock, **inputs)


def test_a_second_turn_with_the_new_ids_and_the_whole_mask(model, stock, cache):
    first = torch.tensor(tokens(model, **ones(IDS), past_key_values=cache), device=IDS.device)
    whole = torch.cat([first, MORE], dim=1)
    new = whole[:, cache.get_seq_length() :]
    second = tokens(model, new, attention_mask=torch.ones_like(whole), past_key_values=cache)
    assert [row[-NEW_TOKENS:] for row in second] == [row[-NEW_TOKENS:] for row in tokens(stock, **ones(whole))]


def test_a_second_turn_with_the_new_ids_alone_is_refused(model, cache):
    tokens(model, **ones(IDS), past_key_values=cache)
    length = cache.get_seq_length()
    with pytest.raises(TieredKVError, match="the cache holds 113 tokens and the prompt has 21"):
        tokens(model, **ones(MORE), past_key_values=cache)
    assert cache.get_seq_length() == length


@pytest.mark.parametrize("tokens_held", [90, 89, 88])
def test_a_prompt_that_is_cached(tokens_held, model, stock, cache):
    """All of it: transformers feeds the whole prompt again; and all but a token or two."""
    with torch.no_grad():
        model(IDS[:, :tokens_held], past_key_values=cache)
    assert tokens(model, **ones(IDS), past_key_values=cache) == tokens(stock, **ones(IDS))
    assert cache.get_seq_length() == 90 + NEW_TOKENS - 1


def test_a_hybrid_model_whose_prompt_is_cached_is_refused_before_anything_is_dropped():
    hybrid = dispatch_kv_cache(make_model("gemma3_text"), small_config(dense_context=0))
    cache = new_cache(hybrid)
    with torch.no_grad():
        hybrid(IDS, past_key_values=cache)
    with pytest.raises(TieredKVError, match="sliding layers"):
        tokens(hybrid, **ones(IDS), past_key_values=cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {90}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_padded_prompt_token_by_token(family):
    """Single tokens that are padding in some rows are no decode steps."""
    model = dispatch_kv_cache(make_model(family), small_config(dense_context=0))
    inputs, cache = padded_prompt(50, [0, 21, 47], seed=1), new_cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for t in range(49):
            mask, now = inputs["attention_mask"][:, : t + 1], slice(t, t + 1)
            model(
                inputs["input_ids"][:, now], attention_mask=mask, position_ids=positions[:, now], past_key_values=cache
            )
    assert tokens(model, **inputs, past_key_values=cache) == tokens(make_model(family), **inputs)


@pytest.mark.parametrize("dropped", [1, 9, 23, 60, 100])
def test_crop_back_and_generate_again(dropped, model, stock, cache):
    first = tokens(model, **ones(IDS), past_key_values=cache)
    cache.crop(-dropped)
    whole = torch.tensor(first, device=IDS.device)[:, : 90 + NEW_TOKENS - dropped]
    assert tokens(model, **ones(whole), past_key_values=cache) == tokens(stock, **ones(whole))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_kernels_are_launched_on_the_device_of_the_tensors(family, monkeypatch):
    """Triton launches on the current device, which a model on another GPU, or over several, does not set."""
    from tiered_kv import layer, sliding, window

    inside = []

    @contextlib.contextmanager
    def device_of(tensor):
        inside.append(tensor.device)
        yield
        inside.pop()

    def checked(name, function):
        def run(*args, **kwargs):
            assert inside, name
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module, name in [
        (layer, "attend"),
        (layer, "attend_chunk"),
        (layer, "cluster_segment"),
        (layer, "score_clusters"),
        (sliding, "attend"),
        (sliding, "append_token"),
        (window, "append_token"),
    ]:
        monkeypatch.setattr(module, name, checked(name, getattr(module, name)))
    tokens(dispatch_kv_cache(make_model(family), small_config(dense_context=0)), **BATCH)


def test_a_step_cut_short_is_noticed_and_mended(model, stock, cache, monkeypatch):
    with torch.no_grad():
        model(IDS[:, :80], past_key_values=cache)
        model(IDS[:, 80:81], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[1].mlp, "forward", lambda hidden: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(IDS[:, 81:82], past_key_values=cache)
        with pytest.raises(TieredKVError, match=r"cut short; crop\(\) the cache to 81 tokens"):
            model(IDS[:, 81:82], past_key_values=cache)
    cache.crop(81)
    assert tokens(model, **ones(IDS), past_key_values=cache) == tokens(stock, **ones(IDS))


def test_a_clock_is_made_once_for_a_kind_of_layer(monkeypatch):
    """Not once a layer and step: each is a launch, which a captured step would replay."""
    from tiered_kv.lockstep import Lane

    made = []
    make = Lane.__init__
    monkeypatch.setattr(Lane, "__init__", lambda self, device: (made.append(self), make(self, device))[1])
    hybrid = dispatch_kv_cache(make_model("gemma3_text"), small_config(dense_context=0))
    tokens(hybrid, **ones(IDS))
    assert len(made) == 2


def test_a_reset_cache_is_as_new(model, stock, cache):
    tokens(model, **BATCH, past_key_values=cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert tokens(model, **ones(IDS), past_key_values=cache) == tokens(stock, **ones(IDS))


def test_a_prefix_used_twice(model, stock, cache):
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    for end in (prompt(30, seed=3), prompt(30, seed=4)):
        whole = torch.cat([IDS, end], dim=1)
        fork = copy.deepcopy(cache)
        assert tokens(model, **ones(whole), past_key_values=fork) == tokens(stock, **ones(whole))
    assert cache.get_seq_length() == 90


def test_a_cache_filled_with_gradients_can_be_copied(model, cache):
    model(IDS, past_key_values=cache)
    assert copy.deepcopy(cache).get_seq_length() == 90


@pytest.mark.parametrize("held", [60, 89])
def test_a_prefix_for_many_beams(held, model, stock, cache):
    with torch.no_grad():
        model(IDS[:, :held], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    beams = tokens(model, **ones(IDS), past_key_values=cache, num_beams=3)
    assert beams == tokens(stock, **ones(IDS), num_beams=3)


def test_a_padded_prefix_of_a_hybrid_model_for_many_beams():
    """The first token after the copies is a decode step: sliding layers have to know the copies' padding by then."""
    hybrid = dispatch_kv_cache(make_model("gemma3_text"), small_config(dense_context=0))
    cache = new_cache(hybrid)
    inputs = padded_prompt(30, [0, 11, 20], seed=1)
    feed(hybrid, cache, inputs, 29)
    cache.batch_repeat_interleave(2)
    beams = tokens(hybrid, **inputs, past_key_values=cache, num_beams=2)
    assert beams == tokens(make_model("gemma3_text"), **inputs, num_beams=2)


@pytest.mark.parametrize("prefetch", ["off", "next_layer"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_chunk_of_padding_and_then_token_by_token(family, prefetch):
    """While a sequence is all padding a token is no decode step, in sliding layers as little as in the others."""
    model = dispatch_kv_cache(make_model(family), small_config(dense_context=0, prefetch=prefetch))
    cache, stock_cache, stock = new_cache(model), DynamicCache(config=model.config), make_model(family)
    inputs = padded_prompt(40, [0, 11], seed=1)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, end in [(0, 3), *((t, t + 1) for t in range(3, 40))]:
        step = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        step["position_ids"] = positions[:, start:end]
        with torch.no_grad():
            logits = model(**step, past_key_values=cache).logits[:, -1]
            expected = stock(**step, past_key_values=stock_cache).logits[:, -1]
        present = mask[:, end - 1].bool()
        torch.testing.assert_close(logits[present], expected[present], atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_chosen_sequences_of_a_padded_batch(family):
    model = dispatch_kv_cache(make_model(family), small_config(dense_context=0))
    cache, chosen = new_cache(model), torch.tensor([2, 0], device=IDS.device)
    inputs = padded_prompt(50, [0, 41, 37], seed=1)
    feed(model, cache, inputs, 49)
    cache.batch_select_indices(chosen)
    rest = {name: rows[chosen] for name, rows in inputs.items()}
    assert tokens(model, **rest, past_key_values=cache) == tokens(make_model(family), **rest)


def test_a_batch_of_another_size_is_refused(model, cache):
    tokens(model, **ones(IDS), past_key_values=cache)
    with pytest.raises(TieredKVError, match="the cache holds 1 sequences, got 3"):
        tokens(model, **padded_prompt(120, [0, 1, 2]), past_key_values=cache)


def test_assisted_decoding_of_a_warm_cache_is_refused(model, cache):
    """transformers would feed it the whole prompt again."""
    with torch.no_grad():
        model(IDS[:, :30], past_key_values=cache)
    with pytest.raises(TieredKVError, match="fresh cache"):
        tokens(model, **ones(IDS), past_key_values=cache, prompt_lookup_num_tokens=3)


# Other inputs, outputs and surroundings


def test_inputs_embeds(model, stock):
    given = {"inputs_embeds": stock.get_input_embeddings()(IDS).detach(), "attention_mask": torch.ones_like(IDS)}
    assert tokens(model, **given) == tokens(stock, **given)


def test_streamer(model):
    class Streamer:
        def __init__(self):
            self.pieces: list[int] = []
            self.has_ended = False

        def put(self, value):
            self.pieces += value.flatten().tolist()

        def end(self):
            self.has_ended = True

    streamer = Streamer()
    streamed = tokens(model, **ones(IDS), streamer=streamer)
    assert [streamer.pieces] == streamed
    assert streamer.has_ended


def test_everything_returned(model, stock):
    options = dict(return_dict_in_generate=True, output_logits=True, output_scores=True, output_hidden_states=True)
    options |= dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    out, expected = model.generate(**ones(IDS), **options), stock.generate(**ones(IDS), **options)
    assert type(out) is type(expected)
    assert isinstance(out.past_key_values, TieredCache)
    assert out.sequences.tolist() == expected.sequences.tolist()
    close = dict(atol=LOGITS_TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.stack(out.scores), torch.stack(expected.scores), **close)
    for step in range(1, NEW_TOKENS):  # the first one is the prompt's last chunk only
        torch.testing.assert_close(out.hidden_states[step], expected.hidden_states[step], **close)


def test_attention_weights_are_refused(model):
    with pytest.raises(TieredKVError, match="output_attentions"):
        tokens(model, **ones(IDS), output_attentions=True)


def test_stopping_early(model, stock):
    """A row that has ended gets padding, and the others go on."""
    end = tokens(stock, **BATCH)[1][90 + 5]
    ended = tokens(stock, **BATCH, eos_token_id=end)
    assert any(0 in row[90:] for row in ended)
    assert tokens(model, **BATCH, eos_token_id=end) == ended


@pytest.mark.parametrize("then", ["inside", "outside"])
def test_inference_mode(then, model, stock, cache):
    with torch.inference_mode():
        first = torch.tensor(tokens(model, **BATCH, past_key_values=cache), device=IDS.device)
    new = first.shape[1] - 90
    whole = {"input_ids": torch.cat([first, prompt(40, 3)], dim=1)}
    whole["attention_mask"] = torch.nn.functional.pad(BATCH["attention_mask"], (0, new + 40), value=1)
    with torch.inference_mode(then == "inside"):
        assert tokens(model, **whole, past_key_values=cache) == tokens(stock, **whole)
        cache.crop(-30)
        cache.batch_select_indices(torch.tensor([1, 1], device=IDS.device))


def test_bfloat16_runs_all_the_way(stock):
    """Rounding decides a random model's tokens, so that only closeness of the first one can be asked for."""
    model = dispatch_kv_cache(make_model().bfloat16(), small_config(dense_context=0))
    _, logits = generate(model, ones(IDS), 60)
    _, expected = generate(stock, ones(IDS), 1)
    assert logits.isfinite().all()
    # bfloat16 keeps 8 bits: about 0.4 % a rounding of values up to 10, over three layers
    assert (logits[:, :1].float() - expected).abs().max() < 0.3


# Dispatched models without our cache


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("inputs", [ones(IDS), BATCH], ids=["single", "left-padded"])
def test_a_stock_cache_given_to_a_dispatched_model(family, inputs):
    model, stock = dispatch_kv_cache(make_model(family), small_config()), make_model(family)
    actual = generate(model, inputs, NEW_TOKENS, past_key_values=DynamicCache(config=model.config))
    assert_same(actual, generate(stock, inputs, NEW_TOKENS))


def test_a_static_cache_given_to_a_dispatched_model(model, stock):
    cache = StaticCache(config=model.config, max_cache_len=200)
    options = dict(disable_compile=True)  # on CUDA generate() would compile the model, for a minute
    assert tokens(model, **ones(IDS), past_key_values=cache, **options) == tokens(stock, **ones(IDS))


def test_a_stock_cache_asked_for_by_name(model, stock):
    assert tokens(model, **BATCH, cache_implementation="dynamic") == tokens(stock, **BATCH)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "gemma2"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_dispatched_model_called_by_itself(family, use_cache):
    model, stock = dispatch_kv_cache(make_model(family), small_config()), make_model(family)
    with torch.no_grad():
        for inputs in (ones(IDS), BATCH):
            actual, expected = (m(**inputs, use_cache=use_cache).logits for m in (model, stock))
            kept = inputs["attention_mask"].bool()
            torch.testing.assert_close(actual[kept], expected[kept], atol=LOGITS_TOLERANCE, rtol=0)


def test_a_dispatched_model_can_be_trained(model, stock):
    losses = [m(IDS, labels=IDS).loss for m in (model, stock)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, atol=LOGITS_TOLERANCE, rtol=0)
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        # float32 sums of 90 tokens' gradients of the order of 1, in another order
        torch.testing.assert_close(ours.grad, theirs.grad, atol=LOGITS_TOLERANCE, rtol=1e-3)


@pytest.mark.parametrize("window", [2048, 4096])
@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_a_window_that_no_context_outgrows_is_full_attention(family, window):
    model = dispatch_kv_cache(make_model(family, sliding_window=window), small_config(dense_context=0))
    stock = make_model(family, sliding_window=window)
    assert tokens(model, **BATCH) == tokens(stock, **BATCH)
    assert model.kv_cache_stats()["tiered_layers"] == 2
