"""Who is where: the records that the registry keeps and every node mirrors. Sans-IO.

The mirror is a snapshot at some version and the updates after it, in order, those that say nothing to it left out.
Calls use the mirror, so the data plane works on while the registry is away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from ...core.actor import PeerEvent
from ...core.errors import CallError, NoSuchActor, NoSuchMethod
from ...core.ids import PeerKey
from ...core.record import Record
from ..session.pending import Route
from ..wire import Endpoints

MAX_TOMBSTONES = 1000


class HostedActor(Record, frozen=True):
    """An actor as others may call it."""

    name: str
    index: int
    handlers: tuple[str, ...]
    """Names, in the order of the handlers' indexes."""


class NodeRecord(Record, frozen=True):
    """A process incarnation."""

    name: str
    node_id: int
    epoch: int
    endpoints: Endpoints
    pid: int = 0
    actors: tuple[HostedActor, ...] = ()
    role: str = "keeper"
    """What it may do: see `guard.Role`."""

    @property
    def key(self) -> PeerKey:
        return PeerKey(self.node_id, self.epoch)


def keys_of(nodes: Iterable[NodeRecord]) -> dict[str, tuple[PeerKey, str]]:
    """Public key -> incarnation and name, of those that listen on tcp."""
    return {node.endpoints.curve: (node.key, node.name) for node in nodes if node.endpoints.curve}


class EndedNode(Record, frozen=True):
    """An incarnation that is over."""

    name: str
    node_id: int
    epoch: int
    reason: str


class DirectoryUpdate(Record, frozen=True):
    """One step of the registry's state, or (`is_snapshot`) all of it."""

    version: int
    is_snapshot: bool = False
    nodes: tuple[NodeRecord, ...] = ()
    gone: tuple[EndedNode, ...] = ()
    reasons: dict[str, str] = {}
    """Actor name -> why it is not there any more, for actors that end before their process."""


class Location(msgspec.Struct, frozen=True):
    """Where an actor is."""

    node: NodeRecord
    actor: HostedActor

    def route(self, method: str) -> Route | CallError:
        """The numbers for calling `method` there, or why that cannot be."""
        name, handlers = self.actor.name, self.actor.handlers
        if method not in handlers:
            return NoSuchMethod(f"{name} has no handler {method!r}", remedy=f"it has: {', '.join(handlers)}")
        index = handlers.index(method)
        return Route(peer=self.node.key, endpoints=self.node.endpoints, actor=self.actor.index, method=index)


class Directory:
    """A mirror of the registry's state."""

    def __init__(self) -> None:
        self.version = -1
        """Of the last update applied; -1: none yet."""
        self._nodes: dict[str, NodeRecord] = {}
        self._actors: dict[str, Location] = {}
        self._tombstones: OrderedDict[str, str] = OrderedDict()
        self._routes: dict[tuple[str, str], Route] = {}
        """What `route` found since the last update."""

    def apply(self, update: DirectoryUpdate) -> tuple[list[PeerEvent], list[EndedNode]]:
        """Take an update, an old one without effect: what changed for actors, and which incarnations are over."""
        if not update.is_snapshot and update.version <= self.version:
            return [], []
        gone, now = list(update.gone), {n.name: n for n in update.nodes}
        touched = dict.fromkeys([*(d.name for d in gone), *now])
        if update.is_snapshot:
            touched = dict.fromkeys([*self._nodes, *now])
            gone += [
                EndedNode(name=n.name, node_id=n.node_id, epoch=n.epoch, reason="it left")
                for n in self._nodes.values()
                if n.name not in now or now[n.name].epoch != n.epoch
            ]
        # Only what is touched: with a thousand nodes each has a thousand such updates while they join.
        was = [self._nodes[name] for name in touched if name in self._nodes]
        before = {a.name: self._actors.pop(a.name) for node in was for a in node.actors if a.name in self._actors}
        for departure in gone:
            if departure.name in self._nodes and self._nodes[departure.name].epoch <= departure.epoch:
                del self._nodes[departure.name]
        self._nodes.update(now)
        after = {a.name: Location(n, a) for name in touched if (n := self._nodes.get(name)) for a in n.actors}
        self._actors.update(after)
        self.version = update.version
        self._routes.clear()
        reasons = {d.name: d.reason for d in gone}
        return self._changes(before, after, reasons, update.reasons), gone

    def _changes(
        self, before: dict[str, Location], after: dict[str, Location], by_node: dict[str, str], by_actor: dict[str, str]
    ) -> list[PeerEvent]:
        events: list[PeerEvent] = []
        for name, old in before.items():
            if name not in after:
                reason = by_actor.get(name) or by_node.get(old.node.name) or "it stopped"
                self._tombstones[name] = reason
                self._tombstones.move_to_end(name)
                if len(self._tombstones) > MAX_TOMBSTONES:
                    self._tombstones.popitem(last=False)
                events.append(PeerEvent("down", name, old.node.epoch, reason))
        for name, new in after.items():
            old = before.get(name)
            self._tombstones.pop(name, None)
            if old is None:
                events.append(PeerEvent("up", name, new.node.epoch))
            elif old.node.key != new.node.key:
                events.append(PeerEvent("restarted", name, new.node.epoch, by_node.get(old.node.name, "")))
        return events

    def find(self, name: str) -> Location | None:
        return self._actors.get(name)

    def route(self, name: str, method: str) -> Route | CallError | None:
        """How to call `method` of `name`, why that cannot be, or None: the name is unknown."""
        cached = self._routes.get((name, method))
        if cached is not None:
            return cached
        location = self._actors.get(name)
        if location is None:
            return None
        route = location.route(method)
        if isinstance(route, Route):
            self._routes[name, method] = route
        return route

    def nodes(self) -> tuple[NodeRecord, ...]:
        return tuple(self._nodes.values())

    def epoch_of(self, name: str) -> int:
        """Of the incarnation of that node that is there; 0: none is."""
        record = self._nodes.get(name)
        return 0 if record is None else record.epoch

    def has_ended(self, name: str) -> bool:
        return name in self._tombstones

    def names(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(sorted(name for name in self._actors if name.startswith(prefix)))

    def missing(self, name: str) -> NoSuchActor:
        if name in self._tombstones:
            return NoSuchActor(
                f"{name} is not there any more: {self._tombstones[name]}", remedy="try again when it is back"
            )
        names = ", ".join(self.names()) or "no actor"
        return NoSuchActor(f"no actor is called {name!r}", remedy=f"known now: {names}")
