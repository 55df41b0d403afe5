"""Outgoing calls: finds the callee, hands the bytes to the session, and waits for the end.

Implements `core.refs.RequestSender`. Every wait here ends by the call's deadline, by the callee's end, or by
cancellation.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ..core.clock import Clock
from ..core.errors import BadRequest, CallError, MyxaError, NoSuchActor, NotSent, RemoteError
from ..core.handlers import NO_SCOPE, HandlerSpec, current_scope, remaining_s
from .codec import Buffer, UndecodableError, codecs_of
from .session.calls import Calls
from .session.frames import Envelope
from .session.pending import CallOrder, Route


class Finder(Protocol):
    """Where the call client asks for addresses."""

    @property
    def routes(self) -> Mapping[tuple[str, str, str], Route]:
        """Of callee, handler and schema, as far as `route` would say the same; the same object always."""
        ...

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None: ...

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError: ...

    def has_ended(self, target: str) -> bool: ...


class CallClient:
    """Carries the calls of all references of one process."""

    def __init__(self, calls: Calls, finder: Finder, clock: Clock) -> None:
        self._calls = calls
        self._finder = finder
        self._clock = clock
        self._now = clock.monotonic
        self._routes = finder.routes
        self._new_future = asyncio.get_running_loop().create_future

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        order = self._order(target, spec, request, deadline_s)
        route = self._routes.get((target, spec.name, spec.schema))
        if route is None:
            route = await self._route(order, spec)
        future = self._new_future()
        waiter = _Waiter(future)
        corr = self._submit(order, route, waiter)
        try:
            envelope = await future
        except asyncio.CancelledError:
            self._calls.cancel(corr)
            waiter.forget()
            raise
        return None if envelope is None else _decoded(envelope, target, spec)

    def _order(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> CallOrder:
        declaration, now, scope = spec.declaration, self._now(), current_scope()
        kind = declaration.kind
        waits, left_s = kind != "cast", deadline_s
        if scope is not NO_SCOPE and waits and scope.deadline_at is not None:
            left_s = remaining_s(deadline_s, now)
        if left_s is not None and left_s <= 0:
            raise _named(NotSent(f"{target}.{spec.name}: no time is left of the call that makes it"), target)
        body, frames = codecs_of(spec).request.encode(request)
        if declaration.is_idempotent:  # it may be sent again much later: the caller's arrays may have changed by then
            frames = tuple(bytes(frame) for frame in frames)
        return CallOrder(
            target=target, method=spec.name, schema=spec.schema, kind=kind, body=body, frames=frames,
            deadline_at=None if left_s is None else now + left_s, is_resendable=declaration.is_idempotent,
            key=_key(target, spec, request, body, frames) if kind == "put" else b"",
            chain=scope.chain if waits else NO_SCOPE.chain, trace=scope.trace,
        )  # fmt: skip

    async def _route(self, order: CallOrder, spec: HandlerSpec) -> Route | None:
        """Where to send it; None: nowhere now, but it may wait for its callee to come back."""
        route = self._finder.route(order.target, spec)
        if route is None:
            left_s = None if order.deadline_at is None else order.deadline_at - self._clock.monotonic()
            route = await self._finder.find(order.target, spec, left_s)
        if isinstance(route, NoSuchActor) and order.is_resendable and self._finder.has_ended(order.target):
            return None
        if isinstance(route, CallError):
            raise _named(route, order.target)
        return route

    def _submit(self, order: CallOrder, route: Route | None, sink: _Waiter) -> int:
        if route is None:
            return self._calls.submit_later(order, sink)
        try:
            return self._calls.submit(order, route, sink)
        except CallError as error:
            raise _named(error, order.target) from None


class _Waiter(msgspec.Struct, eq=False):
    future: asyncio.Future[Envelope | None]

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        future = self.future
        if future.done():
            return
        if type(outcome) is Envelope or not isinstance(outcome, MyxaError):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def forget(self) -> None:
        """The caller was cancelled; an error that came in the same turn of the loop is of no use to anybody."""
        if self.future.done() and not self.future.cancelled():
            self.future.exception()


def _decoded(envelope: Envelope, target: str, spec: HandlerSpec) -> Any:
    try:
        return codecs_of(spec).reply.decode(envelope.body, envelope.frames)
    except UndecodableError as error:
        why = f"{target}.{spec.name} answered with something else than it declares: {error}"
        raise _named(RemoteError(why), target) from None


def _key(target: str, spec: HandlerSpec, request: msgspec.Struct, body: bytes, frames: tuple[Buffer, ...]) -> bytes:
    """Same put: same actor and handler, same key, same content. A later attempt with other content is another put."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        value = spec.key_of(request)
    except AttributeError as error:
        raise BadRequest(f"{spec.name}: no key {spec.declaration.key!r} in the request: {error}") from error
    digest.update(f"{target}\n{spec.name}\n{value}\n".encode())
    for part in (body, *frames):
        digest.update(part)
    return digest.digest()


def _named(error: CallError, target: str) -> CallError:
    error.callee = target
    return error
