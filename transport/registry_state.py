"""The registry's rules: who may take which epoch, what the directory says, what subscribers have missed. Sans-IO."""

from __future__ import annotations

import signal
from collections import deque

import msgspec

from ..core.errors import StaleEpoch
from .directory import ActorRecord, Departure, DirectoryUpdate, NodeRecord
from .wire import Endpoints

KEPT_UPDATES = 512
REGISTRY_NODE_ID = 1
"""Of the process that hosts the registry; its epoch is in the rendezvous record."""


class RegistryState:
    """Node names -> incarnations, and the numbered history of changes."""

    def __init__(self) -> None:
        self.version = 0
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

    def since(self, version: int) -> tuple[DirectoryUpdate, ...]:
        """What a mirror at `version` needs: nothing, the updates it missed, or a snapshot."""
        if version == self.version:
            return ()
        if self._updates and self._updates[0].version <= version + 1 <= self.version and version >= 0:
            return tuple(u for u in self._updates if u.version > version)
        return (DirectoryUpdate(version=self.version, is_snapshot=True, nodes=tuple(self._nodes.values())),)

    # -- changes

    def register(self, name: str, endpoints: Endpoints, pid: int = 0) -> NodeRecord:
        """A new incarnation of `name`; a living older one is thereby over."""
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        node_id = self._ids.setdefault(name, REGISTRY_NODE_ID + len(self._ids))
        old = self._nodes.get(name)
        record = NodeRecord(name=name, node_id=node_id, epoch=epoch, endpoints=endpoints, pid=pid)
        self._nodes[name] = record
        self._note(nodes=(record,), gone=(_departure(old, f"it was replaced by epoch {epoch}"),) if old else ())
        return record

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
        self._note(nodes=(record,), reasons=reasons)
        return record

    def depart(self, name: str, epoch: int, reason: str, pid: int = 0) -> bool:
        """An incarnation, told by its epoch or process id (0: not known), is over. False: it is not the current one."""
        node = self._nodes.get(name)
        if node is None or epoch not in (0, node.epoch) or pid not in (0, node.pid):
            return False
        del self._nodes[name]
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
        self._updates.append(DirectoryUpdate(version=self.version, nodes=nodes, gone=gone, reasons=reasons or {}))


def _departure(node: NodeRecord, reason: str) -> Departure:
    return Departure(name=node.name, node_id=node.node_id, epoch=node.epoch, reason=reason)


def exit_reason(status: int) -> str:
    """Words for an exit status as `asyncio` and `subprocess` give it: negative means a signal."""
    if status >= 0:
        return f"its process exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was killed by {name}"
