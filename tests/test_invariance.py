"""With a small budget tokens differ from the full cache's, but not with anything that only changes time."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import DEVICE, LOGITS_TOLERANCE, generate, make_model, ones, padded_prompt, prompt, small_config
from tiered_kv import TieredCache, dispatch_kv_cache

NEW_TOKENS = 40
BUDGET = dict(token_budget=24, dense_context=0)
FAMILIES = ["llama", "gemma3_text"]
UNROUNDED = dict(index_dtype="model")
"""For comparisons of sums in another order: where a mean lies between two integers, an int8 index turns 1e-7 of it into
1e-4 of the logits, which depends on the device's rounding."""


def inputs() -> dict[str, torch.Tensor]:
    return padded_prompt(150, [0, 41, 143])


def run(family: str, prompts: dict[str, torch.Tensor] | None = None, cache: TieredCache | None = None, **options):
    """Tokens, logits and the cache's statistics."""
    model = dispatch_kv_cache(make_model(family), small_config(**BUDGET | options))
    given = {} if cache is None else {"past_key_values": cache}
    tokens, logits = generate(model, inputs() if prompts is None else prompts, NEW_TOKENS, **given)
    return tokens, logits, model.kv_cache_stats()


def assert_identical(one, other) -> None:
    """The same bits: the same numbers were added in the same order."""
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_budget_matters(family):
    """Otherwise nothing below would prove anything."""
    small, full = run(family), run(family, token_budget=256)
    assert (small[1][:, 0] - full[1][:, 0]).abs().max() < LOGITS_TOLERANCE  # prefill is exact
    assert (small[1] - full[1]).abs().max() > 100 * LOGITS_TOLERANCE
    assert small[2]["tokens_per_lookup"] <= 24 < full[2]["tokens_per_lookup"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [dict(policy="lfu"), dict(policy="lru_lfu"), dict(gpu_cache_size=1.0), dict(gpu_cache_size=9.0)],
    ids=str,
)
def test_the_cluster_cache_never_changes_a_token(family, options):
    plain, other = run(family, policy="lru", gpu_cache_size=2.0), run(family, **options)
    assert_identical(plain, other)
    for count in ("lookups", "selected_clusters", "selected_tokens"):
        assert plain[2][count] == other[2][count]


