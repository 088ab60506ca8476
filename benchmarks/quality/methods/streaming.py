"""StreamingLLM (arXiv 2309.17453): sinks and the newest tokens only."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.quality.methods.base import Method, budget_tensor


class StreamingLLM(Method):
    """The window is longer by the budget. Also the floor that ``recovered`` is measured from."""

    name = "streaming_llm"
    has_budget = True

    def select(self, state: Any, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        age = torch.arange(logits.shape[3] - 1, -1, -1, device=logits.device)
        return (age < budget_tensor(self.budgets, logits.device)).expand(logits.shape[0], -1, -1, -1)
