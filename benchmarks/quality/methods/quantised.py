"""Methods that keep every token in few bits: KIVI's cache, and 2-bit keys that only choose tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.quality.methods.base import Method, Prompt, TokenTopK, dot
from benchmarks.quality.methods.quantise import quantised_keys, quantised_values


class Kivi(Method):
    """KIVI (arXiv 2402.02750): all attended, candidates quantised, keys per channel and values per token.

    Args:
        bits: Of keys and values.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.name = f"kivi_int{bits}"

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "group": 32}

    def start(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        return quantised_keys(prompt.keys, self.bits), quantised_values(prompt.values, self.bits)

    def own_prompt(self, state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return state

    def absorb(self, state: Any, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantised_keys(keys, self.bits), quantised_values(values, self.bits)


@dataclass
class CodedKeys:
    """Keys as restored from their codes: the prompt's ``[heads, n, dim]``, then ``[heads, rows, n, dim]`` a segment."""

    parts: list[torch.Tensor]


class QuantisedTopK(TokenTopK):
    """Every key stays on the GPU in 2 bits and ranks its token for the group; the chosen are attended exactly."""

    name = "int2_topk"
    bits = 2

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "group": 32}

    def start(self, prompt: Prompt) -> CodedKeys:
        return CodedKeys([quantised_keys(prompt.keys, self.bits)])

    def absorb(self, state: CodedKeys, keys: torch.Tensor, values: torch.Tensor) -> None:
        state.parts.append(quantised_keys(keys, self.bits))

    def scores(self, state: CodedKeys, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.cat([dot(query, part) for part in state.parts], dim=3)
