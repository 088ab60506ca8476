"""Every baseline of the quality benchmark against a textbook version in loops."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.quality.methods import BASELINES, make_methods
from benchmarks.quality.methods.base import Prompt
from benchmarks.quality.methods.clusters import CLUSTERKV, ClusterOptions, Clusters
from benchmarks.quality.methods.evicting import H2O, SnapKV
from benchmarks.quality.methods.infinigen import InfiniGen
from benchmarks.quality.methods.oracle import Oracle, OraclePerQueryHead
from benchmarks.quality.methods.quantise import quantised_keys, quantised_values
from benchmarks.quality.methods.quantised import QuantisedTopK
from benchmarks.quality.methods.quest import Quest
from benchmarks.quality.methods.streaming import StreamingLLM

HEADS, GROUP, TOKENS, DIM, FIRST = 2, 3, 137, 8, 4
BUDGETS = (20, 48)
SCALE = DIM**-0.5


@pytest.fixture
def prompt() -> Prompt:
    torch.manual_seed(0)
    keys, values = torch.randn(2, HEADS, TOKENS, DIM)
    queries = torch.randn(HEADS, GROUP, 100, DIM)
    attention = torch.rand(HEADS, GROUP, 64, TOKENS)
    sums = torch.rand(HEADS, FIRST + TOKENS + 5)
    return Prompt(keys, values, queries, attention, sums, FIRST, 400, SCALE)


def step(prompt: Prompt, more: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A query for each row and its exact logits, also for keys ``[heads, rows, n, dim]`` that came later."""
    query = torch.randn(HEADS, len(BUDGETS), GROUP, DIM)
    keys = prompt.keys[:, None].expand(-1, len(BUDGETS), -1, -1)
    keys = keys if more is None else torch.cat([keys, more], dim=2)
    return query, query @ keys.transpose(2, 3) * SCALE


def best(scores, count) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda i: -float(scores[i]))[:count])


def chosen(mask) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def test_oracle_takes_the_largest_logits(prompt):
    query, logits = step(prompt)
    for method in (Oracle(BUDGETS), OraclePerQueryHead(BUDGETS)):
        mask = method.select(None, query, logits)
        for h in range(HEADS):
            for r, budget in enumerate(BUDGETS):
                for g in range(mask.shape[2]):
                    scores = logits[h, r, g] if method.per_query_head else logits[h, r].amax(0)
                    assert chosen(mask[h, r, g]) == best(scores, budget)


def test_streaming_takes_the_newest(prompt):
    mask = StreamingLLM(BUDGETS).select(None, *step(prompt))
    for r, budget in enumerate(BUDGETS):
        assert chosen(mask[1, r, 0]) == set(range(TOKENS - budget, TOKENS))


