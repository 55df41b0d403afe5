"""The rim of outgoing calls: finds the callee, hands the bytes to the session, and waits for the end.

Implements `core.actor.Caller`. Every wait here ends by the call's deadline, by the callee's end, or by cancellation.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from ..core.clock import Clock
from ..core.errors import BadRequest, CallError, MyxaError, NoSuchActor, NotSent, RemoteError, StreamBroken
from ..core.handlers import HandlerSpec
from ..core.scope import NO_SCOPE, current_scope, remaining_s
from .calls import Calls
from .frames import Envelope
from .payload import Buffer, UndecodableError, decode_value, encode_value
from .pending import Order, Route


class Finder(Protocol):
    """Where the courier asks for addresses."""

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        """What is known now."""
        ...

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        """Ask further, for a name that is not known."""
        ...

    def has_ended(self, target: str) -> bool:
        """It was there and is gone."""
        ...


class Courier:
    """Carries the calls of all references of one process."""

    def __init__(self, calls: Calls, finder: Finder, clock: Clock) -> None:
        self._calls = calls
        self._finder = finder
        self._clock = clock

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        order = self._order(target, spec, request, deadline_s)
        waiter = _Waiter()
        corr = self._submit(order, await self._route(order, spec), waiter)
        try:
            envelope = await waiter.future
        except asyncio.CancelledError:
            self._calls.cancel(corr)
            waiter.forget()
            raise
        if envelope is None:
            return None
        return _decoded(envelope, target, spec)

    async def items(
        self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None
    ) -> AsyncIterator[Any]:
        order = self._order(target, spec, request, deadline_s)
        reader = _Reader()
        corr = self._submit(order, await self._route(order, spec), reader)
        window = spec.declaration.window
        num_taken, promised = 0, window
        try:
            while (envelope := await reader.next()) is not None:
                yield _decoded(envelope, target, spec)
                num_taken += 1
                if promised - num_taken <= window // 2:
                    promised = num_taken + window
                    self._calls.demand(corr, promised)
        finally:
            self._calls.cancel(corr)

    def _order(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Order:
        declaration = spec.declaration
        now = self._clock.monotonic()
        scope = current_scope()
        waits = declaration.kind != "cast"
        left_s = remaining_s(deadline_s, now) if waits else deadline_s
        if left_s is not None and left_s <= 0:
            raise _named(NotSent(f"{target}.{spec.name}: no time is left of the call that makes it"), target)
        body, views = encode_value(request)
        # A durable put may be sent again much later: the caller's arrays may have changed by then.
        frames: tuple[Buffer, ...] = tuple(bytes(v) for v in views) if declaration.is_idempotent else tuple(views)
        return Order(
            target=target, method=spec.name, schema=spec.schema, kind=declaration.kind, body=body, frames=frames,
            deadline_at=None if left_s is None else now + left_s, is_resendable=declaration.is_idempotent,
            key=_key(target, spec, request, body, frames) if declaration.kind == "put" else b"",
            chain=scope.chain if waits else NO_SCOPE.chain, trace=scope.trace, window=declaration.window,
        )  # fmt: skip

    async def _route(self, order: Order, spec: HandlerSpec) -> Route | None:
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

    def _submit(self, order: Order, route: Route | None, sink: _Waiter | _Reader) -> int:
        if route is None:
            return self._calls.submit_later(order, sink)
        try:
            return self._calls.submit(order, route, sink)
        except CallError as error:
            raise _named(error, order.target) from None


class _Waiter:
    """Sink of a call, put or cast."""

    def __init__(self) -> None:
        self.future: asyncio.Future[Envelope | None] = asyncio.get_running_loop().create_future()

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        if self.future.done():
            return
        if isinstance(outcome, MyxaError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)

    def item(self, envelope: Envelope) -> None:
        raise AssertionError(f"{envelope.kind} for a call that is no stream")

    def forget(self) -> None:
        """The caller was cancelled; an error that came in the same turn of the loop is of no use to anybody."""
        if self.future.done() and not self.future.cancelled():
            self.future.exception()


class _Reader:
    """Sink of a stream."""

    def __init__(self) -> None:
        self._items: deque[Envelope] = deque()
        self._outcome: Envelope | MyxaError | None = None
        self._changed = asyncio.Event()

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        self._outcome = outcome
        self._changed.set()

    def item(self, envelope: Envelope) -> None:
        self._items.append(envelope)
        self._changed.set()

    async def next(self) -> Envelope | None:
        """Next item; None at the end. Raises what broke the stream, after the items that came before."""
        while not self._items:
            if isinstance(self._outcome, MyxaError):
                raise self._outcome
            if self._outcome is not None:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._items.popleft()


def _decoded(envelope: Envelope, target: str, spec: HandlerSpec) -> Any:
    try:
        return decode_value(envelope.body, [memoryview(f) for f in envelope.frames], spec.reply)
    except UndecodableError as error:
        kind = StreamBroken if spec.declaration.kind == "stream" else RemoteError
        text = f"{target}.{spec.name} answered with something else than it declares: {error}"
        raise _named(kind(text), target) from None


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
