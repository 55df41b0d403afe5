"""Becoming somebody: a process without an epoch asks the registry for one.

It speaks under a provisional identity (a random number, epoch 0) which may do nothing but register, and forgets it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable
from typing import TypeVar

from ..core.actor import make_ref, with_deadline
from ..core.clock import Clock
from ..core.errors import CallError, LaunchError, MyxaError, NoSuchActor
from ..core.handlers import HandlerSpec, handlers_of
from ..core.ids import PeerKey
from .address import Rendezvous
from .courier import Courier
from .directory import ActorRecord, Location, NodeRecord
from .pending import Route
from .registry import REGISTRY, RegistryContract
from .serving import Arrival
from .session import Session
from .wheel import TICK_S
from .wire import Lane, Transport

T = TypeVar("T")

PROVISIONAL = 1 << 31


def registry_location(rdzv: Rendezvous) -> Location:
    """The registry as the rendezvous record describes it; its handlers are those of our own code."""
    node = NodeRecord(name=REGISTRY, node_id=rdzv.node_id, epoch=rdzv.epoch, endpoints=rdzv.endpoints)
    return Location(node, ActorRecord(name=REGISTRY, index=0, handlers=handlers_of(RegistryContract).schema))


async def join(rdzv: Rendezvous, name: str, transport: Transport, clock: Clock, timeout_s: float) -> NodeRecord:
    """Register and return our record. Raises LaunchError naming the registry's endpoint if it does not answer."""
    stranger = _Stranger()
    own = PeerKey(PROVISIONAL | secrets.randbits(31), 0)
    session = Session(own=own, name=name, transport=transport, host=stranger, clock=clock)
    transport.start(session)
    courier = Courier(session.calls, _OnlyRegistry(registry_location(rdzv)), clock)
    registry = with_deadline(make_ref(courier, RegistryContract, REGISTRY), timeout_s)
    try:
        return await _ticking(session, stranger, registry.register(name, transport.endpoints, os.getpid()))
    except CallError as error:
        why = stranger.trouble or error
        raise LaunchError(
            f"{name}: no answer from the registry at {rdzv.endpoints} within {timeout_s:g} s ({why})",
            remedy="is the launcher of node 0 running and reachable, and is the job key the same?",
        ) from error
    finally:
        session.close()


async def _ticking(session: Session, stranger: _Stranger, work: Awaitable[T]) -> T:
    """Let the session's time pass while `work` is waited for."""
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal timer
        session.tick()
        timer = loop.call_later(TICK_S, tick)

    timer = loop.call_later(TICK_S, tick)
    try:
        return await work
    finally:
        timer.cancel()


class _OnlyRegistry:
    """Finder of a process that knows nobody else."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return NoSuchActor(f"{target}: this process has not joined yet")
        return self._location.route(spec.name, spec.schema)

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        return NoSuchActor(f"{target}: this process has not joined yet")

    def has_ended(self, target: str) -> bool:
        return False


class _Stranger:
    """Session host of a process that serves nobody yet."""

    def __init__(self) -> None:
        self.trouble = ""

    def deliver(self, arrival: Arrival) -> None:
        raise NoSuchActor("this process has not joined yet")

    def abandon(self, arrival: Arrival) -> None:
        pass

    def demanded(self, arrival: Arrival) -> None:
        pass

    def unreachable(self, key: PeerKey, why: str) -> None:
        self.trouble = why

    def fenced(self, error: MyxaError) -> None:
        self.trouble = str(error)

    def loop_back(self, lane: Lane, data: bytearray) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        self.trouble = f"{type(error).__name__}: {error}"
