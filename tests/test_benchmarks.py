"""The speed benchmarks run on a tiny shape, and what they measure is what they say."""

import json

import numpy as np
import pytest
import torch

from benchmarks import (
    capped,
    decode,
    fill,
    full_attention,
    memory,
    ours,
    peers,
    plot,
    prefill,
    recall,
    rows,
    shapes,
    traces,
)
from benchmarks import small_models as small
from tests.tiny import DEVICE, make_model, prompt, small_config
from tiered_kv import kv_cache_dispatched
from tiered_kv.kernels.dispatch import force_backend

DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
COMMANDS = {"decode": decode, "prefill": prefill, "recall": recall, "memory": memory, "small_models": small}


@pytest.fixture(scope="module")
def model():
    return shapes.make_model("tiny", DEVICE)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ours, "SETTLING", 4)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(peers, "release", lambda: None)  # collecting garbage 20 times takes longer than the rest


def tiny_cache(model, batch=2, context=500, **options):
    return fill.fill_tiered(model.config, small_config(token_budget=64, **options), batch, context, DEVICE, DTYPE)


def few_clusters():
    """A trace over so few clusters that a small cache has a place for each."""
    rankings = np.stack([np.roll(np.arange(traces.TOP), 40 * step) for step in range(5)])
    return trace_of(rankings[None].astype(np.int16))


def trace_of(ids):
    return traces.Trace("made", ids, ids[:, ::-1].copy(), {})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        COMMANDS[name].main(["--help"])
    assert f"benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prefill", "recall", "memory", "small_models"])
def test_smoke_prints_a_table_and_writes_nothing(name, capsys, tmp_path):
    COMMANDS[name].main(["--smoke", "--out", str(tmp_path / "rows.jsonl")])
    assert capsys.readouterr().out.splitlines()[-1].startswith("|")
    assert not list(tmp_path.iterdir())


def test_any_option_of_the_library_can_be_asked_for():
    options = decode.parse(["--budget", "1024", "--kv", "policy=lfu", "gpu_cache_size=1.5"])
    kv_config = ours.kv_config(options)
    assert (kv_config.token_budget, kv_config.policy, kv_config.gpu_cache_size) == (1024, "lfu", 1.5)


def test_without_a_gpu_only_smoke_tests_run():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        decode.main([])


