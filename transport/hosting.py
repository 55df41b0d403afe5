"""The actors of this process: their numbers, the calls that arrive for them, the events they watch."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..core.actor import PeerEvent
from ..core.errors import BadRequest, ConfigError, Draining, MyxaError, NoSuchActor, NoSuchMethod
from ..core.ids import PeerKey
from .actor_runner import ActorRunner, Delivery
from .registry.directory import HostedActor
from .session.heartbeat import Verdict
from .session.links import Arrival
from .session.session import LOOPBACK, Session
from .wire import Lane


class NodeEvents(Protocol):
    """What the node does with events that concern all of it."""

    def peer_unreachable(self, key: PeerKey, why: str) -> None: ...

    def peer_judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None: ...

    def node_failed(self, error: BaseException) -> None: ...


class Hosting:
    """Implements `session.SessionHost`."""

    def __init__(self, node_events: NodeEvents) -> None:
        self._cells: dict[int, ActorRunner] = {}
        self._next_index = 0
        self._session: Session | None = None
        self._watched: list[tuple[str, ActorRunner]] = []
        self._node_events = node_events
        self.retry_after_s: float | None = None
        """Set: this process is shutting down, calls of others are refused with this advice."""
        self._num_delivered = 0

    def serve_with(self, session: Session) -> None:
        self._session = session

    def add(self, cell: ActorRunner) -> None:
        """Give an actor a number; it is never given again in this incarnation."""
        if any(other.name == cell.name for other in self._cells.values()):
            raise ConfigError(f"there is an actor {cell.name!r} in this process already", remedy="names are unique")
        self._cells[self._next_index] = cell
        self._next_index += 1

    def remove(self, cell: ActorRunner) -> None:
        self._cells = {index: other for index, other in self._cells.items() if other is not cell}
        self._watched = [(prefix, other) for prefix, other in self._watched if other is not cell]

    def cells(self) -> tuple[ActorRunner, ...]:
        return tuple(self._cells.values())

    def records(self) -> tuple[HostedActor, ...]:
        return tuple(
            HostedActor(name=cell.name, index=index, handlers=cell.table.schema) for index, cell in self._cells.items()
        )

    def watch(self, cell: ActorRunner, prefix: str) -> None:
        if (prefix, cell) not in self._watched:
            self._watched.append((prefix, cell))

    def tell(self, event: PeerEvent) -> None:
        notified: list[ActorRunner] = []
        for prefix, cell in self._watched:
            if event.name.startswith(prefix) and cell.name != event.name and cell not in notified:
                notified.append(cell)
                cell.post(event)

    def deliver(self, arrival: Arrival) -> None:
        envelope, session = arrival.envelope, self._session
        cell = self._cells.get(envelope.actor)
        if cell is None or session is None:
            raise NoSuchActor(f"there is no actor {envelope.actor} in this process (any more)")
        specs, method = cell.table.specs, envelope.method
        if method >= len(specs):
            raise NoSuchMethod(f"{cell.name} has no handler {method}")
        spec = specs[method]
        kind = spec.declaration.kind
        if arrival.is_cast != (kind == "cast"):
            sent = "cast" if arrival.is_cast else "call"
            raise BadRequest(f"{cell.name}.{spec.name} is a {kind}, not a {sent}")
        if self.retry_after_s is not None and arrival.peer != session.own:
            why = f"{cell.name}: its process is shutting down and takes no {spec.name}"
            raise Draining(why, retry_after_s=self.retry_after_s)
        delivery = arrival.handle = Delivery(
            spec, envelope.chain, arrival.deadline_at, envelope.trace, arrival.link.key, arrival, cell.codecs[method],
            cell.name, session.serving,
        )  # fmt: skip
        cell.accept(delivery)
        self._num_delivered += 1

    def abandon(self, arrival: Arrival) -> None:
        cell = self._cells.get(arrival.envelope.actor)
        if cell is not None and arrival.handle is not None:
            cell.abandon(arrival.handle)

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        if self._session is not None:
            asyncio.get_running_loop().call_soon(self._session.received, LOOPBACK, lane, memoryview(data))

    def load(self) -> tuple[int, int]:
        num_held = sum(cell.num_held for cell in self._cells.values())
        return self._num_delivered - num_held, num_held

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        self._node_events.peer_judged(key, verdict, reason)

    def unreachable(self, key: PeerKey, why: str) -> None:
        self._node_events.peer_unreachable(key, why)

    def fenced(self, error: MyxaError) -> None:
        self._node_events.node_failed(error)

    def crashed(self, error: BaseException) -> None:
        self._node_events.node_failed(error)
