"""A tiered layer against the textbook: every token remembered, every step written out (tests/oracle.py)."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.oracle import Oracle, clusters_of
from tests.tiny import DEVICE, small_config
from tiered_kv.config import TieredKVConfig
from tiered_kv.layer import TieredLayer
from tiered_kv.lockstep import Lane
from tiered_kv.offload.streams import TransferEngine

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
SCALE = HEAD_DIM**-0.5
TOLERANCE = 1e-5
"""Float32 against float64: logits of up to 10 round by some 1e-6, weights by as much, relatively; values reach 5."""

SHORT = [0, 5, 70, 89]
"""Left padding of a 90-token prompt: none, less than the sinks and a few, more than a segment, all but one token."""

ALL = dict(dense_context=0)
BUDGET = dict(dense_context=0, token_budget=24)


class Pair:
    """A layer and its oracle, fed the same tokens and asked the same questions."""

    def __init__(
        self,
        config: TieredKVConfig,
        padding: list[int],
        value_dim: int = HEAD_DIM,
        seed: int = 0,
        **options,
    ) -> None:
        self.lane = Lane(DEVICE)
        self.layer = TieredLayer(config, self.lane.clock)
        self.oracle = Oracle(list(padding))
        self.value_dim, self.options = value_dim, options
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, heads: int, tokens: int, dim: int) -> torch.Tensor:
        batch = len(self.oracle.padding)
        return torch.randn(batch, heads, tokens, dim, generator=self.generator).to(DEVICE)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value; the keys of a sequence drift, so that neighbours resemble each other."""
        drift = self.draw(KV_HEADS, 1, HEAD_DIM)
        key = self.draw(KV_HEADS, count, HEAD_DIM) + drift
        return self.draw(KV_HEADS * GROUP, count, HEAD_DIM), key, self.draw(KV_HEADS, count, self.value_dim)

    def prefill(self, *chunks: int) -> Pair:
        """Take chunks; the attention to each has to be exact."""
        for count in chunks:
            query, key, value = self.tokens(count)
            if not self.layer.batch:
                self.layer.start(key, value)
                self.lane.members.append(self.layer)
            self.layer.add_chunk(key, value)
            self.oracle.add(key, value)
            if any(self.oracle.padding):
                self.layer.set_left_padding([min(p, self.layer.length) for p in self.oracle.padding])
            out = self.layer.attend_chunk(query, scale=SCALE, **self._asked())
            expected = self.oracle.exact(query, SCALE, *self.options.values())
            torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE, rtol=0)
        return self

    def decode(self, count: int) -> Pair:
        """Take single tokens; attention has to be what the budget allows, and the counters have to agree."""
        for _ in range(count):
            query, key, value = self.tokens(1)
            out = self.step(query, key, value)
            before = self.counters
            expected, clusters, tokens = self.oracle.budgeted(self.layer, query, SCALE, *self.options.values())
            torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE, rtol=0)
            if self.layer.config.token_budget >= self.oracle.length:
                exact = self.oracle.exact(query, SCALE, *self.options.values())
                torch.testing.assert_close(expected, exact, atol=1e-12, rtol=0)
            assert self.last_step["selected_clusters"] == clusters
            assert self.last_step["selected_tokens"] == tokens
            assert self.last_step["lookups"] == (self.layer.rows if self.layer.segments else 0)
            assert self.counters == before
        return self

    def step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        before = self.counters
        self.lane.begin_decode(self.layer)
        self.layer.append(key, value)
        self.oracle.add(key, value)
        out = self.layer.attend_token(query, scale=SCALE, **self._asked())
        self.last_step = {name: count - before[name] for name, count in self.counters.items()}
        return out

    @property
    def counters(self) -> dict[str, int]:
        from tiered_kv.kernels.count import COUNTERS

        return dict(zip(COUNTERS, self.layer.counters.tolist(), strict=True))

    def crop(self, tokens: int) -> Pair:
        self.layer.crop(tokens)
        self.oracle.crop(tokens)
        return self

    def select_sequences(self, sequences: list[int]) -> Pair:
        self.layer.select_sequences(sequences)
        self.oracle.select_sequences(sequences)
        return self

    def _asked(self) -> dict:
        names = {"softcap": "softcap", "sinks": "attention_sinks"}
        return {names[name]: value for name, value in self.options.items()}


