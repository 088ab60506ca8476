"""Layers that move in step: each takes one token per decode step, so one clock on the device serves them all."""

from __future__ import annotations

from typing import Protocol

import torch

from tiered_kv.errors import TieredKVError
from tiered_kv.window import WindowClock


class Member(Protocol):
    """A layer's window, as seen by its lane."""

    @property
    def window_length(self) -> int: ...

    @property
    def has_room(self) -> bool: ...

    def make_room(self) -> None: ...

    def note_appended(self) -> None: ...

    @property
    def counted(self) -> tuple[int, int]: ...

    def recount(self, counted: tuple[int, int]) -> None: ...

    @property
    def rebuilt(self) -> int: ...

    def addresses(self) -> tuple[int, ...]: ...


class Lane:
    """The layers of one kind on one device, in the model's order, and the clock they share.

    All that changes shapes or addresses happens in :meth:`make_room`, between steps; what remains of a step reads the
    clock on the device and can be captured and replayed.

    Attributes:
        members: The windows of the layers.
        changes: How often members made room: addresses may have changed then, and only then.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = WindowClock(device)
        self.members: list[Member] = []
        self.changes = 0

    def begin_decode(self, member: Member) -> None:
        """Before ``member`` takes one token: the first member makes room in all and sets the clock on."""
        if member is self.members[0]:
            self.make_room()
            self.clock.advance()

    def make_room(self) -> None:
        """Make room for one token in every member: the only part of a step that may cluster, store or allocate.

        Raises:
            TieredKVError: The layers are not in step, as a forward pass that raised half-way leaves them.
        """
        (_, first), (_, last) = self.members[0].counted, self.members[-1].counted
        if first != last:
            raise TieredKVError(
                f"the first layer holds {first} tokens and the last one {last}: a forward pass was cut short;"
                f" crop() the cache to {min(first, last)} tokens, or begin a new one"
            )
        if not self.members[0].has_room:
            self.changes += 1
            with torch.cuda.device_of(self.clock.length):  # kernels are launched on the current device
                for member in self.members:
                    member.make_room()
        self.clock.set(self.members[0].window_length)

    def recount(self, length: int, members: list[tuple[int, int]]) -> None:
        """Take back what was counted since ``clock.host_length`` and the members' ``counted`` were these."""
        self.clock.host_length = length
        for member, counted in zip(self.members, members, strict=True):
            member.recount(counted)

    def note_step(self) -> None:
        """Count a step that the device took by itself, in a replayed graph."""
        self.clock.host_length += 1
        for member in self.members:
            member.note_appended()
