"""Outgoing calls: finds the callee, hands the bytes to the session, and waits for the end.

Implements `core.refs.RequestSender`. Every wait here ends by the call's deadline, by the callee's end, or by
cancellation.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

import msgspec

from ..core.clock import Clock
from ..core.errors import CallError, NotSent, RemoteError
from ..core.handlers import HandlerSpec, remaining_s
from .codec import UndecodableError, codecs_of
from .session.calls import Calls
from .session.frames import Envelope
from .session.pending import Outcome, PendingCall, Route


class Finder(Protocol):
    """Where the call client asks for addresses."""

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None: ...

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError: ...


class CallClient:
    """Carries the calls of all references of one process."""

    def __init__(self, calls: Calls, finder: Finder, clock: Clock) -> None:
        self._calls = calls
        self._finder = finder
        self._now = clock.monotonic
        self._new_future = asyncio.get_running_loop().create_future

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        future: asyncio.Future[Envelope] = self._new_future()
        now = self._now()
        left_s = remaining_s(deadline_s, now)
        if left_s is not None and left_s <= 0:
            raise _named(NotSent(f"{target}.{spec.name}: no time is left of the call that makes it"), target)
        body, frames = codecs_of(spec).request.encode(request)
        call = PendingCall(
            target=target, method=spec.name, body=body, frames=frames, tell=partial(_settle, future),
            deadline_at=None if left_s is None else now + left_s,
        )  # fmt: skip
        route = self._finder.route(target, spec)
        if route is None:
            left_s = None if call.deadline_at is None else call.deadline_at - self._now()
            route = await self._finder.find(target, spec, left_s)
        if isinstance(route, CallError):
            raise _named(route, target)
        try:
            corr = self._calls.submit(call, route)
        except CallError as error:
            raise _named(error, target) from None
        try:
            envelope = await future
        except asyncio.CancelledError:
            self._calls.cancel(corr)
            if future.done() and not future.cancelled():
                future.exception()  # it came in the same turn of the loop, and is of no use to anybody
            raise
        return _decoded(envelope, target, spec)


def _settle(future: asyncio.Future[Envelope], outcome: Outcome) -> None:
    if future.done():
        return
    if isinstance(outcome, Envelope):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


def _decoded(envelope: Envelope, target: str, spec: HandlerSpec) -> Any:
    try:
        return codecs_of(spec).reply.decode(envelope.body, envelope.frames)
    except UndecodableError as error:
        why = f"{target}.{spec.name} answered with something else than it declares: {error}"
        raise _named(RemoteError(why), target) from None


def _named(error: CallError, target: str) -> CallError:
    error.callee = target
    return error
