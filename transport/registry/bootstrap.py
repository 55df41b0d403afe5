"""Joining the registry, hosting it, and the mirror of its directory in every other process.

`join` speaks under a provisional identity (a random number, epoch 0), which may only register. While the registry does
not answer, the mirror stays as it is and calls continue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ...core.actor import PeerEvent
from ...core.changes import Changes
from ...core.clock import Clock
from ...core.errors import (
    CallError,
    LaunchError,
    MyxaError,
    NoSuchActor,
    NotExecuted,
    NotSent,
    OutcomeUnknown,
    Overloaded,
    RemoteError,
    StaleEpoch,
)
from ...core.handlers import HandlerSpec, handlers_of, remaining_s
from ...core.ids import PeerKey
from ...core.refs import make_ref, with_deadline
from ...core.timeouts import TIMEOUTS
from ..address import Rendezvous
from ..codec import UndecodableError, codecs_of
from ..session.faults import with_callee
from ..session.frames import Envelope
from ..session.guard import PROVISIONAL
from ..session.links import Arrival, SessionHost
from ..session.pending import Outcome, PendingCall, Route
from ..session.session import Session
from ..wire import Transport
from .directory import Directory, DirectoryUpdate, HostedActor, Location, NodeRecord, keys_of
from .registry import REGISTRY, REGISTRY_KEY, RegistryActor


def host_registry(name: str, transport: Transport) -> tuple[RegistryActor, NodeRecord, Rendezvous]:
    """The registry with this process as its first member, and how others find it."""
    registry = RegistryActor(transport.guard)
    record = registry.state.register(name, transport.endpoints, os.getpid())
    transport.follow(keys_of(registry.state.nodes()))
    rdzv = Rendezvous(endpoints=record.endpoints, socket_dir=transport.socket_dir, key_file=transport.key_file)
    return registry, record, rdzv


async def join(rdzv: Rendezvous, name: str, transport: Transport, clock: Clock, timeout_s: float) -> NodeRecord:
    """Register and return our record. Raises LaunchError naming the registry's endpoint if it does not answer."""
    stranger = _Stranger()
    key = PeerKey(PROVISIONAL | secrets.randbits(31), 0)
    session = Session(own=key, name=name, transport=transport, host=stranger, clock=clock)
    transport.start(session)
    ticking = asyncio.get_running_loop().create_task(_tick(session), name=f"{name}: join")
    registry = Mirror(rdzv, session, clock, lambda _: None, lambda _: None).registry
    give_up_at, patience_s = clock.monotonic() + timeout_s, TIMEOUTS.wire.join_again_s
    try:
        while True:
            # This process may have been stopped beyond its time.
            left_s = max(give_up_at - clock.monotonic(), TIMEOUTS.wire.tick_s)
            try:
                # An answer, or the question, may be lost with its connection. To ask again does no harm: it gives a
                # newer epoch, and no process has heard of the one before.
                request = with_deadline(registry, min(left_s, patience_s))
                return await request.register(name, transport.endpoints, os.getpid())
            except CallError as error:
                patience_s *= 2
                if isinstance(error, NotExecuted) or clock.monotonic() >= give_up_at:
                    why = stranger.trouble or error
                    raise LaunchError(
                        f"{name}: no answer from the registry at {rdzv.endpoints} within {timeout_s:g} s ({why})",
                        remedy="is the launcher of node 0 running and reachable, and is the job key the same?",
                    ) from error
                await asyncio.sleep(TIMEOUTS.wire.tick_s)
    finally:
        ticking.cancel()
        session.close()


async def _tick(session: Session) -> None:
    while True:
        await asyncio.sleep(TIMEOUTS.wire.tick_s)
        session.tick()


class _Stranger(SessionHost):
    def __init__(self) -> None:
        self.trouble = ""

    def deliver(self, arrival: Arrival) -> None:
        raise NoSuchActor("this process has not joined yet")

    def unreachable(self, key: PeerKey, why: str) -> None:
        self.trouble = why

    def fenced(self, error: MyxaError) -> None:
        self.trouble = str(error)

    def num_waiting(self) -> int:
        return 0

    def crashed(self, error: BaseException) -> None:
        self.trouble = f"{type(error).__name__}: {error}"


