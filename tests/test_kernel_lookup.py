"""Cluster-cache lookup: the reference against textbook caches, the Triton kernel against the reference."""

import pytest
import torch

from tiered_kv.kernels.count import COUNTERS, count_step, new_counters
from tiered_kv.kernels.dispatch import force_backend
from tiered_kv.kernels.lookup import SlotTables, assign_slots, assign_slots_reference, select_and_assign
from tiered_kv.kernels.select import Selection, select_clusters_reference
from tiered_kv.policies.replacement import AGING_PERIOD, FREQUENCY_BONUS, MAX_USES, POLICY_IDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POLICIES = sorted(POLICY_IDS)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


EVICTION_KEYS = {
    "lru": lambda last_used, uses: last_used,
    "lfu": lambda last_used, uses: (uses, last_used),
    "lru_lfu": lambda last_used, uses: last_used + FREQUENCY_BONUS * uses,
}


class TextbookCache:
    """One row, as a textbook would write it: slots in a dict, every use counted when it happens, aging by the clock."""

    def __init__(self, num_slots, policy):
        self.block_in, self.last_used, self.uses = {}, {}, {}
        self.empty = list(range(num_slots))
        self.key = EVICTION_KEYS[policy]
        self.step = 0

    def ask_for(self, blocks):
        """The slots of the blocks, and which blocks had to be fetched."""
        self.step += 1
        if self.step % AGING_PERIOD == 0:
            self.uses = {slot: uses // 2 for slot, uses in self.uses.items()}
        resident = {block: slot for slot, block in self.block_in.items()}
        missed = [block not in resident for block in blocks]
        in_use = {resident[block] for block in blocks if block in resident}
        leaving = sorted(
            (slot for slot in self.block_in if slot not in in_use),
            key=lambda slot: (self.key(self.last_used[slot], self.uses[slot]), slot),
        )
        for block, is_missed in zip(blocks, missed, strict=True):
            if is_missed:
                slot = resident[block] = self.empty.pop(0) if self.empty else leaving.pop(0)
                self.block_in[slot], self.uses[slot] = block, 0
        for block in blocks:
            slot = resident[block]
            self.last_used[slot] = self.step
            self.uses[slot] = min(self.uses[slot] + 1, MAX_USES)
        return [resident[block] for block in blocks], missed


def make_tables(rows, num_blocks, num_slots):
    def full(value, *shape):
        return torch.full(shape, value, dtype=torch.int32, device=DEVICE)

    return SlotTables(
        slot_of=full(-1, rows, num_blocks),
        block_in=full(-1, rows, num_slots),
        last_used=full(0, rows, num_slots),
        uses=full(0, rows, num_slots),
        step=full(0, rows),
    )


def make_request(rows, num_blocks, max_blocks, favourites=12):
    """Distinct blocks a row, padded; half of them from a few favourites, so that some hit and some are used often."""
    requests = torch.full((rows, max_blocks), -1, dtype=torch.int32)
    for row in requests:
        wanted = int(torch.randint(0, max_blocks + 1, ()))
        often = min(wanted // 2, favourites)
        blocks = [torch.randperm(favourites)[:often]]
        blocks.append(favourites + torch.randperm(num_blocks - favourites)[: wanted - often])
        row[:wanted] = torch.cat(blocks).sort().values
    return requests.to(DEVICE)


def clone(tables):
    return SlotTables(*(table.clone() for table in tables))


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_lru_in_a_tale():
    """Fill two slots, touch the first, ask for room: the second leaves."""
    tables = make_tables(1, 9, 2)

    def ask(block):
        slots, missed = assign_slots(
            tables, torch.tensor([[block, -1]], dtype=torch.int32, device=DEVICE), policy="lru"
        )
        return slots[0].tolist(), missed[0].tolist()

    assert ask(3) == ([0, -1], [True, False])
    assert ask(5) == ([1, -1], [True, False])
    assert ask(3) == ([0, -1], [False, False])
    assert ask(7) == ([1, -1], [True, False])
    assert tables.slot_of[0].tolist() == [-1, -1, -1, 0, -1, -1, -1, 1, -1]


@pytest.mark.parametrize("policy", POLICIES)
def test_reference_equals_a_textbook_cache(policy):
    rows, num_blocks, num_slots, max_blocks = 2, 60, 23, 14
    tables = make_tables(rows, num_blocks, num_slots)
    textbooks = [TextbookCache(num_slots, policy) for _ in range(rows)]
    for _ in range(4 * AGING_PERIOD):
        request = make_request(rows, num_blocks, max_blocks)
        slots, missed = assign_slots_reference(tables, request, policy=policy)
        for row, textbook in enumerate(textbooks):
            wanted = request[row][request[row] >= 0].tolist()
            expected_slots, expected_missed = textbook.ask_for(wanted)
            assert slots[row, : len(wanted)].tolist() == expected_slots
            assert missed[row, : len(wanted)].tolist() == expected_missed
            assert (slots[row, len(wanted) :] == -1).all()
            resident = {slot: block for slot, block in enumerate(tables.block_in[row].tolist()) if block >= 0}
            assert resident == textbook.block_in


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_slots", "max_blocks"), [(23, 14), (16, 16), (40, 5)])
def test_kernel_equals_reference(policy, num_slots, max_blocks):
    """Through the first fill and on; then across the step at which frequencies are halved."""
    pytest.importorskip("triton")
    tables = make_tables(2, 60, num_slots)
    steps = 4 * AGING_PERIOD if DEVICE == "cuda" else 6
    for step in range(steps):
        if step == steps // 2:
            for _ in range(AGING_PERIOD - steps // 2 - 2):
                assign_slots_reference(tables, make_request(2, 60, max_blocks), policy=policy)
        request, expected_tables = make_request(2, 60, max_blocks), clone(tables)
        with force_backend("triton"):
            got = assign_slots(tables, request, policy=policy)
        assert_equal(got, assign_slots_reference(expected_tables, request, policy=policy))
        assert_equal(tables, expected_tables)


def test_uses_are_counted_up_to_a_limit():
    pytest.importorskip("triton")
    tables = make_tables(1, 20, 8)
    request = make_request(1, 20, 8)
    assign_slots_reference(tables, request, policy="lfu")
    tables.uses.fill_(MAX_USES)
    with force_backend("triton"):
        assign_slots(tables, request, policy="lfu")
    assert tables.uses.max() == MAX_USES


def test_an_unknown_policy_is_refused():
    pytest.importorskip("triton")
    tables, request = make_tables(1, 20, 8), make_request(1, 20, 8)
    for backend in ("torch", "triton"):
        with force_backend(backend), pytest.raises(ValueError, match="policy: expected one of lru, lfu, lru_lfu"):
            assign_slots(tables, request, policy="fifo")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("has_extras", [False, True], ids=["plain", "hints and counters"])
def test_select_and_assign_is_both(policy, has_extras):
    pytest.importorskip("triton")
    tables = make_tables(2, 700, 50)
    sizes = torch.randint(1, 40, (2, 130), dtype=torch.int32, device=DEVICE)
    blocks = (sizes + 7) // 8
    first_blocks, starts = (x.cumsum(1, dtype=torch.int32) - x for x in (blocks, sizes))
    budget = {"token_budget": 200, "max_blocks": 33, "block_size": 8}
    scores = torch.randn(2, 130, device=DEVICE)
    hints = torch.zeros(2, dtype=torch.int32, device=DEVICE) if has_extras else None
    counters, expected_counters = (new_counters(DEVICE) if has_extras else None for _ in "ab")
    for _ in range(20 if DEVICE == "cuda" else 3):
        scores += torch.randn(2, 130, device=DEVICE) * 0.3
        expected_tables = clone(tables)
        with force_backend("triton"):
            selection, *assigned = select_and_assign(
                scores, sizes, starts, first_blocks, tables, hints, counters, **budget, policy=policy
            )
        with force_backend("torch"):
            expected, *expected_assigned = select_and_assign(
                scores, sizes, starts, first_blocks, expected_tables, hints, expected_counters, **budget, policy=policy
            )
        assert_equal(expected, select_clusters_reference(scores, sizes, starts, first_blocks, **budget))
        assert_equal(selection, expected)
        assert_equal(assigned, expected_assigned)
        assert_equal(tables, expected_tables)
        if has_extras:
            assert counters.tolist() == expected_counters.tolist()


def test_counters():
    """Two rows: one selects clusters 2 and 0 (three blocks, 11 tokens) and misses the last of them; one has nothing."""
    chosen = torch.tensor([[True, False, True], [False] * 3], device=DEVICE)
    lengths = torch.tensor([[4, 4, 3, 0], [0] * 4], dtype=torch.int32, device=DEVICE)
    missed = torch.tensor([[False, False, True, False], [False] * 4], device=DEVICE)
    counters = new_counters(DEVICE)
    for steps in (1, 2):
        count_step(counters, Selection(chosen, lengths, lengths, lengths), missed)
        assert dict(zip(COUNTERS, counters.tolist(), strict=True)) == {
            "lookups": 2 * steps,
            "selected_clusters": 2 * steps,
            "selected_tokens": 11 * steps,
            "selected_blocks": 3 * steps,
            "missed_blocks": steps,
            "recalled_tokens": 3 * steps,
        }
