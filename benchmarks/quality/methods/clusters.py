"""Selection by cluster: ClusterKV as published, and a simulation of ours that varies what the real cache fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.quality.methods.base import Method, Prompt, budget_tensor, dot, mix
from tiered_kv import TieredKVConfig
from tiered_kv.clustering import ClusteredSegment, cluster_segment
from tiered_kv.kernels.quantise import quantise_int8


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What can be varied. The defaults are those of :class:`~tiered_kv.TieredKVConfig`.

    Attributes:
        reduce: How the group's scores become one: ``"max"``, ``"mean"``, or ``"none"`` for a selection per query head.
        trim: Cut the last cluster to spend the budget to the token; otherwise the first that does not fit ends it.
        log_size: Add log(size) to the score.
        spread: Share of the second-order term, as in ``TieredKVConfig``.
        scalar_variance: One variance a cluster, the mean over the channels, in place of one per channel.
        estimate_share: Share of the clusters, best first, that may be estimated when not attended; 0 for no estimate.
    """

    tokens_per_cluster: int = 16
    max_cluster_tokens: int = 64
    kmeans_iterations: int = 10
    center_keys: bool = True
    segment: int = 8192
    reduce: str = "max"
    trim: bool = False
    log_size: bool = False
    spread: float = 0.5
    spread_limit: float = 1.5
    scalar_variance: bool = False
    estimate_share: float = 1.0
    index_int8: bool = True


CLUSTERKV = ClusterOptions(
    tokens_per_cluster=80, max_cluster_tokens=1 << 30, center_keys=False, segment=1 << 30,
    reduce="none", trim=True, spread=0.0, estimate_share=0.0, index_int8=False,
)  # fmt: skip
"""ClusterKV (arXiv 2412.03213): 80 tokens a cluster over the whole prompt, per query head, no estimate."""


@dataclass
class Part:
    """Clusters of one segment: ``[heads, clusters, dim]`` shared by the rows, or ``[heads, rows, clusters, dim]``."""

    centroids: torch.Tensor
    variances: torch.Tensor
    mean_values: torch.Tensor


@dataclass
class Tables:
    """All clusters of a layer, and where each candidate belongs.

    Attributes:
        parts: By segment.
        sizes: ``[heads, rows, 1, clusters]``.
        cluster_of: ``[heads, rows, 1, candidates]``.
        place: ``[heads, rows, 1, candidates]`` number of the candidate within its cluster.
        logits: ``[heads, rows, group, clusters]`` of the present step, a token's log-weight.
        is_rest: ``[heads, rows, group or 1, clusters]`` of the present step, the clusters to estimate.
    """

    scale: float
    sizes: torch.Tensor
    cluster_of: torch.Tensor
    place: torch.Tensor
    parts: list[Part] = field(default_factory=list)
    logits: torch.Tensor | None = None
    is_rest: torch.Tensor | None = None