class Mirror:
    """The directory as this process knows it, and the calls that it leads to. Implements `core.refs.RequestSender`:
    every wait ends by the call's deadline, by the callee's end, or by cancellation."""

    def __init__(
        self, rdzv: Rendezvous, session: Session, clock: Clock, tell: Callable[[PeerEvent], None],
        fenced: Callable[[StaleEpoch], None],
    ) -> None:  # fmt: skip
        self.directory = Directory()
        node = NodeRecord(
            name=REGISTRY, node_id=REGISTRY_KEY.node_id, epoch=REGISTRY_KEY.epoch, endpoints=rdzv.endpoints
        )
        actor = HostedActor(name=REGISTRY, index=0, handlers=handlers_of(RegistryActor).names)
        self._location = Location(node, actor)
        self._session = session
        self._clock = clock
        self._tell = tell
        self._fenced = fenced
        self.changes = Changes()
        """Of the directory."""
        self._log = logging.getLogger("myxa.transport")
        self.registry = make_ref(self, RegistryActor, REGISTRY)
        self.on_update: Callable[[Directory], None] | None = None
        """Called first when something has changed: who may speak is decided by the directory."""

    async def follow(self) -> None:
        while True:
            try:
                for update in await self.registry.updates(self.directory.version):
                    self._take(update)
            except CallError as error:
                self._log.warning("the registry's updates stopped: %s", error)
                await asyncio.sleep(TIMEOUTS.wire.retry_s)

    async def announce(
        self, name: str, epoch: int, actors: Callable[[], tuple[HostedActor, ...]], reasons: dict[str, str]
    ) -> None:
        """Publish this node's actors and wait until the mirror has them; repeated, as they are then, while the registry
        is away or late: the last list counts."""
        give_up_at = self._clock.monotonic() + TIMEOUTS.wire.away_s
        while True:
            try:
                version = await self.registry.announce(name, epoch, actors(), reasons)
            except (NotSent, OutcomeUnknown, Overloaded):
                if self._clock.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(TIMEOUTS.wire.retry_s)
            else:
                break
        await self.changes.until(lambda: self.directory.version >= version, TIMEOUTS.wire.seen_s)

    def _take(self, update: DirectoryUpdate) -> None:
        events, gone = self.directory.apply(update)
        if self.on_update is not None:
            self.on_update(self.directory)
        for departure in gone:
            key = PeerKey(departure.node_id, departure.epoch)
            if key == self._session.own:
                self._fenced(StaleEpoch(f"{departure.name} epoch {departure.epoch} is over: {departure.reason}"))
            self._session.peer_over(key, departure.reason)
        for event in events:
            self._tell(event)
            if event.kind == "down":
                self._session.calls.on_actor_gone(event.name, event.reason)
        self.changes.tell()

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        future: asyncio.Future[Envelope] = asyncio.get_running_loop().create_future()
        now = self._clock.monotonic()
        left_s = remaining_s(deadline_s, now)
        if left_s is not None and left_s <= 0:
            raise with_callee(NotSent(f"{target}.{spec.name}: no time is left of the call that makes it"), target)
        body, frames = codecs_of(spec).request.encode(request)
        call = PendingCall(
            target=target, method=spec.name, body=body, frames=frames, tell=partial(_settle, future),
            deadline_at=None if left_s is None else now + left_s,
        )  # fmt: skip
        route = self.route(target, spec)
        if route is None:
            left_s = None if call.deadline_at is None else call.deadline_at - self._clock.monotonic()
            route = await self.find(target, spec, left_s)
        if isinstance(route, CallError):
            raise with_callee(route, target)
        try:
            corr = self._session.calls.submit(call, route)
        except CallError as error:
            raise with_callee(error, target) from None
        try:
            envelope = await future
        except asyncio.CancelledError:
            self._session.calls.cancel(corr)
            if future.done() and not future.cancelled():
                future.exception()  # it came in the same turn of the loop, and is of no use to anybody
            raise
        return _decode_answer(envelope, target, spec)

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        if target != REGISTRY:
            return self.directory.route(target, spec.name)
        return self._location.route(spec.name)

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        if self.directory.has_ended(target):
            return self.directory.missing(target)
        wait_s = TIMEOUTS.wire.lookup_s if timeout_s is None else min(TIMEOUTS.wire.lookup_s, max(0.0, timeout_s / 2))
        await self._wait((target,), wait_s)
        return self.directory.route(target, spec.name) or self.directory.missing(target)

    async def _wait(self, names: tuple[str, ...], timeout_s: float) -> bool:
        """Whether all these actors were there in time. Of those that are not the registry is asked to tell: where they
        and we are in a crowd, it does not by itself."""
        give_up_at = self._clock.monotonic() + timeout_s
        with suppress(CallError):
            for name in (name for name in names if self.directory.find(name) is None):
                registry = with_deadline(self.registry, timeout_s)
                for update in await registry.updates(self.directory.version, 0.0, name):
                    self._take(update)
        left_s = give_up_at - self._clock.monotonic()
        return await self.changes.until(lambda: all(self.directory.find(n) for n in names), left_s)

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all these actors are registered; LaunchError naming the missing ones."""
        if not await self._wait(names, timeout_s):
            missing = ", ".join(n for n in names if self.directory.find(n) is None)
            raise LaunchError(
                f"waited {timeout_s:g} s for {missing}", remedy="see their logs; were they started, did they fail?"
            )


def _settle(future: asyncio.Future[Envelope], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Envelope):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _decode_answer(envelope: Envelope, target: str, spec: HandlerSpec) -> Any:
    try:
        return codecs_of(spec).reply.decode(envelope.body, envelope.frames)
    except UndecodableError as error:
        why = f"{target}.{spec.name} answered with something else than it declares: {error}"
        raise with_callee(RemoteError(why), target) from None
