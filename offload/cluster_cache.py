"""The GPU cluster cache of a layer: recently used blocks of tokens in slots, and the tables that say where."""

from __future__ import annotations

import torch

from tiered_kv.kernels.lookup import SlotTables, assign_slots
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

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.slots, *self.tables))

    def look_up(self, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the selected blocks and which of them are missing; the missing ones get slots of their own."""
        return assign_slots(self.tables, selection.blocks, policy=self.policy)

    def recall(self, host: HostStore, selection: Selection, slots: torch.Tensor, missed: torch.Tensor) -> None:
        """Bring the missing blocks from the host into their slots."""
        recall_blocks(host.tokens, selection.starts, selection.lengths, slots, missed, self.slots)

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
        self.slots = self.slots[rows]
        self.tables = SlotTables(*(table[rows] for table in self.tables))


def _empty_table(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.full((rows, columns), -1, dtype=torch.int32, device=device)