class Clusters(Method):
    """Semantic clusters ranked by their centroids."""

    has_budget = True

    def __init__(self, budgets: Sequence[int], name: str, options: ClusterOptions) -> None:
        super().__init__(budgets)
        self.name, self.options = name, options
        largest = min(options.max_cluster_tokens, 1 << 30)
        self.config = TieredKVConfig(
            token_budget=1 << 30, max_cluster_tokens=largest, tokens_per_cluster=options.tokens_per_cluster,
            kmeans_iterations=options.kmeans_iterations, center_keys=options.center_keys,
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        return asdict(self.options)

    def start(self, prompt: Prompt) -> Tables:
        nothing = torch.zeros(prompt.keys.shape[0], self.rows, 1, 0, dtype=torch.int64, device=prompt.keys.device)
        state = Tables(prompt.scale, nothing, nothing, nothing)
        for first in range(0, prompt.keys.shape[1], self.options.segment):
            keys = prompt.keys[:, first : first + self.options.segment]
            self._add(state, keys, prompt.values[:, first : first + self.options.segment])
        return state

    def absorb(self, state: Tables, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._add(state, keys, values)

    def _add(self, state: Tables, keys: torch.Tensor, values: torch.Tensor) -> None:
        lead, tokens = keys.shape[:-2], keys.shape[-2]
        found = cluster_segment(
            keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:]), None, self.config
        )
        parts = [self._stored(x).unflatten(0, lead) for x in (found.centroids, found.variances, found.mean_values)]
        state.parts.append(Part(*parts))
        cluster_of, place = _membership(found, tokens)
        shape = (lead[0], 1 if len(lead) == 1 else lead[1], 1, -1)
        cluster_of = cluster_of.view(shape) + state.sizes.shape[3]
        state.cluster_of = _joined(state.cluster_of, cluster_of)
        state.place = _joined(state.place, place.view(shape))
        state.sizes = _joined(state.sizes, found.sizes.long().view(shape))

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        if not self.options.index_int8:
            return x
        codes, scales = quantise_int8(x)
        return codes.float() * scales[..., None]

    def select(self, state: Tables, query: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ranking = self._score(state, query)
        best = ranking.argsort(dim=-1, descending=True, stable=True)
        sizes = state.sizes.expand_as(best).gather(3, best)
        ends = torch.empty_like(best).scatter_(3, best, sizes.cumsum(3))
        budgets = budget_tensor(self.budgets, logits.device)
        cluster_of = state.cluster_of.expand(-1, -1, best.shape[2], -1)
        if self.options.trim:
            starts = ends - state.sizes
            return starts.gather(3, cluster_of) + state.place < budgets
        chosen = ends <= budgets
        share = round(self.options.estimate_share * best.shape[3])
        is_near = torch.zeros_like(chosen).scatter_(3, best[..., :share], True)
        state.is_rest = is_near & ~chosen & (state.sizes > 0)
        return chosen.gather(3, cluster_of)

    def _score(self, state: Tables, query: torch.Tensor) -> torch.Tensor:
        """Set the step's log-weights; return the ranking ``[heads, rows, group or 1, clusters]``."""
        o = self.options
        logits = torch.cat([dot(query, part.centroids) for part in state.parts], dim=3) * state.scale
        ranking = state.logits = logits
        if o.spread:
            square = query * query
            second = torch.cat([dot(square, self._variances(part)) for part in state.parts], dim=3)
            second = second * (0.5 * o.spread * state.scale**2)
            ranking, state.logits = logits + second, logits + second.clamp(max=o.spread_limit)
        if o.log_size:
            ranking = ranking + state.sizes.clamp(min=1).log()
        ranking = ranking.masked_fill(state.sizes == 0, float("-inf"))
        if o.reduce == "none":
            return ranking
        return ranking.amax(2, keepdim=True) if o.reduce == "max" else ranking.mean(2, keepdim=True)

    def _variances(self, part: Part) -> torch.Tensor:
        if not self.options.scalar_variance:
            return part.variances
        return part.variances.mean(-1, keepdim=True).expand_as(part.variances)

    def rest(self, state: Tables, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.options.estimate_share:
            return None
        assert state.logits is not None
        assert state.is_rest is not None
        weight = state.logits + state.sizes.clamp(min=1).log()
        weight = weight.masked_fill(~state.is_rest, float("-inf"))
        total = weight.logsumexp(3, keepdim=True)
        share = (weight - total).exp().nan_to_num(0.0)  # nothing left to estimate: -inf less -inf
        counts = [part.mean_values.shape[-2] for part in state.parts]
        pieces = zip(share.split(counts, dim=3), state.parts, strict=True)
        return total, sum(mix(piece, part.mean_values) for piece, part in pieces)


def _membership(found: ClusteredSegment, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster of each token and its number therein, ``[rows, tokens]``, in the tokens' own order."""
    place = torch.arange(tokens, device=found.order.device).expand(found.order.shape).contiguous()
    ends = found.sizes.long().cumsum(1)
    cluster = torch.searchsorted(ends, place, right=True)
    within = place - found.offsets.long().gather(1, cluster)
    back = torch.empty_like(cluster)
    return back.scatter(1, found.order, cluster), back.scatter(1, found.order, within)


def _joined(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([old, new.expand(*old.shape[:3], -1)], dim=3)
