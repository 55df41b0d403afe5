"""What the memory parts of two processes say to each other, by ordinary small calls.

Every node answers them under a number that is not in the registry's tables: they belong to a process, not to a name.
"""

from __future__ import annotations

import msgspec

from ...core.actor import Actor
from ...core.handlers import call
from ...core.ids import PeerKey

MEMORY_INDEX = 0xFFFF_FFFF
"""Number of this actor in every process."""


class Findings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the process that was asked can read the memory of the one that asked."""

    pid: int = 0
    """Of the one that was asked; 0: another host."""
    can_pull: bool = False
    can_map: bool = False
    why: str = ""
    """What is not possible, and why not."""


class Shown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a challenge was written: in private memory and in a slab."""

    address: int
    path: str
    slab_id: int
    offset: int


class MemoryContract(Actor):
    """See the module's head."""

    @call(deadline=3, reentrant=True)
    async def probe(self, pid: int, boot_id: str) -> Findings:
        """The caller is process `pid` of host `boot_id`: try to read its memory."""
        raise NotImplementedError

    @call(deadline=2, reentrant=True)
    async def show(self, challenge: str, reader: int) -> Shown:
        """Write the challenge where process `reader` is going to look for it."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def hold(self, ticket: int) -> bool:
        """The caller keeps a block until it releases it. False: the offer is over; do not look."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True, idempotent=True)
    async def release(self, tickets: tuple[int, ...]) -> None:
        """The caller has read these blocks, or keeps them no longer."""
        raise NotImplementedError


def memory_name(key: PeerKey) -> str:
    """Under which a reference to that process's memory part goes."""
    return f"memory/{key.node_id}.{key.epoch}"
