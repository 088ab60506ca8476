"""Which block leaves the GPU cluster cache first: priorities over arrays.

A policy turns a slot's history (when it was last used, how often) into a number; the slot with the lowest number goes
first, ties by slot number. All arithmetic is in integers, so that every implementation orders alike, to the bit.
"""

from __future__ import annotations

import torch

POLICY_IDS = {"lru": 0, "lfu": 1, "lru_lfu": 2}

AGING_PERIOD = 64
"""Steps after which a use counts half in the frequency ("aged" LFU)."""

FREQUENCY_BONUS = 4
"""Steps of recency one aged use is worth under ``lru_lfu``."""

MAX_USES = 255
"""Uses are counted up to here."""


def aged_uses(uses: torch.Tensor, last_used: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """``uses`` halved once for every aging period that began since ``last_used``; int32, any shape."""
    periods = step // AGING_PERIOD - last_used // AGING_PERIOD
    return uses >> periods.clamp(0, 31)


def eviction_priority(policy: str, uses: torch.Tensor, last_used: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Priority to stay, int64: the lowest goes first.

    Args:
        policy: ``"lru"``: the least recently used goes first. ``"lfu"``: the one with the fewest aged uses, among
            equals the least recent. ``"lru_lfu"``: recency, with each aged use worth ``FREQUENCY_BONUS`` steps.
        uses: ``[rows, slots]`` int32 uses, aged to ``last_used``.
        last_used: ``[rows, slots]`` int32 step of the last use.
        step: ``[rows, 1]`` int32 the present step, at least ``last_used``.
    """
    if policy == "lru":
        return last_used.long()
    frequency = aged_uses(uses, last_used, step).long()
    if policy == "lfu":
        return (frequency << 32) + last_used
    if policy == "lru_lfu":
        return last_used + FREQUENCY_BONUS * frequency
    raise ValueError(f"policy: expected one of {', '.join(POLICY_IDS)}, got {policy!r}")
