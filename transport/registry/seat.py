"""Where the registry is, as far as this process has heard.

It may die and come back as another incarnation. On its own host it posts a record in the directory of the sockets, at a
path that stays; to other hosts it comes back at its tcp address, and tells those who ask for the old incarnation who it
is now (HELLO). Both are taken only for something newer.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...core.errors import LaunchError
from ...core.handlers import handlers_of
from ...core.ids import PeerKey
from ..address import Rendezvous
from ..wire import Endpoints
from .directory import ActorRecord, Location, NodeRecord
from .registry import REGISTRY, RegistryContract

POSTED = "registry.json"
"""Name of the record in the directory of the sockets."""


class RegistrySeat:
    """Begins with the record that this process was given."""

    def __init__(self, rdzv: Rendezvous, node_rank: int) -> None:
        self.rdzv = rdzv
        """What others need to join."""
        is_near = bool(rdzv.socket_dir) and rdzv.endpoints.node_rank == node_rank
        self._posted = Path(rdzv.socket_dir) / POSTED if is_near else None
        self._seen = (0, 0)
        self.location = registry_location(rdzv)

    @property
    def key(self) -> PeerKey:
        """The registry's process."""
        return self.location.node.key

    def greeted(self, key: PeerKey, endpoints: Endpoints) -> bool:
        """Some process said HELLO: whether it is a newer incarnation of the registry's."""
        if key.node_id != self.key.node_id or key.epoch <= self.key.epoch:
            return False
        self._move(msgspec.structs.replace(self.rdzv, epoch=key.epoch, endpoints=endpoints))
        return True

    def look(self) -> bool:
        """Whether a newer one has posted itself. Costs a `stat` while nothing has changed."""
        if self._posted is None:
            return False
        try:
            facts = self._posted.stat()
            if (facts.st_mtime_ns, facts.st_ino) == self._seen:
                return False
            self._seen = facts.st_mtime_ns, facts.st_ino
            posted = Rendezvous.load(self._posted)
        except (OSError, LaunchError):
            return False  # nobody posts there, or the job is over; its address may still answer
        if posted.node_id != self.key.node_id or posted.epoch <= self.key.epoch:
            return False
        self._move(posted)
        return True

    def _move(self, rdzv: Rendezvous) -> None:
        self.rdzv = rdzv
        self.location = registry_location(rdzv)


def registry_location(rdzv: Rendezvous) -> Location:
    """The registry as the rendezvous record describes it; its handlers are those of our own code."""
    node = NodeRecord(name=REGISTRY, node_id=rdzv.node_id, epoch=rdzv.epoch, endpoints=rdzv.endpoints)
    return Location(node, ActorRecord(name=REGISTRY, index=0, handlers=handlers_of(RegistryContract).schema))
