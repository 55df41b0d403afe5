"""The registry's rules: who may take which epoch, what the directory says, what subscribers have missed. Sans-IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ...core.errors import StaleEpoch
from ..wire import Endpoints
from .directory import ActorRecord, Departure, DirectoryUpdate, NodeRecord
from .journal import Entry, Known, Over

KEPT_UPDATES = 512
REGISTRY_NODE_ID = 1
"""Of the process that hosts the registry; its epoch is in the rendezvous record."""


class RegistryState:
    """Node names -> incarnations, and the numbered history of changes."""

    def __init__(self) -> None:
        self.version = 0
        self.history = 0
        """Epoch of the process that hosts the registry; part of every update."""
        self.presumed: set[str] = set()
        """Nodes that were alive when the last incarnation of the registry died, and were not heard of since."""
        self._ids: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._nodes: dict[str, NodeRecord] = {}
        self._updates: deque[DirectoryUpdate] = deque(maxlen=KEPT_UPDATES)

    # -- questions

    def node(self, name: str) -> NodeRecord | None:
        return self._nodes.get(name)

    def find(self, actor: str) -> NodeRecord | None:
        """The node that hosts that actor."""
        for node in self._nodes.values():
            if any(a.name == actor for a in node.actors):
                return node
        return None

    def nodes(self, prefix: str) -> tuple[NodeRecord, ...]:
        return tuple(n for name, n in sorted(self._nodes.items()) if name.startswith(prefix))

    def since(self, version: int, history: int = 0) -> tuple[DirectoryUpdate, ...]:
        """What a mirror at that version of that history needs: nothing, the updates it missed, or a snapshot."""
        is_ours = history == self.history
        if is_ours and version == self.version:
            return ()
        if is_ours and self._updates and self._updates[0].version <= version + 1 <= self.version and version >= 0:
            return tuple(u for u in self._updates if u.version > version)
        nodes = tuple(self._nodes.values())
        return (DirectoryUpdate(version=self.version, history=self.history, is_snapshot=True, nodes=nodes),)

    # -- changes

    def restore(self, entries: Iterable[Entry]) -> None:
        """Take up what the last incarnation of the registry knew; whom it knew is presumed to be alive."""
        for entry in entries:
            if isinstance(entry, Known):
                record = entry.record
                self._ids[record.name] = record.node_id
                if record.epoch >= self._epochs.get(record.name, 0):
                    self._epochs[record.name] = record.epoch
                    self._nodes[record.name] = record
            elif isinstance(entry, Over):
                record = self._nodes.get(entry.node)
                if record is not None and record.epoch == entry.epoch:
                    del self._nodes[entry.node]
        self.presumed = set(self._nodes)

    def grant(self, name: str, endpoints: Endpoints, pid: int = 0, role: str = "keeper") -> NodeRecord:
        """A number and an epoch that nobody has or had. Nobody is told yet: that is what `enter` is for."""
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        node_id = self._ids.setdefault(name, max(self._ids.values(), default=REGISTRY_NODE_ID - 1) + 1)
        return NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=endpoints, pid=pid, role=role)

    def enter(self, record: NodeRecord) -> None:
        """An incarnation that was granted is there; a living older one is thereby over. Raises StaleEpoch if a newer
        one has entered meanwhile."""
        old = self._nodes.get(record.name)
        if record.epoch != self._epochs.get(record.name) or (old is not None and old.epoch >= record.epoch):
            raise StaleEpoch(f"{record.name} epoch {record.epoch} was replaced before it was there")
        self._nodes[record.name] = record
        self.presumed.discard(record.name)
        self._note(
            nodes=(record,), gone=(_departure(old, f"it was replaced by epoch {record.epoch}"),) if old else ()
        )  # fmt: skip

    def register(self, name: str, endpoints: Endpoints, pid: int = 0, role: str = "keeper") -> NodeRecord:
        """Grant and enter, for registries that keep no journal."""
        record = self.grant(name, endpoints, pid, role)
        self.enter(record)
        return record

    def rejoin(self, record: NodeRecord) -> str:
        """A process that an earlier incarnation of the registry admitted is still there. Why it is not: else empty."""
        known = self._nodes.get(record.name)
        newest = self._epochs.get(record.name, 0)
        claimed = f"{record.name} epoch {record.epoch}"
        if known is None or known.epoch != record.epoch:
            if record.epoch > newest or newest == 0:
                return f"{claimed} was not given out by this registry"
            return f"{claimed} is over; " + (f"epoch {newest} is there" if known else f"the newest was {newest}")
        if (known.node_id, known.endpoints, known.pid) != (record.node_id, record.endpoints, record.pid):
            return f"{claimed} is another process"
        self.presumed.discard(record.name)
        if known.actors != record.actors:
            self._nodes[record.name] = mended = msgspec.structs.replace(known, actors=record.actors)
            self._note(nodes=(mended,))
        return ""

    def announce(self, name: str, epoch: int, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> NodeRecord:
        """The actors of an incarnation, all of them. Raises StaleEpoch if it is not the current one."""
        old = self._current(name, epoch)
        for actor in actors:
            host = self.find(actor.name)
            if host is not None and host.name != name:
                raise StaleEpoch(
                    f"{actor.name} already lives in {host.name}", remedy="names are unique; stop the other one first"
                )
        record = msgspec.structs.replace(old, actors=actors)
        self._nodes[name] = record
        self.presumed.discard(name)
        self._note(nodes=(record,), reasons=reasons)
        return record

    def depart(self, name: str, epoch: int, reason: str, pid: int = 0) -> bool:
        """An incarnation, told by its epoch or process id (0: not known), is over. False: it is not the current one."""
        node = self._nodes.get(name)
        if node is None or epoch not in (0, node.epoch) or pid not in (0, node.pid):
            return False
        del self._nodes[name]
        self.presumed.discard(name)
        self._note(gone=(_departure(node, reason),))
        return True

    def _current(self, name: str, epoch: int) -> NodeRecord:
        node = self._nodes.get(name)
        if node is None or node.epoch != epoch:
            newest = self._epochs.get(name, 0)
            raise StaleEpoch(f"{name} epoch {epoch} is not registered; the newest is {newest}")
        return node

    def _note(
        self,
        nodes: tuple[NodeRecord, ...] = (),
        gone: tuple[Departure, ...] = (),
        reasons: dict[str, str] | None = None,
    ) -> None:
        self.version += 1
        self._updates.append(
            DirectoryUpdate(version=self.version, history=self.history, nodes=nodes, gone=gone, reasons=reasons or {})
        )


def _departure(node: NodeRecord, reason: str) -> Departure:
    return Departure(name=node.name, node_id=node.node_id, epoch=node.epoch, reason=reason)
