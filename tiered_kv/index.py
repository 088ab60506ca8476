"""The index of a layer: what the device knows of every cluster without its tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from tiered_kv.clustering import ClusteredSegment
from tiered_kv.config import TieredKVConfig
from tiered_kv.kernels.quantise import quantise_int8
from tiered_kv.offload.cluster_cache import take_rows

GRANULE = 512
"""Clusters that capacity grows by: room for about 20 decode segments between reallocations."""


@dataclass
class IndexTables:
    """Tables over clusters, all ``[rows, capacity, ...]``; a cluster beyond the last one has size 0.

    Attributes:
        centroids: Mean keys, int8 or the model's dtype; times ``centroid_scales`` (float32 per cluster).
        mean_values: Mean values, likewise with ``value_scales``.
        variances: Key variances per channel, likewise with ``variance_scales``; ``None`` without a spread term.
        sizes: int32 tokens a cluster.
        starts: int32 number of the first token in the host store.
        first_blocks: int32 number of the first block within the row.
    """

    centroids: torch.Tensor
    centroid_scales: torch.Tensor
    mean_values: torch.Tensor
    value_scales: torch.Tensor
    variances: torch.Tensor | None
    variance_scales: torch.Tensor | None
    sizes: torch.Tensor
    starts: torch.Tensor
    first_blocks: torch.Tensor

    def items(self) -> list[tuple[str, torch.Tensor]]:
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, table) for name, table in named if table is not None]


class ClusterIndex:
    """Centroids, mean values, variances, sizes and places of a layer's clusters, growing segment by segment."""

    def __init__(self, config: TieredKVConfig) -> None:
        self.config = config
        self.num_clusters = 0
        self.num_blocks = 0
        self.tables: IndexTables | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.tables is None else sum(t.numel() * t.element_size() for _, t in self.tables.items())

    @property
    def block_capacity(self) -> int:
        """Block numbers to be ready for: as many as the clusters that there is capacity for can take."""
        spare = 0 if self.tables is None else self.tables.sizes.shape[1] - self.num_clusters
        tokens = spare * self.config.tokens_per_cluster
        return self.num_blocks + tokens // self.config.block_size + spare

    def append(self, segment: ClusteredSegment, first_token: int) -> None:
        """Add a segment whose row r begins at token ``first_token + r · tokens_per_row`` of the host store."""
        fresh = self._describe(segment, first_token)
        count = segment.sizes.shape[1]
        self._reserve(fresh, self.num_clusters + count)
        assert self.tables is not None
        for (_, table), (_, new) in zip(self.tables.items(), fresh.items(), strict=True):
            table[:, self.num_clusters : self.num_clusters + count] = new
        self.num_clusters += count
        self.num_blocks += max_blocks(segment, self.config.block_size)

    def trim(self, firsts: list[int]) -> list[int]:
        """Close the gaps that segments have left at their ends: no row used all the clusters that they had room for.

        Waits for the device.

        Args:
            firsts: First cluster of each segment; ascending, from 0.

        Returns:
            The same after trimming.
        """
        assert self.tables is not None
        ends = [*firsts[1:], self.num_clusters]
        exists = self.tables.sizes > 0
        used = torch.stack([exists[:, a:b].sum(1).max() for a, b in zip(firsts, ends, strict=True)]).tolist()
        kept = torch.cat([torch.arange(a, a + n) for a, n in zip(firsts, used, strict=True)]).to(exists.device)
        trimmed = {name: table.index_select(1, kept) for name, table in self.tables.items()}
        self.num_clusters = len(kept)
        self.tables = _tables(_grown(trimmed, trimmed, _capacity(self.num_clusters)))
        return [sum(used[:i]) for i in range(len(used))]

    def truncate(self, num_clusters: int, num_blocks: int) -> None:
        """Forget all but the first clusters and blocks."""
        if self.tables is not None:
            self.tables.sizes[:, num_clusters:] = 0
        self.num_clusters, self.num_blocks = num_clusters, num_blocks

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was."""
        if self.tables is not None:
            self.tables = _tables({name: take_rows(table, rows) for name, table in self.tables.items()})

    def _describe(self, segment: ClusteredSegment, first_token: int) -> IndexTables:
        rows, tokens = segment.order.shape
        row = torch.arange(rows, device=segment.sizes.device, dtype=torch.int32)[:, None]
        blocks = (segment.sizes + self.config.block_size - 1) // self.config.block_size
        centroids, centroid_scales = self._store(segment.centroids, segment.tokens.dtype)
        mean_values, value_scales = self._store(segment.mean_values, segment.tokens.dtype)
        variances, variance_scales = (
            self._store(segment.variances, segment.tokens.dtype) if self.config.spread else (None, None)
        )
        return IndexTables(
            centroids=centroids,
            centroid_scales=centroid_scales,
            mean_values=mean_values,
            value_scales=value_scales,
            variances=variances,
            variance_scales=variance_scales,
            sizes=segment.sizes,
            starts=segment.offsets + row * tokens + first_token,
            first_blocks=(blocks.cumsum(1, dtype=torch.int32) - blocks) + self.num_blocks,
        )

    def _store(self, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.index_dtype == "int8":
            return quantise_int8(x)
        return x.to(dtype), torch.ones(x.shape[:2], dtype=torch.float32, device=x.device)

    def _reserve(self, like: IndexTables, num_clusters: int) -> None:
        capacity = 0 if self.tables is None else self.tables.sizes.shape[1]
        if num_clusters <= capacity:
            return
        old = {} if self.tables is None else dict(self.tables.items())
        self.tables = _tables(_grown(dict(like.items()), old, _capacity(num_clusters)))


def max_blocks(segment: ClusteredSegment, block_size: int) -> int:
    """Blocks the clusters of a segment can take, whatever their sizes: known on the host without looking."""
    return segment.order.shape[1] // block_size + segment.sizes.shape[1]


def _capacity(num_clusters: int) -> int:
    """Clusters to have room for: some to spare."""
    return (num_clusters // GRANULE + 1) * GRANULE


def _grown(like: dict[str, torch.Tensor], old: dict[str, torch.Tensor], capacity: int) -> dict[str, torch.Tensor]:
    """Zeroed tables of the given capacity, shaped like ``like``, with the old content first."""
    grown = {name: t.new_zeros((t.shape[0], capacity, *t.shape[2:])) for name, t in like.items()}
    for name, table in old.items():
        grown[name][:, : table.shape[1]] = table
    return grown


def _tables(named: dict[str, torch.Tensor]) -> IndexTables:
    """Those without a name (variances, when there is no spread term) are ``None``."""
    return IndexTables(**dict.fromkeys(field.name for field in fields(IndexTables)) | named)  # type: ignore[arg-type]