@pytest.mark.parametrize("padding", [[0, 0], SHORT], ids=["no-padding", "left-padding"])
@pytest.mark.parametrize("chunks", [(90,), (44, 32, 14), (17, 2, 30, 41)], ids=str)
@pytest.mark.parametrize("options", [ALL, BUDGET, {}], ids=["all", "budget", "dense"])
def test_prefill_and_decode(options, chunks, padding):
    pair = Pair(small_config(**options), padding).prefill(*chunks).decode(20)
    assert len(pair.layer.segments) == (4 if options else 0)


@pytest.mark.parametrize("value_dim", [HEAD_DIM, 12])
@pytest.mark.parametrize("options", [ALL, BUDGET], ids=["all", "budget"])
def test_softcap_and_attention_sinks(options, value_dim):
    sinks = torch.linspace(-2, 3, KV_HEADS * GROUP, device=DEVICE)
    Pair(small_config(**options), [0, 3], value_dim, softcap=3.0, sinks=sinks).prefill(44, 20).decode(12)


@pytest.mark.parametrize(
    "options",
    [
        dict(estimate=False),
        dict(spread=0.0),
        dict(spread=1.0, spread_limit=0.05),
        dict(index_dtype="model"),
        dict(center_keys=False),
        dict(num_sink_tokens=0),
        dict(num_sink_tokens=20, decode_segment=8),
        dict(window_size=1, decode_segment=5),
        dict(block_size=3, max_cluster_tokens=7),
        dict(block_size=16, tokens_per_cluster=5),
        dict(tokens_per_cluster=8, max_cluster_tokens=24, block_size=24),  # blocks run out before tokens do
        dict(gpu_cache_size=1.0),
        dict(token_budget=8),
    ],
    ids=str,
)
def test_options(options):
    Pair(small_config(**BUDGET | options), [0, 9]).prefill(50).decode(30)


