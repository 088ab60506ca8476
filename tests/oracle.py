"""What a tiered layer has to compute, written down token by token: no tensors over rows, no kernels, no caches.

It remembers every key and value and knows nothing of the layer's window, store or slots. Where the budget is smaller
than the context it is told the layer's clusters and follows the published steps: score, select, attend, estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tiered_kv.layer import TieredLayer


@dataclass
class Cluster:
    """One cluster as the index describes it, and the positions of its tokens as the host store has them."""

    centroid: np.ndarray
    mean_value: np.ndarray
    variance: np.ndarray | None
    positions: list[int]

    @property
    def size(self) -> int:
        return len(self.positions)


class Oracle:
    """Keys and values of all tokens, ``[batch, kv_heads, tokens, dim]`` in float64.

    Args:
        padding: Left padding of each sequence.
    """

    def __init__(self, padding: list[int]) -> None:
        self.padding = padding
        self.keys = self.values = np.zeros(0)

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    def add(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take tokens ``[batch, kv_heads, tokens, dim]``."""
        key, value = _exactly(key), _exactly(value)
        self.keys = np.concatenate([self.keys, key], axis=2) if self.keys.size else key
        self.values = np.concatenate([self.values, value], axis=2) if self.values.size else value

    def crop(self, tokens: int) -> None:
        self.keys, self.values = (x[:, :, : self.length - tokens] for x in (self.keys, self.values))

    def select_sequences(self, sequences: list[int]) -> None:
        self.keys, self.values = self.keys[sequences], self.values[sequences]
        self.padding = [self.padding[s] for s in sequences]

    def exact(self, query: torch.Tensor, scale: float, softcap: float | None = None, sinks=None) -> torch.Tensor:
        """Causal attention of the newest queries ``[batch, query_heads, queries, head_dim]``; zero for padding."""
        batch, heads, queries, _ = query.shape
        group = heads // self.keys.shape[1]
        out = np.zeros((batch, heads, queries, self.values.shape[3]))
        for b, h, i in np.ndindex(batch, heads, queries):
            seen = list(range(self.padding[b], self.length - queries + i + 1))
            if seen:
                q = _exactly(query[b, h, i])
                logits = _capped(scale * self.keys[b, h // group, seen] @ q, softcap)
                out[b, h, i] = _softmax(logits, self.values[b, h // group, seen], _sink(sinks, h))
        return torch.tensor(out)

    def budgeted(
        self, layer: TieredLayer, query: torch.Tensor, scale: float, softcap: float | None = None, sinks=None
    ) -> tuple[torch.Tensor, int, int]:
        """Attention of the newest token's query within the budget, given the layer's clusters.

        Returns:
            ``[batch, query_heads, 1, value_dim]``, and the clusters and the tokens selected, over all rows.
        """
        batch, heads, _, _ = query.shape
        kv_heads = self.keys.shape[1]
        group = heads // kv_heads
        out = np.zeros((batch, heads, 1, self.values.shape[3]))
        num_clusters = num_tokens = 0
        for b, g in np.ndindex(batch, kv_heads):
            clusters = clusters_of(layer, b * kv_heads + g)
            queries = _exactly(query[b, g * group : (g + 1) * group, 0])
            taken = _select(layer, clusters, queries, scale, softcap)
            num_clusters += len(taken)
            num_tokens += sum(clusters[c].size for c in taken)
            clustered = {t for cluster in clusters for t in cluster.positions}
            attended = set(range(self.padding[b], self.length)) - clustered
            attended |= {t for c in taken for t in clusters[c].positions}
            rest = [cluster for c, cluster in enumerate(clusters) if c not in taken and cluster.size]
            for i, q in enumerate(queries):
                logits = _capped(scale * self.keys[b, g, sorted(attended)] @ q, softcap)
                values = self.values[b, g, sorted(attended)]
                if layer.config.estimate and rest:
                    logits = np.append(logits, [_weight(layer, cluster, q, scale, softcap) for cluster in rest])
                    values = np.concatenate([values, [cluster.mean_value for cluster in rest]])
                out[b, g * group + i, 0] = _softmax(logits, values, _sink(sinks, g * group + i))
        return torch.tensor(out), num_clusters, num_tokens


def clusters_of(layer: TieredLayer, row: int) -> list[Cluster]:
    """The clusters of a row, in the index's order; tokens are found as recall finds them, by number in the store."""
    t = layer.index.tables
    if t is None:
        return []
    layer.engine.finish_offloads()
    centroids = _exactly(t.centroids[row]) * _exactly(t.centroid_scales[row])[:, None]
    mean_values = _exactly(t.mean_values[row]) * _exactly(t.value_scales[row])[:, None]
    variances = None
    if t.variances is not None:
        variances = _exactly(t.variances[row]) * _exactly(t.variance_scales[row])[:, None]
    positions, starts, sizes = layer.store.positions, t.starts[row].tolist(), t.sizes[row].tolist()
    return [
        Cluster(
            centroid=centroids[c],
            mean_value=mean_values[c],
            variance=None if variances is None else variances[c],
            positions=positions[starts[c] : starts[c] + sizes[c]].tolist(),
        )
        for c in range(layer.index.num_clusters)
    ]


def _select(layer: TieredLayer, clusters: list[Cluster], queries, scale: float, softcap: float | None) -> list[int]:
    """Best score first, the maximum over the group's queries, until the next one does not fit."""
    config = layer.config
    scores = {
        c: max(sum(_logit_and_spread(layer, cluster, q, scale, softcap)) for q in queries)
        for c, cluster in enumerate(clusters)
        if cluster.size
    }
    taken: list[int] = []
    tokens = blocks = 0
    for c in sorted(scores, key=lambda c: (-scores[c], c)):
        tokens += clusters[c].size
        blocks += -(-clusters[c].size // config.block_size)
        if tokens > config.token_budget or blocks > config.max_selected_blocks:
            break
        taken.append(c)
    return taken


def _logit_and_spread(layer: TieredLayer, cluster: Cluster, query, scale: float, softcap: float | None):
    logit = _capped(scale * query @ cluster.centroid, softcap)
    if cluster.variance is None:
        return logit, 0.0
    return logit, layer.config.spread * 0.5 * scale**2 * (query**2) @ cluster.variance


def _weight(layer: TieredLayer, cluster: Cluster, query, scale: float, softcap: float | None) -> float:
    """Log-weight of a cluster that is not attended: ``size`` tokens of its mean value."""
    logit, spread = _logit_and_spread(layer, cluster, query, scale, softcap)
    return logit + min(spread, layer.config.spread_limit) + np.log(cluster.size)


def _capped(logits, softcap: float | None):
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def _sink(sinks: torch.Tensor | None, head: int) -> float:
    return -np.inf if sinks is None else float(sinks[head])


def _softmax(logits: np.ndarray, values: np.ndarray, sink: float) -> np.ndarray:
    most = max(logits.max(), sink)
    weights = np.exp(logits - most)
    return weights @ values / (weights.sum() + np.exp(sink - most))


def _exactly(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()