def test_a_larger_cache_recalls_less():
    recalled = [run("llama", gpu_cache_size=size)[2]["recalled_bytes"] for size in (1.0, 2.0, 9.0)]
    assert recalled[0] > recalled[1] > recalled[2] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_cache_that_is_poisoned_never_changes_a_token(family, monkeypatch):
    """Fresh slots full of NaN: none is read before it was written."""
    from tiered_kv.offload.cluster_cache import ClusterCache

    plain = run(family)
    make = ClusterCache.__init__

    def make_poisoned(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.slots.fill_(float("nan"))

    monkeypatch.setattr(ClusterCache, "__init__", make_poisoned)
    assert_identical(plain, run(family))


def test_the_place_of_segments_on_the_host_never_changes_a_token(monkeypatch):
    """Other segments, of a fork and of nobody, lie between ours; the store moves to larger reservations on the way."""
    from tiered_kv import layer
    from tiered_kv.offload.host_store import HostStore

    plain = run("llama")
    append = HostStore.append
    count = iter(range(10**6))

    def append_among_others(self, tokens, positions):
        junk = torch.full((1, 7 * (next(count) % 5 + 1), self.width), float("nan"), device=DEVICE)
        append(self, junk, torch.full(junk.shape[:2], -1, dtype=torch.int32, device=DEVICE))
        first = append(self, tokens, positions)
        append(self, junk, torch.full(junk.shape[:2], -1, dtype=torch.int32, device=DEVICE))
        moves.append(self.moves)
        return first

    moves: list[int] = []
    monkeypatch.setattr(HostStore, "append", append_among_others)
    monkeypatch.setattr(layer, "RESERVED_TOKENS", 1)
    monkeypatch.setattr(layer.TieredLayer, "_tiers", _tiers_of_small_slabs(layer.TieredLayer._tiers))
    assert_identical(plain, run("llama"))
    assert max(moves) >= 1


def _tiers_of_small_slabs(tiers):
    def made(self):
        store, cluster_cache = tiers(self)
        store._slab_tokens = 1
        return store, cluster_cache

    return made


def test_forks_of_a_cache_do_not_see_each_other():
    """Two copies of a prefilled cache append to one store in turns; each is as if alone."""
    import copy

    model = dispatch_kv_cache(make_model(), small_config(**BUDGET))
    ids, ends = prompt(110), [prompt(40, seed=s) for s in (1, 2)]
    with torch.no_grad():
        cache = TieredCache(model.config, model._tiered_kv.config)
        model(ids, past_key_values=cache)
        forks = [copy.deepcopy(cache) for _ in ends]
        outs: list[list[torch.Tensor]] = [[], []]
        for t in range(40):
            for fork, end, out in zip(forks, ends, outs, strict=True):
                out.append(model(end[:, t : t + 1], past_key_values=fork).logits)
        for end, out in zip(ends, outs, strict=True):
            alone = TieredCache(model.config, model._tiered_kv.config)
            model(ids, past_key_values=alone)
            expected = [model(end[:, t : t + 1], past_key_values=alone).logits for t in range(40)]
            assert torch.equal(torch.cat(out), torch.cat(expected))
    assert forks[0].group.layers[0].store is forks[1].group.layers[0].store


@pytest.mark.parametrize("kind", ["single", "left-padded"])
def test_chunks_at_segment_boundaries_never_change_a_token(kind):
    """Chunks add the same numbers in another order; clusters, and with them tokens, stay the same."""
    prompts = ones(prompt(150)) if kind == "single" else inputs()
    pieces = [run("llama", prompts, prefill_chunk=size, **UNROUNDED) for size in (1024, 32, 64)]
    for tokens, logits, stats in pieces[1:]:
        assert torch.equal(tokens, pieces[0][0])
        torch.testing.assert_close(logits, pieces[0][1], atol=LOGITS_TOLERANCE, rtol=0)
        # Two clusters at the end of a budget may be as good as tied.
        assert stats["selected_tokens"] == pytest.approx(pieces[0][2]["selected_tokens"], rel=0.01)


def test_prefill_by_hand_at_any_boundary_never_changes_a_token():
    tokens, logits, _ = run("llama", ones(prompt(150)), prefill_chunk=1024, **UNROUNDED)
    model = dispatch_kv_cache(make_model(), small_config(**BUDGET, **UNROUNDED))
    cache = TieredCache(model.config, model._tiered_kv.config)
    ids = prompt(150)
    with torch.no_grad():
        for start, end in [(0, 1), (1, 4), (4, 61), (61, 63), (63, 148)]:
            model(ids[:, start:end], past_key_values=cache)
    other, other_logits = generate(model, ones(ids), NEW_TOKENS, past_key_values=cache)
    assert torch.equal(other, tokens)
    torch.testing.assert_close(other_logits, logits, atol=LOGITS_TOLERANCE, rtol=0)


def test_a_run_repeats_to_the_bit():
    assert_identical(run("llama"), run("llama"))


def test_sequences_of_a_batch_do_not_see_each_other():
    """A row alone is as in the batch, but for the order of sums in matrix products of another shape."""
    batch = run("llama", inputs(), **UNROUNDED)
    for row, padding in enumerate([0, 41, 143]):
        alone = {name: rows[row : row + 1] for name, rows in inputs().items()}
        tokens, logits, _ = run("llama", alone, **UNROUNDED)
        assert torch.equal(tokens[0], batch[0][row]), padding
        torch.testing.assert_close(logits[0], batch[1][row], atol=LOGITS_TOLERANCE, rtol=0)
