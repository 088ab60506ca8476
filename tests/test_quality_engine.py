"""The research attention: exact for the full cache, fair to the methods, and in agreement with the real cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.quality import graph
from benchmarks.quality import session as session_module
from benchmarks.quality.graph import StepRunner
from benchmarks.quality.methods import BASELINES, make_methods
from benchmarks.quality.methods.base import Method
from benchmarks.quality.methods.clusters import ClusterOptions, Clusters
from benchmarks.quality.methods.oracle import Oracle
from benchmarks.quality.ours import TieredSession, schedule_of
from benchmarks.quality.rows import read_rows
from benchmarks.quality.run import Plan, Subject, play, replay, run_task
from benchmarks.quality.schedule import Schedule
from benchmarks.quality.session import Session
from benchmarks.quality.tasks.items import Item, Task
from tests.tiny import DEVICE, LOGITS_TOLERANCE, make_model, prompt, small_config

SMALL = Schedule(num_sink_tokens=4, window_size=8, decode_segment=16, prefill_segment=64)
PROMPT, STEPS = 83, 45


@pytest.fixture(autouse=True)
def short_prefill_chunks(monkeypatch):
    monkeypatch.setattr(session_module, "PREFILL_CHUNK", 32)


def ids() -> list[int]:
    return prompt(PROMPT + STEPS)[0].tolist()


@torch.no_grad()
def stock_logits(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids()], device=DEVICE)).logits[0, PROMPT:].float()


def forced_logits(model, methods, schedule=SMALL) -> torch.Tensor:
    """``[steps, rows, vocabulary]``; row 0 is the full cache."""
    with Session(model, methods, schedule) as session:
        session.prefill(ids()[:PROMPT])
        return torch.stack(list(session.decode(ids()[PROMPT:])))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss"])
def test_the_full_row_is_the_stock_model(family):
    model = make_model(family)
    stock = stock_logits(model)
    logits = forced_logits(model, make_methods(["oracle", "kivi_int4"], [16]))
    torch.testing.assert_close(logits[:, 0], stock, atol=LOGITS_TOLERANCE, rtol=0)
    assert (logits[:, 1] - stock).abs().max() > 100 * LOGITS_TOLERANCE


class Shown(Method):
    """A method that writes down what it is shown of the prompt, layer by layer."""

    needs_attention = needs_sums = True

    def start(self, prompt):
        self.prompts = [*getattr(self, "prompts", []), prompt]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_methods_see_the_prompts_attention(family):
    """H2O's sums and SnapKV's observation window, gathered over three prefill chunks, against the stock model's own."""
    model, shown = make_model(family), Shown()
    with torch.no_grad():
        tokens = torch.tensor([ids()[:PROMPT]], device=DEVICE)
        weights = model(input_ids=tokens, output_attentions=True).attentions
    forced_logits(model, [shown])
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(weights)
    full = [w[0] for w, kind in zip(weights, types, strict=True) if kind == "full_attention"]
    assert len(shown.prompts) == len(full)
    for given, expected in zip(shown.prompts, full, strict=True):
        by_group = expected.unflatten(0, (given.keys.shape[0], -1))
        torch.testing.assert_close(given.attention_sums, by_group.sum((1, 2)), atol=1e-4, rtol=0)
        candidates = slice(given.first, given.first + given.keys.shape[1])
        torch.testing.assert_close(given.attention, by_group[:, :, -64:, candidates], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in BASELINES if not name.startswith("kivi")])
def test_with_budget_to_spare_every_method_is_the_full_cache(name):
    logits = forced_logits(make_model("gemma3_text"), make_methods([name], [512]))
    torch.testing.assert_close(logits[:, 1], logits[:, 0], atol=LOGITS_TOLERANCE, rtol=0)


def test_a_method_scores_the_same_alone_and_in_company():
    model = make_model("llama")
    alone = forced_logits(model, make_methods(["h2o"], [16]))[:, 1]
    together = forced_logits(model, make_methods(["quest", "h2o", "clusterkv", "snapkv"], [32, 16]))
    torch.testing.assert_close(together[:, 4], alone, atol=LOGITS_TOLERANCE, rtol=0)


