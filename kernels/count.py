"""Counters on the device: what decode steps selected and recalled, without a word to the host."""

from __future__ import annotations

import torch

COUNTERS = (
    "lookups",
    "selected_clusters",
    "selected_tokens",
    "selected_blocks",
    "missed_blocks",
    "recalled_tokens",
)


def new_counters(device: torch.device) -> torch.Tensor:
    """``[len(COUNTERS)]`` int64 zeros; a lookup is one row of one step."""
    return torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)


def count_step(counters: torch.Tensor, chosen: torch.Tensor, lengths: torch.Tensor, missed: torch.Tensor) -> None:
    """Add one step of one layer to ``counters``.

    Args:
        counters: ``[len(COUNTERS)]`` int64, updated in place.
        chosen: ``[rows, clusters]`` bool clusters selected.
        lengths: ``[rows, max_blocks]`` int32 tokens of the selected blocks, 0 in the padding.
        missed: ``[rows, max_blocks]`` bool blocks recalled.
    """
    rows = torch.full((), chosen.shape[0], dtype=torch.int64, device=counters.device)
    recalled = torch.where(missed, lengths, 0)
    counters += torch.stack(
        [rows, chosen.sum(), lengths.sum(), (lengths > 0).sum(), missed.sum(), recalled.sum()]
    )
