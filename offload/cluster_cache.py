"""The GPU cluster cache of a layer: recently used blocks of tokens in slots, and the tables that say where."""

from __future__ import annotations

import torch

from tiered_kv.kernels.lookup import SlotTables, select_and_assign
from tiered_kv.kernels.recall import recall_blocks
from tiered_kv.kernels.select import Selection
from tiered_kv.offload.host_store import HostStore


class ClusterCache:
    """Slots for blocks of clusters on the device, per KV head of each sequence.

    Args:
        rows: KV heads times sequences.
        num_slots: Blocks held per row; at least as many as a selection has.
        block_size: Tokens a slot.
        width: Numbers a token.
        dtype: Of the tokens.
        device: Where the slots are.
        policy: Replacement policy, ``"lru"``, ``"lfu"`` or ``"lru_lfu"``.
    """

    def __init__(
        self,
        rows: int,
        num_slots: int,
        block_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        policy: str,
    ) -> None:
        self.policy = policy
        self.slots = torch.empty(rows, num_slots, block_size, width, dtype=dtype, device=device)
        self.tables = SlotTables(
            slot_of=_empty_table(rows, 0, device),
            block_in=_empty_table(rows, num_slots, device),
            last_used=torch.zeros(rows, num_slots, dtype=torch.int32, device=device),
            uses=torch.zeros(rows, num_slots, dtype=torch.int32, device=device),
            step=torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self.hints = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.slots, *self.tables, self.hints))

    def select(
        self,
        scores: torch.Tensor,
        sizes: torch.Tensor,
        starts: torch.Tensor,
        first_blocks: torch.Tensor,
        counters: torch.Tensor | None = None,
        *,
        token_budget: int,
        max_blocks: int,
    ) -> tuple[Selection, torch.Tensor, torch.Tensor]:
        """Select clusters within the budget and look their blocks up; the missing ones get slots of their own.

        Arguments are those of :func:`~tiered_kv.kernels.lookup.select_and_assign`.

        Returns:
            The selection; ``[rows, max_blocks]`` int32 slots of its blocks, -1 in the padding; and
            ``[rows, max_blocks]`` bool which of them are missing, whose slots are to be filled by :meth:`recall`.
        """
        return select_and_assign(
            scores, sizes, starts, first_blocks, self.tables, self.hints, counters,
            token_budget=token_budget, max_blocks=max_blocks, block_size=self.slots.shape[2], policy=self.policy,
        )  # fmt: skip

    def recall(
        self,
        host: HostStore,
        selection: Selection,
        slots: torch.Tensor,
        missed: torch.Tensor,
        programs: int | None = None,
    ) -> None:
        """Bring the missing blocks from the host into their slots, with at most ``programs`` programs where given."""
        recall_blocks(host.tokens, selection.starts, selection.lengths, slots, missed, self.slots, programs=programs)

    def reserve_blocks(self, num_blocks: int) -> None:
        """Make room in the table for block numbers below ``num_blocks``."""
        known = self.tables.slot_of.shape[1]
        if num_blocks > known:
            fresh = _empty_table(len(self.slots), num_blocks - known, self.slots.device)
            self.tables = self.tables._replace(slot_of=torch.cat([self.tables.slot_of, fresh], dim=1))

    def forget(self, first_block: int) -> None:
        """Drop every block from ``first_block`` on."""
        self.tables.slot_of[:, first_block:] = -1
        self.tables.block_in.masked_fill_(self.tables.block_in >= first_block, -1)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes what row ``rows[i]`` was."""
        self.slots = take_rows(self.slots, rows)
        self.tables = SlotTables(*(take_rows(table, rows) for table in self.tables))
        self.hints = take_rows(self.hints, rows)


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``table[rows]``, in place where the number of rows stays: a captured step goes on reading the same address."""
    taken = table[rows]
    return table.copy_(taken) if taken.shape == table.shape else taken


def _empty_table(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows, columns), -1, dtype=torch.int32, device=device)
