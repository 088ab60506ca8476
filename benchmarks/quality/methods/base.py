"""What a cache compression method is to the research attention: a choice among the candidates of every decode step.

Shapes: ``heads`` are KV heads, ``group`` the query heads that share one, ``rows`` the batch rows of the method, one for
each budget. Candidates are the tokens between sinks and window, oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """What the shared prefill leaves behind in one layer.

    Attributes:
        keys: ``[heads, candidates, head_dim]`` after RoPE; candidates only.
        values: ``[heads, candidates, value_dim]``.
        queries: ``[heads, group, queries, head_dim]`` the prompt's last queries, oldest first.
        attention: ``[heads, group, queries, candidates]`` probabilities of these queries, or ``None`` unless asked for.
        attention_sums: ``[heads, prompt tokens]`` attention each token received from all prompt queries, or ``None``.
        first: Position of the first candidate.
        capacity: Positions the sequence can grow to.
        scale: Factor of q·k.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    attention: torch.Tensor | None
    attention_sums: torch.Tensor | None
    first: int
    capacity: int
    scale: float


class Method:
    """One way to attend to fewer tokens; this base class attends to all.

    ``start`` is called for every layer after the prefill and returns what the method keeps about that layer; the other
    verbs receive it back. A method of one row a budget; a method without a budget has the single budget 0.

    Args:
        budgets: Candidates attended per KV head (per query head where the method selects so), one row each.
    """

    name = "full"
    has_budget = False
    needs_attention = False
    """Whether ``Prompt.attention`` is read."""
    needs_sums = False
    """Whether ``Prompt.attention_sums`` is read."""

    def __init__(self, budgets: Sequence[int] = (0,)) -> None:
        self.budgets = tuple(budgets)

    @property
    def rows(self) -> int:
        return len(self.budgets)

    def settings(self) -> dict[str, Any]:
        """Everything but the budget that tells this method's rows from another's."""
        return {}

    def start(self, prompt: Prompt) -> Any:
        """What to keep about a layer."""

    def select(self, state: Any, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | None:
        """The candidates attended in this step.

        Args:
            state: What ``start`` returned.
            query: ``[heads, rows, group, head_dim]`` float32.
            logits: ``[heads, rows, group, candidates]`` float32 exact logits.

        Returns:
            ``[heads, rows, group or 1, candidates]`` bool; ``None`` for all.
        """

    def rest(self, state: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """An estimate of what was not selected: its log-weight ``[heads, rows, group, 1]`` and its mean value
        ``[heads, rows, group, value_dim]``; ``None`` for no estimate."""

    def observe(self, state: Any, weights: torch.Tensor) -> None:
        """See the step's attention ``[heads, rows, group, positions]``."""

    def absorb(self, state: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take the tokens that left the window, ``[heads, rows, tokens, dim]``, as candidates after the present ones.

        Returns:
            What their keys and values become, or ``None`` when they stay as they are.
        """

    def own_prompt(self, state: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Candidates' keys and values ``[heads, candidates, dim]`` to attend to in place of the shared ones."""


@lru_cache(maxsize=64)
def budget_tensor(budgets: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """``[rows, 1, 1]`` int64, to compare with ranks ``[heads, rows, group, places]``; made once, as a captured step may
    not read host memory."""
    return torch.tensor(budgets, device=device)[:, None, None]


def top_tokens(scores: torch.Tensor, budgets: tuple[int, ...]) -> torch.Tensor:
    """The best candidates of each row.

    Args:
        scores: ``[heads, rows, group or 1, candidates]``.
        budgets: Candidates to take, for each row.

    Returns:
        The same shape, bool.
    """
    count = min(max(budgets), scores.shape[-1])
    best = scores.topk(count, dim=-1).indices
    taken = torch.arange(count, device=scores.device) < budget_tensor(budgets, scores.device)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, taken.expand_as(best))


def dot(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[heads, rows, group, n]`` products of ``[heads, rows, group, dim]`` with ``[heads, n, dim]`` that rows share,
    or with ``[heads, rows, n, dim]``, in float32."""
    if keys.dim() == 4:
        return torch.matmul(query, keys.float().transpose(2, 3))
    heads, rows, group, dim = query.shape
    flat = torch.matmul(query.reshape(heads, rows * group, dim), keys.float().transpose(1, 2))
    return flat.view(heads, rows, group, -1)


def mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[heads, rows, group, dim]``: weights ``[heads, rows, group, n]`` applied to values shaped as in :func:`dot`."""
    return dot(weights, values.transpose(-1, -2))


class TokenTopK(Method):
    """Base of methods that score single tokens and take the best.

    Attributes:
        per_query_head: Each query head takes its own; otherwise the maximum over the group decides for all of it.
    """

    has_budget = True
    per_query_head = False

    def scores(self, state: Any, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``[heads, rows, group, candidates]``."""
        raise NotImplementedError

    def select(self, state: Any, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        scores = self.scores(state, query, logits)
        return top_tokens(scores if self.per_query_head else scores.amax(2, keepdim=True), self.budgets)