class Tape(TorchDispatchMode):
    """A CUDA graph's likeness on the CPU: writes down operations, and refuses what a capture refuses."""

    REFUSED = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in self.REFUSED, f"{func} reads or writes host memory"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the operations again on the same tensors, into the same tensors."""
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Taped:
    """A :class:`CapturedStep` by tape. Capturing must not run the step, so what it changed is put back."""

    def __init__(self, forward, ids, positions) -> None:
        self.ids, self.positions = ids.clone(), positions.clone()
        layers = forward.__self__.cache.layers
        sums = [share.state.sums for layer in layers for share in layer.shares if hasattr(share.state, "sums")]
        before = [x.clone() for x in sums]
        with Tape() as self.tape:
            self.logits = forward(self.ids, self.positions)
        for now, then in zip(sums, before, strict=True):
            now.copy_(then)

    def __call__(self, ids, positions):
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.tape.replay()
        return self.logits.clone()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_step_can_be_captured_between_cuts_of_the_window(family, monkeypatch):
    monkeypatch.setattr(graph, "WORTH_CAPTURING", 8)
    model, methods = make_model(family), make_methods(list(BASELINES), [16, 24])
    eager = forced_logits(model, methods)
    with Session(model, methods, SMALL, cuda_graph=False) as session:
        session.runner = StepRunner(session._forward, enabled=True, capture=Taped)
        session.prefill(ids()[:PROMPT])
        taped = torch.stack(list(session.decode(ids()[PROMPT:])))
    assert session.runner.captures == 3
    torch.testing.assert_close(taped, eager, atol=LOGITS_TOLERANCE, rtol=0)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cuda_graph_changes_nothing(family, monkeypatch):
    monkeypatch.setattr(graph, "WORTH_CAPTURING", 8)
    model, methods, logits = make_model(family), make_methods(list(BASELINES), [16, 24]), []
    for cuda_graph in (False, True):
        with Session(model, methods, SMALL, cuda_graph=cuda_graph) as session:
            session.prefill(ids()[:PROMPT])
            logits.append(torch.stack(list(session.decode(ids()[PROMPT:]))))
    assert session.runner.captures == 3
    torch.testing.assert_close(logits[1], logits[0], atol=LOGITS_TOLERANCE, rtol=0)


def test_the_model_gets_its_own_attention_back_also_after_an_exception():
    model = make_model("llama")
    before = model.config._attn_implementation
    session = Session(model, [], SMALL)
    assert model.config._attn_implementation == session_module.ATTENTION
    with pytest.raises(RuntimeError, match="ours"), session:
        raise RuntimeError("ours")
    assert model.config._attn_implementation == before


class Watched(Oracle):
    """An oracle that writes down how many candidates there were, and how many it took."""

    def __init__(self, budgets) -> None:
        super().__init__(budgets)
        self.seen: list[int] = []

    def select(self, state, query, logits):
        mask = super().select(state, query, logits)
        assert (mask.sum(3) == torch.tensor(self.budgets, device=mask.device)[:, None]).all()
        self.seen.append(logits.shape[3])
        return mask


def test_sinks_and_window_are_those_of_the_real_cache():
    model, config = make_model("llama", num_hidden_layers=1), small_config(token_budget=16)
    watched = Watched([16])
    forced_logits(model, [watched], schedule_of(config))
    with TieredSession(model, config) as session:
        session.prefill(ids()[:PROMPT])
        real = []
        for _ in session.decode(ids()[PROMPT:]):
            (layer,) = session.cache.group.layers
            real.append(layer.clustered - config.num_sink_tokens)
    assert watched.seen == real


@pytest.mark.parametrize("options", [{}, {"spread": 0.0}, {"estimate": False}, {"index_dtype": "model"}])
def test_the_real_cache_and_its_simulation_agree(options):
    """Without sinks, which the real cache clusters beside, and with blocks to spare, both are the same algorithm."""
    config = small_config(token_budget=24, num_sink_tokens=0, block_size=1, **options)
    same = ClusterOptions(
        tokens_per_cluster=4, max_cluster_tokens=8, segment=32, spread=config.spread,
        estimate_share=float(config.estimate), index_int8=config.index_dtype == "int8",
    )  # fmt: skip
    model = make_model("llama")
    simulated = forced_logits(model, [Clusters([24], "ours_sim", same)], schedule_of(config))[:, 1]
    with TieredSession(model, config) as session:
        session.prefill(ids()[:PROMPT])
        real = torch.cat(list(session.decode(ids()[PROMPT:])))
    torch.testing.assert_close(simulated, real, atol=10 * LOGITS_TOLERANCE, rtol=0)


def test_greedy_continuation_is_the_full_caches_own():
    model = make_model("llama")
    item = Item(ids()[:PROMPT], ids()[PROMPT : PROMPT + 1], [], greedy=20, score_every=4)
    with Session(model, make_methods(["streaming_llm"], [16]), SMALL) as session:
        played = play(session, item)
    with torch.no_grad():
        stock = model.generate(
            torch.tensor([ids()[: PROMPT + 1]], device=DEVICE), max_new_tokens=19, do_sample=False, use_cache=True
        )
    assert played.tokens == stock[0, PROMPT:].tolist()
    assert played.scored == [0, 4, 8, 12, 16]
    assert (played.scores[0].values[1] == 1).all()


def test_the_real_cache_with_budget_to_spare_scores_as_the_full_cache():
    model = make_model("llama")
    item = Item(ids()[:PROMPT], ids()[PROMPT:], [(1, 5), (9, STEPS)])
    with Session(model, [], SMALL) as session:
        shared = play(session, item)
    with TieredSession(model, small_config()) as session:
        ours = replay(session, item, shared)
    assert ours.steps == [*range(4), *range(8, STEPS - 1)]
    assert ours.values[2].max() < 1e-6
    assert ours.values[3].min() == 1


def test_a_run_resumes_where_rows_are_missing(tmp_path):
    model = make_model("llama")
    subject = Subject(model, "tiny", None, "float32")
    task = Task("toy", lambda maker: iter([Item(ids()[:PROMPT], ids()[PROMPT : PROMPT + 9], [(1, 9)])]))
    config, path = small_config(token_budget=16), tmp_path / "rows.jsonl"

    class Maker:
        length, count, seed, steps = PROMPT, 1, 0, 512

    def plan(names, configs):
        return Plan(make_methods(names, [16]), configs, SMALL, path, quiet=True)

    assert run_task(subject, task, Maker(), plan(["streaming_llm", "oracle"], [])) == 3  # and the full cache
    assert run_task(subject, task, Maker(), plan(["streaming_llm", "oracle"], [])) == 0
    assert run_task(subject, task, Maker(), plan(["streaming_llm", "oracle"], [("ours", config)])) == 1
    assert run_task(subject, task, Maker(), plan([], [("ours", replace(config, spread=0.0))])) == 1
    rows = read_rows(path)
    assert [row["method"] for row in rows] == ["full", "streaming_llm", "oracle", "ours", "ours"]
    assert rows[1]["recovered"] in (0.0, None)
    assert rows[0]["change"]["nll"] == [0.0, 0.0, 0.0]
