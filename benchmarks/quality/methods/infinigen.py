"""InfiniGen (arXiv 2406.19707): rank tokens by a few channels of skewed queries and keys.

Queries and keys are rotated by the right singular vectors of the prompt's queries, and the 30 % of channels with the
largest |q| + |k| rank the tokens. Kinder than the paper: the exact query of the layer is used, not a guess from the
layer before, and the rotation is of the prompt at hand. Keys are taken after RoPE. Selection is per query head; nothing
is evicted.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.quality.methods.base import Prompt, TokenTopK, dot


class InfiniGen(TokenTopK):
    name = "infinigen"
    per_query_head = True
    channel_share = 0.3

    def settings(self) -> dict[str, Any]:
        return {"channel_share": self.channel_share}

    def start(self, prompt: Prompt) -> list[torch.Tensor]:
        """The projector on the chosen channels ``[heads, dim, dim]``, and the candidates' keys in parts."""
        queries = prompt.queries.flatten(1, 2).float()
        rotation = torch.linalg.eigh(queries.transpose(1, 2) @ queries).eigenvectors
        size = (queries @ rotation).abs().mean(1) + (prompt.keys.float() @ rotation).abs().mean(1)
        count = max(1, round(self.channel_share * size.shape[1]))
        best = size.topk(count, dim=1).indices[:, None].expand(-1, rotation.shape[1], -1)
        chosen = rotation.gather(2, best)
        return [chosen, prompt.keys.float() @ chosen]

    def absorb(self, state: list[torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> None:
        state.append(keys.float() @ state[0][:, None])

    def scores(self, state: list[torch.Tensor], query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        partial = query @ state[0][:, None]
        return torch.cat([dot(partial, keys) for keys in state[1:]], dim=3)