def test_decode_rows_name_peers_misses_and_who_won(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(decode.rows, "open_rows", lambda name, options: rows.Rows(name, tmp_path / f"{name}.jsonl"))
    decode.main(["--smoke", "--miss", "0", "0.1"])
    found = [json.loads(line) for line in (tmp_path / "decode.jsonl").read_text().splitlines()]
    assert {"machine", "versions", "commit", "date", "run"} <= found[0].keys()
    mine = [row for row in found if row["what"] == "ours"]
    assert mine[0]["miss_rate"] == 0 < mine[1]["miss_rate"]
    assert all(row["ms_p10"] <= row["ms"] <= row["ms_p90"] for row in mine)
    over = {row["peer"]: row for row in found if row["what"] == "ours over"}
    assert {"floor", "full_graph", "static_graph", "dynamic"} <= over.keys()
    assert over["full_graph"]["won"] == (over["full_graph"]["ratio"] <= 1)

    pytest.importorskip("matplotlib")
    plot.main(["--results", str(tmp_path)])
    assert (tmp_path / "decode.png").exists()
    assert "ours over" in capsys.readouterr().out


def test_capped_smoke(capsys):
    decode.main(["--smoke", "--cap-gib", "1", "--longest"])
    assert "longest, ours" in capsys.readouterr().out


def test_capped_batches_are_tried_downwards():
    tried = []

    def attempt(batch):
        tried.append(batch)
        if batch > 5:
            raise torch.OutOfMemoryError
        return batch

    assert capped.largest(7, attempt) == 5
    assert tried == [7, 6, 5]
    assert capped.largest(20, attempt, tries=2) is None


def test_a_filled_cache_is_as_after_a_prompt(model):
    """All but the window is clustered, sinks are kept, rows differ, and a decode step follows."""
    cache = tiny_cache(model)
    layer = cache.group.layers[1]
    assert cache.get_seq_length() == 500
    assert layer.clustered + layer.window.length == 500
    assert int(layer.index.tables.sizes[0].sum()) == layer.clustered - layer.config.num_sink_tokens
    assert not torch.equal(layer.index.tables.sizes[0], layer.index.tables.sizes[1])
    with torch.no_grad(), kv_cache_dispatched(model, cache.kv_config):
        model(input_ids=torch.tensor([[5], [6]], device=DEVICE), past_key_values=cache)
    assert cache.get_seq_length() == 501


def test_a_replayed_trace_decides_what_is_selected(model):
    """The chosen clusters are the trace's first ones, at the places the replay scattered them to."""
    cache = tiny_cache(model, batch=1, context=1500)
    trace, layer = few_clusters(), cache.group.layers[0]
    with ours.decoding(model, cache, trace) as decoder:
        decoder.step()
        replay, tables = decoder.replay, layer.index.tables
        ranking = trace.ids[0, (1 + int(replay.phases[0, 0])) % 5].astype(int)
        places = replay.places[0][0, torch.from_numpy(ranking).to(DEVICE)]
        chosen = int((tables.sizes[0, places].cumsum(0) <= layer.config.token_budget).sum())
        is_held = layer.cluster_cache.tables.slot_of[0][tables.first_blocks[0].long()] >= 0
        assert chosen > 4
        assert sorted(places[:chosen].tolist()) == is_held.logical_and(tables.sizes[0] > 0).nonzero()[:, 0].tolist()
    assert cache.get_seq_length() == 1500


def test_the_overwriting_kernel_does_what_torch_does(model):
    cache = tiny_cache(model, batch=1, context=1500)
    trace, sizes, results = few_clusters(), cache.group.layers[0].index.tables.sizes, []
    for backend in ("torch", "triton"):
        replay, scores = traces.Replay(trace, cache), torch.zeros(sizes.shape, device=DEVICE)
        guessed = torch.zeros_like(scores)
        with force_backend(backend):
            replay.begin_step()
            replay(sizes, scores)
            replay(sizes, guessed, is_guess=True)
        results.append(torch.stack([scores, guessed]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    assert int((results[0] > 0).sum()) == 2 * traces.TOP * len(sizes)
    assert not torch.equal(*results[0])


def test_miss_rates_come_from_counters_and_lru():
    before = {"recalled_tokens": 10, "selected_tokens": 100}
    after = {"recalled_tokens": 30, "selected_tokens": 200, "prefetched_tokens": 15, "used_prefetched_tokens": 10}
    counted = ours.since(before | dict.fromkeys(list(after)[2:], 0), after)
    assert (counted["miss_rate"], counted["late_rate"], counted["vain_rate"]) == (0.3, 0.2, 0.05)
    still = trace_of(np.tile(np.arange(traces.TOP, dtype=np.int16), (1, 30, 1)))
    assert traces.lru_miss_rate(still, 128, 1) == 0
    ids = (np.arange(traces.TOP)[None] + 128 * np.arange(30)[:, None]).astype(np.int16)[None]
    assert traces.lru_miss_rate(trace_of(ids), 128, 1) == 1
    assert traces.found_by_guess(traces.Trace("seen", ids, ids, {}), 128) == (1, 0)


def test_recorded_traces_rank_clusters_step_by_step():
    """Guesses resemble the rankings that come a layer later, but differ from them."""
    kv_config = small_config(token_budget=32, cuda_graph=False)
    ids, guesses = traces.record(make_model(), prompt(300), 6, kv_config, streams=4)
    assert ids.shape[:2] == guesses.shape[:2] == (4, 6)
    assert ids.dtype == guesses.dtype == np.int16
    assert all(len(set(ranking)) == len(ranking) for ranking in ids[0].tolist())
    assert not np.array_equal(ids, guesses)


@pytest.mark.parametrize("name", traces.names())
def test_stored_traces_say_where_they_come_from(name):
    trace = traces.load(name)
    assert trace.ids.shape[2] == traces.TOP
    assert {"model", "gguf_sha256", "text", "tokens", "commit", "versions"} <= trace.about.keys()
    assert (traces.FOLDER / f"{name}.npz").stat().st_size < 1.5 * 2**20


def test_every_way_to_attend_to_all_keys_gives_the_same():
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = {"device": DEVICE, "dtype": DTYPE, "generator": generator}
    query = torch.randn(2, 8, 1, 64, **shape)
    key, value = torch.randn(2, 2, 2, 2048, 64, **shape)
    expected = full_attention.gqa(query.float(), key.float(), value.float(), 0.125)
    ways = full_attention.candidates(2048, DEVICE) | {"split": lambda *x: full_attention.split(*x, pieces=4)}
    for name, attend in (ways | {"folded": full_attention.folded}).items():
        try:
            out = attend(query, key, value, 0.125).float()
        except RuntimeError:
            continue  # a backend that this GPU lacks
        tolerance = 2e-3 if DEVICE.type == "cuda" else 1e-5  # outputs are about 0.03; bf16 keeps 8 bits
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}")


def test_static_sliding_layers_for_capture_equal_the_stock_ones():
    model = make_model("gemma3_text")
    model.set_attn_implementation("sdpa")
    logits = []
    for cache in (small.StaticCache(config=model.config, max_cache_len=80), small.static_cache(model.config, 80)):
        with torch.no_grad():
            model(input_ids=prompt(40), past_key_values=cache)
            for step in range(3):
                token = torch.tensor([[5 + step]], device=DEVICE)
                out = model(input_ids=token, position_ids=torch.full_like(token, 40 + step), past_key_values=cache)
        logits.append(out.logits)
    torch.testing.assert_close(*logits)


def test_timing_is_the_median_with_its_spread():
    fields = rows.Timing([1.0, 2.0, 3.0, 4.0, 50.0], 20).fields()
    assert fields["ms"] == 3.0
    assert fields["ms_p10"] < 2.0 < 4.0 < fields["ms_p90"]
    assert rows.verdict(0.9, None)["won"]
    assert not rows.verdict(0.8, 0.85, most=False)["won"]
