"""Quest (arXiv 2406.10774): fixed pages of 16 tokens, ranked by an upper bound of their logits.

A page keeps the smallest and largest value of each key channel; the bound is Σ_d max(q_d·min_d, q_d·max_d). Selection
is per query head, as published; unlike the paper, no layer is left dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.quality.methods.base import Method, Prompt, budget_tensor, dot


@dataclass
class Pages:
    """Pages of one layer: those of the prompt, shared by the rows, and those of later segments.

    Attributes:
        low: Smallest keys, ``[heads, pages, dim]`` and then ``[heads, rows, pages, dim]`` for each segment.
        high: Largest keys, likewise.
        page_of: ``[candidates]`` int64.
    """

    low: list[torch.Tensor]
    high: list[torch.Tensor]
    page_of: torch.Tensor


class Quest(Method):
    name = "quest"
    has_budget = True
    page_size = 16

    def settings(self) -> dict[str, Any]:
        return {"page_size": self.page_size}

    def start(self, prompt: Prompt) -> Pages:
        low, high, page_of = self._cut(prompt.keys)
        return Pages([low], [high], page_of)

    def absorb(self, state: Pages, keys: torch.Tensor, values: torch.Tensor) -> None:
        low, high, page_of = self._cut(keys)
        state.low.append(low)
        state.high.append(high)
        first = state.page_of[-1:] + 1 if len(state.page_of) else 0
        state.page_of = torch.cat([state.page_of, page_of + first])

    def select(self, state: Pages, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        bounds = self.bounds(state, query)
        best = bounds.argsort(dim=-1, descending=True)
        rank = torch.empty_like(best).scatter_(
            -1, best, torch.arange(best.shape[-1], device=best.device).expand_as(best)
        )
        taken = rank < budget_tensor(self.budgets, logits.device) // self.page_size
        return taken[..., state.page_of]

    def bounds(self, state: Pages, query: torch.Tensor) -> torch.Tensor:
        """``[heads, rows, group, pages]``."""
        up, down = query.clamp(min=0), query.clamp(max=0)
        parts = [dot(up, high) + dot(down, low) for low, high in zip(state.low, state.high, strict=True)]
        return torch.cat(parts, dim=3)

    def _cut(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Smallest and largest keys of consecutive pages, the last one perhaps short, and the page of each token."""
        tokens = keys.shape[-2]
        missing = -tokens % self.page_size
        padded = torch.cat([keys, keys[..., -1:, :].expand(*keys.shape[:-2], missing, -1)], dim=-2)
        low, high = padded.unflatten(-2, (-1, self.page_size)).aminmax(dim=-2)
        return low, high, torch.arange(tokens, device=keys.device) // self.page_size