def test_clusters_hold_every_token_once_but_sinks_window_and_padding():
    pair = Pair(small_config(**BUDGET), SHORT).prefill(44, 46).decode(30)
    config, layer = pair.layer.config, pair.layer
    for row in range(layer.rows):
        first = SHORT[row // KV_HEADS] + config.num_sink_tokens
        positions = sorted(t for cluster in clusters_of(layer, row) for t in cluster.positions)
        assert positions == list(range(first, layer.clustered))
        assert max(cluster.size for cluster in clusters_of(layer, row)) <= config.max_cluster_tokens


def test_the_index_describes_the_tokens_in_the_store():
    pair = Pair(small_config(**BUDGET, index_dtype="model"), [0, 9]).prefill(90).decode(10)
    for row in range(pair.layer.rows):
        for cluster in clusters_of(pair.layer, row):
            if cluster.size:
                b, g = divmod(row, KV_HEADS)
                keys = torch.tensor(pair.oracle.keys[b, g, cluster.positions])
                values = torch.tensor(pair.oracle.values[b, g, cluster.positions])
                close = dict(atol=TOLERANCE, rtol=0)
                torch.testing.assert_close(torch.tensor(cluster.centroid), keys.mean(0), **close)
                torch.testing.assert_close(torch.tensor(cluster.mean_value), values.mean(0), **close)
                torch.testing.assert_close(torch.tensor(cluster.variance), keys.var(0, correction=0), **close)


def test_what_is_recalled_is_what_was_missed():
    pair = Pair(small_config(**BUDGET), [0, 0]).prefill(80).decode(1)
    assert pair.last_step["missed_blocks"] == pair.last_step["selected_blocks"] > 0
    assert pair.last_step["recalled_tokens"] == pair.last_step["selected_tokens"]
    query, key, value = pair.tokens(1)
    pair.step(query, key, value)
    pair.step(query, key, value)  # asks for the same clusters again
    assert pair.last_step["selected_tokens"] > 0
    assert pair.last_step["missed_blocks"] == pair.last_step["recalled_tokens"] == 0


PREFILL, DECODE = (44, 46), 45
CUTS = {
    "nothing": 0,
    "into the window": 3,
    "to an empty window": 19,
    "into the last decode segment": 22,
    "into an earlier decode segment": 45,
    "into a prefill segment": 75,
    "into the sinks": 133,
    "to nothing": 135,
}


def test_the_cuts_are_where_they_say():
    layer = Pair(small_config(**ALL), [0]).prefill(*PREFILL).decode(DECODE).layer
    assert layer.length == 135
    assert [(s.start, s.length) for s in layer.segments] == [(0, 36), (36, 32), (68, 16), (84, 16), (100, 16)]
    assert layer.window.length == 19


@pytest.mark.parametrize("padding", [[0, 0], SHORT], ids=["no-padding", "left-padding"])
@pytest.mark.parametrize("options", [ALL, BUDGET], ids=["all", "budget"])
@pytest.mark.parametrize("cut", CUTS)
def test_crop(cut, options, padding):
    pair = Pair(small_config(**options), padding).prefill(*PREFILL).decode(DECODE).crop(CUTS[cut])
    assert pair.layer.length == 135 - CUTS[cut]
    if not pair.layer.has_begun:
        pair.prefill(max(padding) + 9)
    pair.decode(26).prefill(50).decode(3)


def test_crop_into_the_window_leaves_no_trace():
    cut = Pair(small_config(**BUDGET), [0, 9]).prefill(*PREFILL).decode(DECODE)
    plain = Pair(small_config(**BUDGET), [0, 9]).prefill(*PREFILL).decode(DECODE)
    cut.decode(2).crop(2)
    for query, key, value in [plain.tokens(1) for _ in range(20)]:
        assert torch.equal(cut.step(query, key, value), plain.step(query, key, value))


@pytest.mark.parametrize("options", [ALL, BUDGET], ids=["all", "budget"])
def test_a_prompt_cropped_before_anything_was_decoded(options):
    """Segments come straight from prefill then, untrimmed, and all of them may go."""
    for left in (80, 50, 36, 5):
        pair = Pair(small_config(**options), [0, 3]).prefill(90).crop(90 - left).decode(30)
        assert pair.layer.length == left + 30


def test_a_prompt_cropped_to_a_window_with_room_is_trimmed_and_on_the_host():
    """The window is as large as decode steps want it, so that nothing else would call for room to be made."""
    pair = Pair(small_config(**BUDGET), [0]).prefill(36 + 24)
    assert pair.layer.window.capacity == 24
    untrimmed = pair.layer.index.num_clusters
    pair.crop(1).decode(1)
    assert pair.layer.index.num_clusters < untrimmed


class LateEngine(TransferEngine):
    """What a slow offload stream would do: copies land when somebody waits for them, and not before."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def offload(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self.under_way.append((source.clone(), destination))

    def finish_offloads(self) -> None:
        for source, destination in self.under_way:
            destination.copy_(source)
        self.under_way.clear()

    wait_for_offloads = finish_offloads

    def load(self, sources):
        for source in sources:
            self.finish_offloads()  # the load stream waits, the host does not
            yield source


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the copies are made to be late on the CPU")
@pytest.mark.parametrize(
    "then",
    [
        lambda pair: pair.decode(9),
        lambda pair: pair.select_sequences([1, 1, 0]).prefill(10),
        lambda pair: pair.select_sequences([1, 1, 0]).decode(9).prefill(10),
        lambda pair: pair.crop(1).decode(9),
        lambda pair: pair.crop(30).decode(9).select_sequences([1, 0]).crop(20).prefill(10),
    ],
    ids=["decode", "select-prefill", "select-decode", "crop", "crop-select-crop"],
)
def test_the_host_is_read_after_what_was_sent_there_has_landed(then, monkeypatch):
    from tiered_kv import layer

    engine = LateEngine()
    monkeypatch.setattr(layer, "engine_for", lambda device: engine)
    then(Pair(small_config(**BUDGET), [0, 3]).prefill(36 + 24))


def test_a_move_of_the_store_by_a_fork_is_noticed(monkeypatch):
    """A captured step of one cache reads the store at its old address until something says that it has changed."""
    from tiered_kv import layer

    monkeypatch.setattr(layer, "RESERVED_TOKENS", 1)
    pair = Pair(small_config(**BUDGET), [0]).prefill(90).decode(1)
    fork = copy.deepcopy(pair)
    before, addresses, moves = pair.layer.rebuilt, pair.layer.addresses(), pair.layer.store.moves
    while fork.layer.store.moves == moves:
        fork.prefill(500)
    assert pair.layer.store is fork.layer.store
    assert pair.layer.rebuilt != before
    assert pair.layer.addresses() != addresses
    pair.decode(30)


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: pair.layer.make_room(),
        lambda pair: pair.prefill(40),
        lambda pair: pair.crop(30),
        lambda pair: pair.select_sequences([1, 0, 1]),
        lambda pair: pair.decode(1),
    ],
    ids=["make-room", "prefill", "crop", "select", "decode"],
)
def test_a_fetch_ahead_is_waited_for_before_its_tables_change(change, monkeypatch):
    """It runs on a stream of its own; a step that raised leaves it behind."""
    from tiered_kv import layer

    class Engine(LateEngine):
        def mark(self):
            return "fetched"

        def wait_for(self, event):
            waited.append(event)

    engine, waited = Engine(), []
    monkeypatch.setattr(layer, "engine_for", lambda device: engine)
    pair = Pair(small_config(**BUDGET), [0, 3]).prefill(60).decode(2)
    query, _, _ = pair.tokens(1)
    pair.layer.fetch_ahead(query, query)
    change(pair)
    assert waited == ["fetched"]
    pair.decode(3)


def test_cropping_again_and_again():
    pair = Pair(small_config(**BUDGET), [0, 9]).prefill(60)
    for cut in (1, 7, 20, 3, 30):
        pair.decode(25).crop(cut).decode(2)


@pytest.mark.parametrize("options", [ALL, BUDGET, {}], ids=["all", "budget", "dense"])
def test_selected_sequences_go_on_as_if_they_had_been_alone(options):
    """Beam search: rows change places, are dropped and doubled, and are as if prefilled in their new order."""
    order = [2, 0, 0, 3]
    pair = Pair(small_config(**options), SHORT)
    fresh = Pair(small_config(**options), [SHORT[s] for s in order])
    steps = [pair.tokens(n) for n in (44, 46, *[1] * 20)]
    outs = [(feed(pair, *step), feed(fresh, *(t[order] for t in step))) for step in steps]
    assert all(torch.equal(out[order], other) for out, other in outs)
    pair.select_sequences(order)
    for step in [fresh.tokens(n) for n in [1] * 30 + [40] + [1] * 3]:
        assert torch.equal(feed(pair, *step), feed(fresh, *step))


def feed(pair: Pair, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if key.shape[2] == 1:
        return pair.step(query, key, value)
    if not pair.layer.batch:
        pair.layer.start(key, value)
        pair.lane.members.append(pair.layer)
    pair.layer.add_chunk(key, value)
    pair.oracle.add(key, value)
    if any(pair.oracle.padding):
        pair.layer.set_left_padding([min(p, pair.layer.length) for p in pair.oracle.padding])
    return pair.layer.attend_chunk(query, scale=SCALE)


@pytest.mark.parametrize("options", [ALL, BUDGET], ids=["all", "budget"])
def test_reordering_between_all_steps(options):
    pair = Pair(small_config(**options), SHORT).prefill(*PREFILL)
    for order in ([1, 0, 3, 2], [3, 3, 3, 0], [2, 1, 0, 3], [0, 1, 3], [2, 2, 1, 0, 0]):
        pair.decode(9).select_sequences(order).decode(9)
    pair.crop(70).decode(3)


def test_a_single_sequence_grows_into_beams_before_anything_is_clustered():
    Pair(small_config(**BUDGET), [0]).prefill(10).select_sequences([0, 0, 0]).decode(40)
