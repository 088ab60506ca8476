"""Methods that evict for good: H2O and SnapKV. What they drop can never be attended again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import avg_pool1d

from benchmarks.quality.methods.base import Method, Prompt, budget_tensor, top_tokens


@dataclass
class Received:
    """What H2O knows of a layer.

    Attributes:
        sums: ``[heads, rows, positions]`` float32 attention received so far, summed over the group.
        is_kept: ``[heads, rows, 1, candidates]`` bool.
        first: Position of the first candidate.
    """

    sums: torch.Tensor
    is_kept: torch.Tensor
    first: int


class H2O(Method):
    """H2O (arXiv 2306.14048): keep the tokens that received most attention since the prompt began, per KV head.

    The prompt's attention is summed exactly over all its queries; tokens compete when they leave the window, so several
    at a time instead of one a step.
    """

    name = "h2o"
    has_budget = True
    needs_sums = True

    def start(self, prompt: Prompt) -> Received:
        assert prompt.attention_sums is not None
        heads, tokens = prompt.attention_sums.shape
        sums = prompt.attention_sums.new_zeros(heads, self.rows, prompt.capacity)
        sums[..., :tokens] = prompt.attention_sums[:, None]
        candidates = prompt.keys.shape[1]
        everything = torch.ones(heads, self.rows, 1, candidates, dtype=torch.bool, device=sums.device)
        state = Received(sums, everything, prompt.first)
        self._evict(state)
        return state

    def absorb(self, state: Received, keys: torch.Tensor, values: torch.Tensor) -> None:
        fresh = state.is_kept.new_ones(*state.is_kept.shape[:3], keys.shape[2])
        state.is_kept = torch.cat([state.is_kept, fresh], dim=3)
        self._evict(state)

    def select(self, state: Received, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return state.is_kept

    def observe(self, state: Received, weights: torch.Tensor) -> None:
        state.sums += weights.sum(2)

    def _evict(self, state: Received) -> None:
        received = state.sums[:, :, None, state.first : state.first + state.is_kept.shape[3]]
        if received.shape[3]:
            state.is_kept &= top_tokens(received.masked_fill(~state.is_kept, -1.0), self.budgets)


@dataclass
class Ranked:
    """What SnapKV knows of a layer.

    Attributes:
        rank: ``[heads, 1, 1, candidates]`` of the prompt's tokens, 0 the best.
        generated: Candidates that came later.
    """

    rank: torch.Tensor
    generated: int = 0


class SnapKV(Method):
    """SnapKV (arXiv 2404.14469): keep the prompt's tokens that its last 64 queries attend to, pooled over neighbours.

    Scores are the mean over the group and the window of queries, one choice per KV head, as in kvpress. Generated
    tokens are kept as published; to stay within the budget they take the place of the prompt's lowest ranks.
    """

    name = "snapkv"
    has_budget = True
    needs_attention = True
    kernel_size = 5
    queries = 64

    def settings(self) -> dict[str, Any]:
        return {"kernel_size": self.kernel_size, "queries": self.queries}

    def start(self, prompt: Prompt) -> Ranked:
        assert prompt.attention is not None
        if not prompt.keys.shape[1]:
            return Ranked(prompt.attention.new_zeros(prompt.keys.shape[0], 1, 1, 0).long())
        mean = prompt.attention[:, :, -self.queries :].mean((1, 2))
        pooled = avg_pool1d(mean[:, None], self.kernel_size, stride=1, padding=self.kernel_size // 2)[:, 0]
        best = pooled.argsort(dim=1, descending=True)
        place = torch.arange(best.shape[1], device=best.device).expand_as(best)
        return Ranked(torch.empty_like(best).scatter_(1, best, place)[:, None, None])

    def absorb(self, state: Ranked, keys: torch.Tensor, values: torch.Tensor) -> None:
        state.generated += keys.shape[2]

    def select(self, state: Ranked, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        budgets = budget_tensor(self.budgets, logits.device)
        prompt = state.rank < budgets - state.generated
        age = torch.arange(state.generated - 1, -1, -1, device=logits.device)
        later = (age < budgets).expand(logits.shape[0], -1, -1, -1)
        return torch.cat([prompt, later], dim=3)