def test_quest_takes_the_pages_with_the_largest_bound(prompt):
    method = Quest(BUDGETS)
    later = torch.randn(HEADS, len(BUDGETS), 40, DIM)
    state = method.start(prompt)
    method.absorb(state, later, later)
    query, logits = step(prompt, later)
    mask = method.select(state, query, logits)
    for h, r, g in ((0, 0, 0), (1, 1, 2)):
        pages = [list(range(p, min(p + 16, TOKENS))) for p in range(0, TOKENS, 16)]
        pages += [list(range(p, min(p + 16, TOKENS + 40))) for p in range(TOKENS, TOKENS + 40, 16)]
        keys = torch.cat([prompt.keys[h], later[h, r]])
        bounds = [max_dot(query[h, r, g], keys[page]) for page in pages]
        expected = {token for page in best(bounds, BUDGETS[r] // 16) for token in pages[page]}
        assert chosen(mask[h, r, g]) == expected


def max_dot(q, keys) -> float:
    return sum(max(float(q[d] * keys[:, d].min()), float(q[d] * keys[:, d].max())) for d in range(DIM))


def test_infinigen_ranks_by_the_largest_skewed_channels(prompt):
    method = InfiniGen(BUDGETS)
    query, logits = step(prompt)
    mask = method.select(method.start(prompt), query, logits)
    for h in range(HEADS):
        flat = prompt.queries[h].reshape(-1, DIM)
        rotation = torch.linalg.svd(flat).Vh.T
        size = (flat @ rotation).abs().mean(0) + (prompt.keys[h] @ rotation).abs().mean(0)
        channels = sorted(range(DIM), key=lambda d: -float(size[d]))[: round(0.3 * DIM)]
        partial = (query[h, 1, 2] @ rotation)[channels] @ (prompt.keys[h] @ rotation)[:, channels].T
        assert chosen(mask[h, 1, 2]) == best(partial, BUDGETS[1])


def test_int2_topk_ranks_by_restored_keys(prompt):
    method = QuantisedTopK(BUDGETS)
    later = torch.randn(HEADS, len(BUDGETS), 40, DIM)
    state = method.start(prompt)
    method.absorb(state, later, later)
    query, logits = step(prompt, later)
    mask = method.select(state, query, logits)
    keys = torch.cat([quantised_keys(prompt.keys[0], 2), quantised_keys(later[0, 1], 2)])
    assert chosen(mask[0, 1, 0]) == best((query[0, 1] @ keys.T).amax(0), BUDGETS[1])


def test_snapkv_keeps_what_the_last_queries_attend_to(prompt):
    method = SnapKV(BUDGETS)
    state = method.start(prompt)
    query, logits = step(prompt)
    mean = prompt.attention[1].mean((0, 1))
    padded = torch.cat([torch.zeros(2), mean, torch.zeros(2)])
    pooled = [float(padded[i : i + 5].sum()) / 5 for i in range(TOKENS)]
    for r, budget in enumerate(BUDGETS):
        assert chosen(method.select(state, query, logits)[1, r, 0]) == best(pooled, budget)
    later = torch.randn(HEADS, len(BUDGETS), 10, DIM)
    method.absorb(state, later, later)
    mask = method.select(state, *step(prompt, later))
    assert chosen(mask[1, 0, 0]) == best(pooled, BUDGETS[0] - 10) | set(range(TOKENS, TOKENS + 10))


def test_h2o_never_takes_back_what_it_evicted(prompt):
    method = H2O(BUDGETS)
    state = method.start(prompt)
    query, logits = step(prompt)
    received = prompt.attention_sums[:, FIRST:]
    kept = [best(received[0, :TOKENS], budget) for budget in BUDGETS]
    assert [chosen(method.select(state, query, logits)[0, r, 0]) for r in range(2)] == kept
    weights = torch.rand(HEADS, len(BUDGETS), GROUP, 400)
    method.observe(state, weights)
    later = torch.randn(HEADS, len(BUDGETS), 30, DIM)
    method.absorb(state, later, later)
    mask = method.select(state, *step(prompt, later))
    for r, budget in enumerate(BUDGETS):
        total = torch.zeros(400)
        total[: FIRST + TOKENS + 5] = prompt.attention_sums[0]
        total += weights[0, r].sum(0)
        alive = kept[r] | set(range(TOKENS, TOKENS + 30))
        survivors = sorted(alive, key=lambda i: -float(total[FIRST + i]))[:budget]
        assert chosen(mask[0, r, 0]) == set(survivors)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_rounds_to_the_grid_of_its_group(bits):
    torch.manual_seed(1)
    keys, values = torch.randn(2, 70, 64)
    levels = 2**bits - 1
    for begin, end in ((0, 32), (32, 64), (64, 70)):
        group = keys[begin:end, 5]
        grid = group.min() + torch.arange(levels + 1) * (group.max() - group.min()) / levels
        nearest = grid[(group[:, None] - grid).abs().argmin(1)]
        torch.testing.assert_close(quantised_keys(keys, bits)[begin:end, 5], nearest)
    group = values[7, 32:64]
    grid = group.min() + torch.arange(levels + 1) * (group.max() - group.min()) / levels
    nearest = grid[(group[:, None] - grid).abs().argmin(1)]
    torch.testing.assert_close(quantised_values(values, bits)[7, 32:64], nearest)


def cluster_members(state, h, r) -> list[list[int]]:
    """Tokens of each cluster, in order of their number within it."""
    members = [[] for _ in range(state.sizes.shape[3])]
    cluster, place = state.cluster_of[h, r, 0].tolist(), state.place[h, r, 0].tolist()
    for token in sorted(range(len(cluster)), key=lambda t: place[t]):
        members[cluster[token]].append(token)
    assert [len(m) for m in members] == state.sizes[h, r, 0].tolist()
    return members


def test_clusterkv_spends_the_budget_to_the_token(prompt):
    method = Clusters(BUDGETS, "clusterkv", CLUSTERKV)
    state = method.start(prompt)
    query, logits = step(prompt)
    mask = method.select(state, query, logits)
    assert (mask.sum(3) == torch.tensor(BUDGETS)[:, None]).all()
    members = cluster_members(state, 0, 1)
    means = [prompt.keys[0][m].mean(0) if m else None for m in members]
    scores = [float(query[0, 1, 2] @ mean) if mean is not None else -math.inf for mean in means]
    ranked = [token for c in sorted(range(len(scores)), key=lambda c: -scores[c]) for token in members[c]]
    assert chosen(mask[0, 1, 2]) == set(ranked[: BUDGETS[1]])


def test_our_simulation_stops_at_the_first_cluster_that_does_not_fit_and_estimates_the_rest(prompt):
    options = ClusterOptions(spread=0.0, index_int8=False, tokens_per_cluster=6, max_cluster_tokens=10)
    method = Clusters(BUDGETS, "ours_sim", options)
    later = torch.randn(HEADS, len(BUDGETS), 40, DIM)
    state = method.start(prompt)
    method.absorb(state, later, later)
    query, logits = step(prompt, later)
    mask = method.select(state, query, logits)
    h, r = 1, 0
    keys, values = torch.cat([prompt.keys[h], later[h, r]]), torch.cat([prompt.values[h], later[h, r]])
    members = cluster_members(state, h, r)
    scores = {c: float((query[h, r] @ keys[m].mean(0)).max()) for c, m in enumerate(members) if m}
    taken: set[int] = set()
    rest = set(scores)
    for c in sorted(scores, key=lambda c: -scores[c]):
        if len(taken) + len(members[c]) > BUDGETS[r]:
            break
        taken |= set(members[c])
        rest.remove(c)
    assert chosen(mask[h, r, 0]) == taken
    weight, mean = method.rest(state, query)
    for g in range(GROUP):
        mass = {c: len(members[c]) * math.exp(SCALE * float(query[h, r, g] @ keys[members[c]].mean(0))) for c in rest}
        assert float(weight[h, r, g, 0]) == pytest.approx(math.log(sum(mass.values())), abs=1e-4)
        expected = sum(m * values[members[c]].mean(0) for c, m in mass.items()) / sum(mass.values())
        torch.testing.assert_close(mean[h, r, g], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BASELINES)
def test_no_method_exceeds_its_budget(prompt, name):
    (method,) = make_methods([name], BUDGETS)
    state = method.start(prompt)
    mask = method.select(state, *step(prompt))
    if not method.has_budget:
        assert mask is None
    elif name not in ("quest", "ours_sim"):  # these take whole pages or clusters
        assert (mask.sum(3) == torch.tensor(BUDGETS)[:, None]).all()
    else:
        assert (mask.sum(3) <= torch.tensor(BUDGETS)[:, None]).all()


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="unknown method 'qest'"):
        make_methods(["qest"], BUDGETS)
