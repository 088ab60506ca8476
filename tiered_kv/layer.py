"""One attention layer's tiered KV cache: the main path of this library.

Prefill: attend exactly, then cluster what is older than the window and store it on the host.
Decode: append the token to the window; score the centroids, select clusters within the budget, look them up in the GPU
cluster cache, recall the missing ones, attend. When the window is full, it becomes a segment like any other.

This module knows tensors only; ``cache.py`` makes it a transformers cache layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tiered_kv.clustering import cluster_segment
from tiered_kv.config import TieredKVConfig
from tiered_kv.errors import TieredKVError
from tiered_kv.index import ClusterIndex
from tiered_kv.kernels.attend import Attended, Estimated, attend
from tiered_kv.kernels.count import AHEAD_COUNTERS, count_ahead, new_counters
from tiered_kv.kernels.recall import AHEAD_PROGRAMS
from tiered_kv.kernels.score import score_clusters
from tiered_kv.kernels.select import Selection
from tiered_kv.offload.cluster_cache import ClusterCache
from tiered_kv.offload.host_store import HostStore
from tiered_kv.offload.streams import engine_for
from tiered_kv.prefill import Piece, attend_chunk
from tiered_kv.window import Window, WindowClock, lasting

RESERVED_TOKENS = 1 << 20
"""Tokens a sequence that address space is reserved for at first; a longer one moves the store once."""

SLAB_SEGMENTS = 8
"""Decode segments that host memory is taken for, and page-locked, at a time."""


@dataclass(frozen=True)
class Segment:
    """A run of the sequence that left the window together.

    Attributes:
        start: Position of its first token, left padding counted.
        length: Tokens a row.
        first_token: Number of row 0's first token in the host store.
        stored_rows: Rows it was stored with.
        row_of: Which stored row each present row reads; ``None`` for its own.
        first_cluster: Clusters in the index before it.
        first_block: Blocks in the index before it.
    """

    start: int
    length: int
    first_token: int
    stored_rows: int
    row_of: list[int] | None
    first_cluster: int
    first_block: int


class Chosen(NamedTuple):
    """What a query has chosen, and where it is now.

    Attributes:
        logits: ``[rows, group, clusters]`` float32 log-weight of one token of each cluster.
        selection: The clusters taken, and their blocks.
        slots: ``[rows, max_blocks]`` int32 slots of the blocks in the GPU cluster cache.
        missed: ``[rows, max_blocks]`` bool blocks that had to be recalled.
    """

    logits: torch.Tensor
    selection: Selection
    slots: torch.Tensor
    missed: torch.Tensor


class Ahead(NamedTuple):
    """A recall for a guessed query, under way on the prefetch stream.

    Attributes:
        chosen: What the guess has chosen.
        fetched: Event behind the recall; ``None`` on the CPU.
        source: What the query was guessed from, kept so that the compute stream does not use its memory again before.
    """

    chosen: Chosen
    fetched: torch.cuda.Event | None
    source: torch.Tensor


class TieredLayer:
    """Keys and values of one attention layer, in tiers.

    A row is one KV head of one sequence; rows of a sequence are adjacent.

    Args:
        config: Options.
        clock: Length of the window, shared with the other layers of the device.
        is_shared: Other layers attend to this layer's keys and values too (``num_kv_shared_layers``), so a chunk is
            kept until the next one comes.
    """

    def __init__(self, config: TieredKVConfig, clock: WindowClock, is_shared: bool = False) -> None:
        self.config, self.clock, self.is_shared = config, clock, is_shared
        self.length = 0
        self.batch = 0
        self.left_padding: list[int] | None = None
        self.segments: list[Segment] = []
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_untrimmed = False
        self._scoring: tuple[float, float | None] | None = None
        self._ahead: Ahead | None = None
        self._cuts = 0
        self.keeps_query = False
        self.query: torch.Tensor | None = None

    @lasting
    def start(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the shapes of the first keys and values, ``[batch, kv_heads, tokens, head_dim]`` and ``value_dim``."""
        self.batch, self.kv_heads, _, self.head_dim = key.shape
        self.value_dim = value.shape[3]
        self.device, self.dtype = key.device, key.dtype
        if self.config.pin_memory and self.device.type != "cuda":
            raise TieredKVError(f"pin_memory: expected a model on CUDA, got one on {self.device}")
        self.engine = engine_for(self.device)
        self.index = ClusterIndex(self.config)
        self.cluster_cache: ClusterCache | None = None
        self.store: HostStore | None = None
        self.counters = new_counters(self.device)
        self.ahead_counters = new_counters(self.device, AHEAD_COUNTERS)
        self._row_padding = torch.zeros(self.rows, dtype=torch.int32, device=self.device)
        self.window = Window(self.rows, self.config.num_sink_tokens, self.width, self.dtype, self.device, self.clock)

    @property
    def rows(self) -> int:
        return self.batch * self.kv_heads

    @property
    def width(self) -> int:
        return self.head_dim + self.value_dim

    @property
    def clustered(self) -> int:
        """Tokens that have left the window: the position of its oldest token."""
        return self.segments[-1].start + self.segments[-1].length if self.segments else 0

    @property
    def has_begun(self) -> bool:
        """Whether every sequence has a token that is not padding; before that a single token is no decode step."""
        return self.length > max(self.left_padding or [0])

    @lasting
    def set_left_padding(self, padding: list[int] | None) -> None:
        """Padding tokens at the beginning of each sequence, of those that came so far; ``None`` for none anywhere."""
        self.left_padding = padding
        rows = torch.tensor(self._paddings, dtype=torch.int32).repeat_interleave(self.kv_heads)
        self._row_padding = rows.to(self.device)

    def add_chunk(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take a chunk's keys and values; the attention to it comes next."""
        self._join_ahead()
        self._settle()
        self._chunk = (key.detach(), value.detach())
        self.length += key.shape[2]

    def attend_chunk(
        self,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        attention_sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Exact attention of the chunk's queries ``[batch, query_heads, tokens, head_dim]`` to all that came."""
        assert self._chunk is not None
        key, value = self._chunk
        padding = self._padding_after(self.length - key.shape[2])
        out = attend_chunk(
            query, key, value, self._earlier_pieces(), padding,
            scale=scale, softcap=softcap, attention_sinks=attention_sinks,
        )  # fmt: skip
        if not self.is_shared:
            self._settle()
        return out

    def _padding_after(self, position: int) -> list[int] | None:
        """Padding tokens from ``position`` on, for each sequence; ``None`` when no sequence is padded at all."""
        if self.left_padding is None:
            return None
        return [max(0, pad - position) for pad in self.left_padding]

    def _earlier_pieces(self) -> Iterator[Piece]:
        """Sinks, stored segments and window: everything before the chunk, all on the device when yielded."""
        near = self._near_pieces()
        for segment, tokens in zip(self.segments, self.engine.load(map(self._read, self.segments)), strict=True):
            far = Piece(self._by_sequence(tokens), [self._clustered_in(segment, p) for p in self._paddings])
            if near and self.left_padding is None:  # one call of a flash kernel instead of three
                parts = [piece.tokens[:, :, slice(*piece.spans[0])] for piece in (*near, far)]
                far, near = Piece(torch.cat(parts, dim=2), [(0, sum(p.shape[2] for p in parts))]), []
            yield far
        yield from near

    def _near_pieces(self) -> list[Piece]:
        """Sinks and window, where there are any."""
        sinks, window = self.window.sinks, self.window.tokens
        pieces = []
        if self.segments and sinks.shape[1]:
            counts = [_clip(self.clustered - p, 0, sinks.shape[1]) for p in self._paddings]
            pieces.append(Piece(self._by_sequence(sinks), [(0, count) for count in counts]))
        if self.window.length:
            starts = [_clip(p - self.clustered, 0, self.window.length) for p in self._paddings]
            pieces.append(Piece(self._by_sequence(window), [(start, self.window.length) for start in starts]))
        return pieces

    def _clustered_in(self, segment: Segment, padding: int) -> tuple[int, int]:
        """The tokens of a stored segment that are neither padding nor sinks: they come first."""
        first = padding + self.config.num_sink_tokens
        return 0, _clip(segment.start + segment.length - first, 0, segment.length)

    @property
    def _paddings(self) -> list[int]:
        return self.left_padding or [0] * self.batch

    def _by_sequence(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.view(self.batch, self.kv_heads, *tokens.shape[1:])

    def _read(self, segment: Segment) -> torch.Tensor:
        assert self.store is not None
        tokens = self.store.read(segment.first_token, segment.stored_rows, segment.length)
        if segment.row_of is None:
            return tokens
        self.engine.finish_offloads()  # the host itself picks the rows
        return tokens[segment.row_of]

    @lasting
    def _settle(self) -> None:
        """Move the chunk into the window, and every whole prefill segment out of it."""
        if self._chunk is None:
            return
        key, value = self._chunk
        self._chunk = None
        tokens = torch.cat([self.window.tokens, self._as_rows(key, value)], dim=1)
        while (
            self.length > self.config.dense_until
            and tokens.shape[1] >= self._prefill_segment() + self.config.window_size
        ):
            tokens = self._store_segment(tokens, self._prefill_segment())
        self._show_window(tokens, capacity=tokens.shape[1])

    @property
    def window_length(self) -> int:
        return self.window.length

    @property
    def has_room(self) -> bool:
        """Whether the window takes a token more as it is."""
        if self._chunk is not None or self._is_untrimmed:
            return False
        if self.length < self.config.dense_until:
            return self.window.length < self.window.capacity
        return self.window.capacity == self._full_window and self.window.length < self._full_window

    @property
    def _full_window(self) -> int:
        return self.config.window_size + self.config.decode_segment

    @lasting
    def make_room(self) -> None:
        """Before a decode step: make room in the window for a token, by clustering its older part when it is full."""
        if self._ahead is not None:  # begun for this very step, before the first layer made room in all
            self.engine.wait_for(self._ahead.fetched)
        self._settle()
        if self.length < self.config.dense_until:
            self.window.reserve(self.window.length + 1)
        elif self.window.length >= self._full_window:
            tokens = self.window.tokens
            while tokens.shape[1] > self.config.window_size:
                count = min(self._prefill_segment(), tokens.shape[1] - self.config.window_size)
                tokens = self._store_segment(tokens, count)
            self._show_window(tokens, capacity=self._full_window)
        elif self.window.capacity != self._full_window:
            self._show_window(self.window.tokens, capacity=self._full_window)
        self._trim_index()
        self.engine.wait_for_offloads()

    def _trim_index(self) -> None:
        """After long segments, and only then, wait for the device to learn how many clusters they have come to."""
        if self._is_untrimmed and self.segments:
            firsts = self.index.trim([segment.first_cluster for segment in self.segments])
            self.segments = [replace(s, first_cluster=f) for s, f in zip(self.segments, firsts, strict=True)]
        self._is_untrimmed = False

    def _prefill_segment(self) -> int:
        """Length of the next prefill segment: the first one also takes the sinks along, which are not clustered."""
        return self.config.prefill_segment + (0 if self.segments else self.config.num_sink_tokens)

    def _as_rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([key, value], dim=3).flatten(0, 1)

    def _store_segment(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        """Cluster the first ``length`` tokens of ``[rows, tokens, width]`` and store them; returns the rest."""
        start = self.clustered
        oldest, rest = tokens[:, :length], tokens[:, length:]
        valid = self._keep_sinks(oldest, start)
        clustered = cluster_segment(oldest[..., : self.head_dim], oldest[..., self.head_dim :], valid, self.config)
        store, cluster_cache = self._tiers()
        first_token = store.append(clustered.tokens, (clustered.order + start).int())
        self.segments.append(self._record(start, length, first_token))
        self.index.append(clustered, first_token)
        cluster_cache.reserve_blocks(self.index.block_capacity)
        self._is_untrimmed |= length > self.config.decode_segment
        return rest

    def _record(self, start: int, length: int, first_token: int) -> Segment:
        clusters, blocks = self.index.num_clusters, self.index.num_blocks
        return Segment(start, length, first_token, self.rows, None, clusters, blocks)

    def _keep_sinks(self, tokens: torch.Tensor, start: int) -> torch.Tensor | None:
        """Copy those of ``tokens``, which begin at position ``start``, that are sinks to their place.

        Returns:
            Which tokens are to be clustered, ``[rows, tokens]`` bool: neither padding nor sinks; ``None`` for all.
        """
        sinks = self.config.num_sink_tokens
        if max(self._paddings) + sinks <= start:
            return None
        first_sink = self._row_padding[:, None]
        position = first_sink + torch.arange(sinks, device=self.device)
        is_here = (position >= start) & (position < start + tokens.shape[1])
        place = (position - start).clamp(0, tokens.shape[1] - 1).long()[..., None].expand(-1, -1, self.width)
        self.window.sinks.copy_(torch.where(is_here[..., None], tokens.gather(1, place), self.window.sinks))
        return torch.arange(start, start + tokens.shape[1], device=self.device) >= first_sink + sinks

    def _tiers(self) -> tuple[HostStore, ClusterCache]:
        """Host store and GPU cluster cache, made when the first segment needs them."""
        c = self.config
        if self.store is None:
            pin = self.device.type == "cuda" if c.pin_memory is None else c.pin_memory
            self.store = HostStore(
                self.width, self.dtype, reserve_tokens=self.rows * RESERVED_TOKENS,
                slab_tokens=self.rows * SLAB_SEGMENTS * c.decode_segment, pin=pin, engine=self.engine,
            )  # fmt: skip
        if self.cluster_cache is None:
            self.cluster_cache = ClusterCache(
                self.rows, c.num_slots, c.block_size, self.width, self.dtype, self.device, c.policy
            )
        return self.store, self.cluster_cache

    def _show_window(self, tokens: torch.Tensor, capacity: int) -> None:
        """Let ``tokens`` be the window and bring what depends on its first position up to date."""
        self.window.replace(tokens, capacity)
        self._place_window()

    def _place_window(self) -> None:
        sinks = (self.clustered - self._row_padding).clamp(0, self.config.num_sink_tokens)
        self.window.num_sinks.copy_(sinks)
        self.window.start.copy_((self._row_padding - self.clustered).clamp(min=0))

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the newest token's key and value, ``[batch, kv_heads, 1, dim]``; :meth:`make_room` came before."""
        self.window.append(key.detach(), value.detach())
        self.note_appended()

    def note_appended(self) -> None:
        """Count the token that the device appended."""
        self.window.length += 1
        self.length += 1

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens in the window and in all, as the host counts them."""
        return self.window.length, self.length

    def recount(self, counted: tuple[int, int]) -> None:
        """Set what :attr:`counted` gives."""
        self.window.length, self.length = counted

    def attend_token(
        self,
        query: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        attention_sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the newest token's query ``[batch, query_heads, 1, head_dim]``; nothing waits for the device."""
        batch, query_heads, _, head_dim = query.shape
        q = query.reshape(self.rows, query_heads // self.kv_heads, head_dim)
        if attention_sinks is not None:
            attention_sinks = attention_sinks.view(self.kv_heads, -1).repeat(self.batch, 1)
        self._scoring, self.query = (scale, softcap), query if self.keeps_query else None
        attended, estimated = self._recall(q) if self.segments else (None, None)
        out = attend(
            q, self.window.view(), attended, estimated, scale=scale, softcap=softcap, attention_sinks=attention_sinks
        )
        return out.view(batch, query_heads, 1, self.value_dim)

    def _recall(self, q: torch.Tensor) -> tuple[Attended, Estimated | None]:
        """Score, select, look up, recall: what this step attends to and what it estimates."""
        guess = self._join_ahead()
        chosen = self._choose(q, self.config.token_budget, self.counters, is_ahead=False)
        cluster_cache, t = self.cluster_cache, self.index.tables
        assert cluster_cache is not None
        assert t is not None
        if guess is not None:
            count_ahead(self.ahead_counters, guess.selection, guess.slots, guess.missed, cluster_cache.tables)
        attended = Attended(cluster_cache.slots, chosen.slots, chosen.selection.lengths)
        if not self.config.estimate:
            return attended, None
        return attended, Estimated(chosen.logits, t.sizes, chosen.selection.chosen, t.mean_values, t.value_scales)

    def _choose(self, q: torch.Tensor, token_budget: int, counters: torch.Tensor | None, is_ahead: bool) -> Chosen:
        """Score the centroids, select clusters within the budget and look them up, recall the missing ones."""
        c, t = self.config, self.index.tables
        assert t is not None
        assert self.store is not None
        assert self.cluster_cache is not None
        assert self._scoring is not None
        scale, softcap = self._scoring
        logits, scores = score_clusters(
            q, t.centroids, t.centroid_scales, t.variances, t.variance_scales, t.sizes,
            scale=scale, softcap=softcap, spread=c.spread, spread_limit=c.spread_limit,
        )  # fmt: skip
        selection, slots, missed = self.cluster_cache.select(
            scores, t.sizes, t.starts, t.first_blocks, counters,
            token_budget=token_budget, max_blocks=c.max_selected_blocks,
        )  # fmt: skip
        self.cluster_cache.recall(self.store, selection, slots, missed, AHEAD_PROGRAMS if is_ahead else None)
        return Chosen(logits, selection, slots, missed)

    def can_fetch_ahead(self) -> bool:
        """Whether there is anything to fetch, and a step has told how to score it."""
        return bool(self.segments) and self._scoring is not None

    def fetch_ahead(self, query: torch.Tensor, source: torch.Tensor) -> None:
        """Recall for a query ``[batch, query_heads, 1, head_dim]`` guessed from ``source``, on the present stream."""
        q = query.reshape(self.rows, -1, self.head_dim)
        chosen = self._choose(q, int(self.config.prefetch_share * self.config.token_budget), None, is_ahead=True)
        self._ahead = Ahead(chosen, self.engine.mark(), source)

    def _join_ahead(self) -> Chosen | None:
        """Let what follows wait for a recall that is under way ahead, which writes slots and tables; what it chose."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        self.engine.wait_for(ahead.fetched)
        return ahead.chosen

    @property
    def rebuilt(self) -> int:
        """Differs from what it was when tokens or rows were taken away, or a fork moved the host store it shares."""
        return self._cuts + (0 if self.store is None else self.store.moves)

    def addresses(self) -> tuple[int, ...]:
        """Where a captured decode step reads and writes, and how much; it must be captured anew when that changes."""
        tensors = [self.window.buffer, self.window.num_sinks, self.window.start, self.counters, self.ahead_counters]
        if self.index.tables is not None and self.cluster_cache is not None and self.store is not None:
            tensors += [table for _, table in self.index.tables.items()]
            tensors += [self.cluster_cache.slots, *self.cluster_cache.tables, self.cluster_cache.hints]
            tensors.append(self.store.tokens)
        places = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.numel())]
        return (bool(self.segments), *places)  # without a segment, as crop() may leave it, a step recalls nothing

    @lasting
    def crop(self, tokens: int) -> None:
        """Drop the newest ``tokens`` tokens. Segments that are cut into come back into the window, but for those."""
        self._join_ahead()
        self._settle()
        self.length -= tokens
        while self.clustered > self.length:
            self._unstore_last_segment()
        self.window.length = self.length - self.clustered
        if self.left_padding is not None:
            padding = [min(p, self.length) for p in self.left_padding]
            self.set_left_padding(padding if any(padding) else None)
        self._place_window()
        self.engine.wait_for_offloads()  # the window may have room now, and the next step recall with nothing between
        self._cuts += 1

    def _unstore_last_segment(self) -> None:
        """Bring the newest segment back into the window, in the order of its positions."""
        assert self.store is not None
        assert self.cluster_cache is not None
        self.engine.finish_offloads()
        segment = self.segments.pop()
        positions = self.store.read_positions(segment.first_token, segment.stored_rows, segment.length)
        positions = positions if segment.row_of is None else positions[segment.row_of]
        order = positions.argsort(dim=1).to(self.device)[..., None].expand(-1, -1, self.width)
        tokens = self._read(segment).to(self.device).gather(1, order)
        self.index.truncate(segment.first_cluster, segment.first_block)
        self.cluster_cache.forget(segment.first_block)
        tokens = torch.cat([tokens, self.window.tokens], dim=1)
        self._show_window(tokens, capacity=tokens.shape[1])

    @lasting
    def select_sequences(self, sequences: list[int]) -> None:
        """Sequence i becomes what sequence ``sequences[i]`` was; the host store stays as it is."""
        self._join_ahead()
        self._settle()
        rows = [s * self.kv_heads + h for s in sequences for h in range(self.kv_heads)]
        index = torch.tensor(rows, device=self.device)
        self.window.select_rows(index)
        self.index.select_rows(index)
        if self.cluster_cache is not None:
            self.cluster_cache.select_rows(index)
        self.segments = [replace(s, row_of=[s.row_of[r] if s.row_of else r for r in rows]) for s in self.segments]
        if self.left_padding is not None:
            self.left_padding = [self.left_padding[s] for s in sequences]
        self._row_padding = self._row_padding[index]
        self.batch = len(sequences)
        self._cuts += 1

    def close(self) -> None:
        """Give host memory back, unless a copy of the cache still reads it; the layer must not be used any more."""
        if self.batch:
            self.engine.finish_offloads()
            self.store = None


def _clip(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))
