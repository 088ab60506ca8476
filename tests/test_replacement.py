"""Who leaves the GPU cluster cache first: short tales of four slots and who slept in them."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import DEVICE
from tiered_kv.kernels.lookup import SlotTables, assign_slots
from tiered_kv.policies.replacement import AGING_PERIOD, FREQUENCY_BONUS, MAX_USES, eviction_priority

ANNA, BERT, CLEO, DORA, EMIL = range(5)
NAMES = ["Anna", "Bert", "Cleo", "Dora", "Emil"]


class Inn:
    """A cache of four slots, in which guests ask for a bed night by night."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.tables = SlotTables(
            slot_of=torch.full((1, len(NAMES)), -1, dtype=torch.int32, device=DEVICE),
            block_in=torch.full((1, 4), -1, dtype=torch.int32, device=DEVICE),
            last_used=torch.zeros(1, 4, dtype=torch.int32, device=DEVICE),
            uses=torch.zeros(1, 4, dtype=torch.int32, device=DEVICE),
            step=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )

    def night(self, *guests: int) -> set[str]:
        """Let these guests sleep here, and tell who had to leave."""
        before = self.guests
        blocks = torch.tensor([[*guests, -1][:4]], dtype=torch.int32, device=DEVICE)
        assign_slots(self.tables, blocks, policy=self.policy)
        return before - self.guests

    def nights(self, count: int, *guests: int) -> None:
        for _ in range(count):
            self.night(*guests)

    @property
    def guests(self) -> set[str]:
        return {NAMES[b] for b in self.tables.block_in[0].tolist() if b >= 0}


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru_lfu"])
def test_nobody_leaves_while_a_bed_is_free(policy):
    inn = Inn(policy)
    assert inn.night(ANNA, BERT, CLEO) == set()
    assert inn.night(DORA) == set()
    assert inn.guests == {"Anna", "Bert", "Cleo", "Dora"}


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru_lfu"])
def test_nobody_who_sleeps_here_tonight_leaves_tonight(policy):
    inn = Inn(policy)
    inn.night(ANNA)
    inn.nights(9, BERT, CLEO, DORA)
    assert inn.night(ANNA, EMIL) & {"Anna"} == set()


@pytest.mark.parametrize("policy", ["lru", "lfu", "lru_lfu"])
def test_among_equals_the_first_bed_is_cleared(policy):
    inn = Inn(policy)
    inn.night(ANNA, BERT, CLEO, DORA)
    assert inn.night(EMIL) == {"Anna"}


def test_lru_who_stayed_away_longest_leaves():
    inn = Inn("lru")
    inn.nights(9, ANNA)
    inn.night(BERT, CLEO, DORA)
    inn.night(CLEO, DORA)
    inn.night(ANNA)
    assert inn.night(EMIL) == {"Bert"}


def test_lfu_who_came_least_leaves_though_they_came_last():
    inn = Inn("lfu")
    inn.nights(5, ANNA)
    inn.nights(4, BERT, CLEO)
    inn.night(DORA)
    assert inn.night(EMIL) == {"Dora"}


def test_lfu_old_glory_fades():
    inn = Inn("lfu")
    inn.nights(40, ANNA)
    inn.nights(5 * AGING_PERIOD, BERT)  # Anna's 40 nights count 40 >> 5 = 1 by now
    inn.nights(3, CLEO, DORA)
    assert inn.night(EMIL) == {"Anna"}


def test_lru_lfu_a_regular_is_missed_for_longer_than_a_passer_by():
    inn = Inn("lru_lfu")
    inn.nights(3, ANNA)  # last seen in night 3, but three times
    inn.night(BERT, CLEO, DORA)  # seen in night 4, once
    inn.nights(2, CLEO, DORA)
    assert inn.night(EMIL) == {"Bert"}


def test_lru_lfu_but_not_for_ever():
    inn = Inn("lru_lfu")
    inn.nights(3, ANNA)
    inn.night(BERT)
    away = 2 * FREQUENCY_BONUS + 2
    inn.nights(away, CLEO, DORA)
    inn.night(BERT)  # twice now, and just back
    assert inn.night(EMIL) == {"Anna"}


def test_uses_are_counted_up_to_a_bound():
    inn = Inn("lfu")
    for _ in range(MAX_USES + 20):
        inn.tables.step.fill_(0)  # no night passes, so nothing ages
        inn.night(ANNA)
    assert inn.tables.uses.max() == MAX_USES


def test_an_unknown_policy_is_named():
    zeros = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected one of lru, lfu, lru_lfu, got 'fifo'"):
        eviction_priority("fifo", zeros, zeros, zeros[:, :1])
