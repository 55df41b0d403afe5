"""Becoming somebody: a process without an epoch asks the registry for one.

It speaks under a provisional identity (a random number, epoch 0) which may do nothing but register, and forgets it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable
from typing import TypeVar

from ...core.actor import make_ref, with_deadline
from ...core.clock import Clock
from ...core.errors import CallError, LaunchError, MyxaError, NoSuchActor, NotExecuted
from ...core.failure_detector import Verdict
from ...core.handlers import HandlerSpec
from ...core.ids import PeerKey
from ..courier import Courier
from ..session.guard import PROVISIONAL
from ..session.pending import Route
from ..session.serving import Arrival
from ..session.session import Session
from ..session.wheel import TICK_S
from ..wire import Door, Lane, Transport
from .directory import NodeRecord
from .registry import REGISTRY, RegistryContract
from .seat import RegistrySeat

T = TypeVar("T")

LOOK_TICKS = 10
PATIENCE_S = 2.0
"""With the first attempt to register; doubled with each."""


async def join(
    seat: RegistrySeat, name: str, transport: Transport, clock: Clock, timeout_s: float, door: Door | None = None
) -> NodeRecord:
    """Register and return our record. Raises LaunchError naming the registry's endpoint if it does not answer.

    A registry that was restarted since its record was written is found on the way; `seat` then says where it is.
    """
    stranger = _Stranger()
    own = PeerKey(PROVISIONAL | secrets.randbits(31), 0)
    session = Session(own=own, name=name, transport=transport, host=stranger, clock=clock, door=door)
    session.on_greeted = seat.greeted
    transport.start(session)
    registry = make_ref(Courier(session.calls, _OnlyRegistry(seat), clock), RegistryContract, REGISTRY)
    give_up_at, patience_s = clock.monotonic() + timeout_s, PATIENCE_S
    try:
        while True:
            seat.look()
            asked = seat.key
            left_s = max(give_up_at - clock.monotonic(), TICK_S)  # this process may have stood still beyond it
            try:
                # An answer, or the question, may be lost with its connection. To ask again does no harm: it gives a
                # newer epoch, and nobody has heard of the one before.
                request = with_deadline(registry, min(left_s, patience_s))
                return await _ticking(session, seat, request.register(name, transport.endpoints, os.getpid()))
            except CallError as error:
                patience_s *= 2
                is_final = isinstance(error, NotExecuted) and seat.key == asked
                if is_final or clock.monotonic() >= give_up_at:
                    why = stranger.trouble or error
                    raise LaunchError(
                        f"{name}: no answer from the registry at {seat.rdzv.endpoints} within {timeout_s:g} s ({why})",
                        remedy="is the launcher of node 0 running and reachable, and is the job key the same?",
                    ) from error
                await asyncio.sleep(TICK_S)
    finally:
        session.close()


async def _ticking(session: Session, seat: RegistrySeat, work: Awaitable[T]) -> T:
    """Let the session's time pass while `work` is waited for, and stop waiting where the registry is not any more."""
    loop = asyncio.get_running_loop()
    num_ticks = 0

    def tick() -> None:
        nonlocal timer, num_ticks
        session.tick()
        num_ticks += 1
        asked = seat.key
        if num_ticks % LOOK_TICKS == 0 and seat.look():
            session.peer_over(asked, f"the registry is back as epoch {seat.key.epoch}")
        timer = loop.call_later(TICK_S, tick)

    timer = loop.call_later(TICK_S, tick)
    try:
        return await work
    finally:
        timer.cancel()


class _OnlyRegistry:
    """Finder of a process that knows nobody else."""

    def __init__(self, seat: RegistrySeat) -> None:
        self._seat = seat
        self.routes: dict[tuple[str, str, str], Route] = {}

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return NoSuchActor(f"{target}: this process has not joined yet")
        return self._seat.location.route(spec.name, spec.schema)

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

    def loop_back(self, lane: Lane, data: bytes | bytearray) -> None:
        pass

    def load(self) -> tuple[int, int]:
        return 0, 0

    def judged(self, key: PeerKey, verdict: Verdict, reason: str) -> None:
        pass

    def crashed(self, error: BaseException) -> None:
        self.trouble = f"{type(error).__name__}: {error}"
