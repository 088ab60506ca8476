"""Exact top-k: what no method that selects by estimated scores can beat by much."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.quality.methods.base import TokenTopK


class Oracle(TokenTopK):
    """The candidates with the largest exact logits, by the maximum over the group."""

    name = "oracle"

    def scores(self, state: Any, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits


class OraclePerQueryHead(Oracle):
    """The same for every query head on its own: up to ``group`` times the traffic."""

    name = "oracle_q"
    per_query_head = True
