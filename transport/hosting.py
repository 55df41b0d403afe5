"""The actors that live in this process: their numbers, the calls that come for them, the events they watch."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..core.actor import PeerEvent
from ..core.errors import BadRequest, ConfigError, MyxaError, NoSuchActor, NoSuchMethod
from ..core.handlers import HandlerSpec
from ..core.ids import PeerKey
from .cell import ActorCell
from .directory import ActorRecord
from .frames import Kind
from .inbound import Delivery
from .serving import Arrival
from .session import LOOPBACK, Session
from .wire import Lane


class Keeper(Protocol):
    """What the node does with news that concern all of it."""

    def peer_unreachable(self, key: PeerKey, why: str) -> None: ...

    def node_failed(self, error: BaseException) -> None: ...


class Hosting:
    """Implements `session.SessionHost`."""

    def __init__(self, keeper: Keeper) -> None:
        self._cells: dict[int, ActorCell] = {}
        self._next_index = 0
        self._session: Session | None = None
        self._watched: list[tuple[str, ActorCell]] = []
        self._keeper = keeper

    def serve_with(self, session: Session) -> None:
        """Where answers go."""
        self._session = session

    # -- actors

    def add(self, cell: ActorCell) -> None:
        """Give an actor a number; it is never given again in this incarnation."""
        if any(other.name == cell.name for other in self._cells.values()):
            raise ConfigError(f"there is an actor {cell.name!r} in this process already", remedy="names are unique")
        self._cells[self._next_index] = cell
        self._next_index += 1

    def remove(self, cell: ActorCell) -> None:
        self._cells = {index: other for index, other in self._cells.items() if other is not cell}
        self._watched = [(prefix, other) for prefix, other in self._watched if other is not cell]

    def cells(self) -> tuple[ActorCell, ...]:
        """In the order in which they were started."""
        return tuple(self._cells.values())

    def records(self) -> tuple[ActorRecord, ...]:
        """What others need to know of them."""
        return tuple(
            ActorRecord(name=cell.name, index=index, handlers=cell.table.schema) for index, cell in self._cells.items()
        )

    # -- events

    def watch(self, cell: ActorCell, prefix: str) -> None:
        if (prefix, cell) not in self._watched:
            self._watched.append((prefix, cell))

    def tell(self, event: PeerEvent) -> None:
        """Give an event to every actor that watches that name, once."""
        told: list[ActorCell] = []
        for prefix, cell in self._watched:
            if event.name.startswith(prefix) and cell.name != event.name and cell not in told:
                told.append(cell)
                cell.post(event)

    # -- calls

    def deliver(self, arrival: Arrival) -> None:
        envelope = arrival.envelope
        cell = self._cells.get(envelope.actor)
        if cell is None or self._session is None:
            raise NoSuchActor(f"there is no actor {envelope.actor} in this process (any more)")
        if envelope.method >= len(cell.table.specs):
            raise NoSuchMethod(f"{cell.name} has no handler {envelope.method}")
        spec = cell.table.specs[envelope.method]
        _check_kind(cell, spec, arrival)
        delivery = arrival.handle = Delivery(arrival, spec, cell.name, self._session.serving)
        cell.accept(delivery)

    def abandon(self, arrival: Arrival) -> None:
        cell = self._cells.get(arrival.envelope.actor)
        if cell is not None and arrival.handle is not None:
            cell.abandon(arrival.handle)

    def demanded(self, arrival: Arrival) -> None:
        if arrival.handle is not None:
            arrival.handle.demanded()

    def loop_back(self, lane: Lane, data: bytearray) -> None:
        if self._session is not None:
            asyncio.get_running_loop().call_soon(self._session.received, LOOPBACK, lane, memoryview(data))

    # -- news for the node

    def unreachable(self, key: PeerKey, why: str) -> None:
        self._keeper.peer_unreachable(key, why)

    def fenced(self, error: MyxaError) -> None:
        self._keeper.node_failed(error)

    def crashed(self, error: BaseException) -> None:
        self._keeper.node_failed(error)


def _check_kind(cell: ActorCell, spec: HandlerSpec, arrival: Arrival) -> None:
    kind = spec.declaration.kind
    if arrival.is_cast != (kind == "cast") or bool(arrival.envelope.key) != (kind == "put"):
        sent = "cast" if arrival.envelope.kind is Kind.CAST else "call"
        raise BadRequest(f"{cell.name}.{spec.name} is a {kind}, not a {sent}")
