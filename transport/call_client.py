"""Outgoing calls: finds the callee, hands the bytes to the session, and waits for the end.

Implements `core.actor_group.GroupCaller`. Every wait here ends by the call's deadline, by the callee's end, or by
cancellation.

A request to several actors (`Calling`, a `core.actor_group.Spread`) is encoded once and has one deadline and no task.
Each member is a separate call to the session, with its own number, credit, outcome and cancellation. The caller is
woken when enough answers have come, not by each.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ..core.clock import Clock
from ..core.errors import (
    BadRequest,
    CallError,
    MyxaError,
    NoSuchActor,
    NotSent,
    RemoteError,
)
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

    def route(self, target: str, spec: HandlerSpec) -> Route | CallError | None:
        """What is known now."""
        ...

    async def find(self, target: str, spec: HandlerSpec, timeout_s: float | None) -> Route | CallError:
        """Ask further, for a name that is not known."""
        ...

    def has_ended(self, target: str) -> bool:
        """It was there and is gone."""
        ...


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

    def spread(
        self, targets: Sequence[str], spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None
    ) -> Calling | None:
        """Not for puts, whose key is each callee's own, and not with arrays or while it is not known where all are."""
        if spec.declaration.kind not in ("call", "cast"):
            return None
        found = [self._finder.route(target, spec) for target in targets]
        routes = [route for route in found if isinstance(route, Route)]
        if len(routes) < len(found):
            return None
        try:
            order = self._order(targets[0], spec, request, deadline_s)
        except CallError:
            return None
        if order.frames:
            return None
        calling = Calling(self._calls, targets, lambda envelope, target: _decoded(envelope, target, spec))
        calling.send(order, routes)
        return calling

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
    """Sink of a call, put or cast."""

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


Decode = Callable[[Envelope, str], Any]
"""Value of an answer of the actor of that name; raises MyxaError."""


class Calling:
    """Calls of one request under way."""

    def __init__(self, calls: Calls, targets: Sequence[str], decode: Decode) -> None:
        self._calls = calls
        self._targets = targets
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._corrs: list[int] = []
        self._num_left = len(targets)
        self._came: list[tuple[int, Envelope | Exception | None]] = []
        self._has_error = False
        self._num_wanted = 1
        self._waiter: asyncio.Future[None] | None = None

    def send(self, order: CallOrder, routes: Sequence[Route]) -> None:
        """`order` is that of the first of them."""
        submit, corrs = self._calls.submit, self._corrs
        for place, (target, route) in enumerate(zip(self._targets, routes, strict=True)):
            mine = order if place == 0 else _redirected(order, target)
            try:
                corrs.append(submit(mine, route, _Member(self, place)))
            except MyxaError as error:
                if isinstance(error, CallError):
                    error.callee = target
                corrs.append(0)
                self.ended(place, error)

    def cancel(self) -> None:
        if self._num_left == 0:
            return
        for corr in self._corrs:
            self._calls.cancel(corr)  # those that have ended are not known any more

    async def take(self, num_wanted: int) -> list[tuple[int, Any]]:
        while self._num_left and len(self._came) < num_wanted and not self._has_error:
            self._num_wanted = num_wanted
            waiter = self._waiter = self._loop.create_future()
            await waiter
        came, self._came, self._has_error = self._came, [], False
        return [(place, self._value(place, outcome)) for place, outcome in came]

    def _value(self, place: int, outcome: Envelope | Exception | None) -> Any:
        if type(outcome) is not Envelope:
            return outcome
        try:
            return self._decode(outcome, self._targets[place])
        except MyxaError as error:
            return error

    def ended(self, place: int, outcome: Envelope | Exception | None) -> None:
        """The call to the callee at that place has an outcome."""
        if outcome is not None and type(outcome) is not Envelope:
            self._has_error = True
        self._came.append((place, outcome))
        self._num_left = num_left = self._num_left - 1
        waiter = self._waiter
        is_enough = not num_left or self._has_error or len(self._came) >= self._num_wanted
        if waiter is not None and is_enough and not waiter.done():
            waiter.set_result(None)


class _Member(msgspec.Struct, eq=False):
    """Sink of one of the calls."""

    calling: Calling
    place: int

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        self.calling.ended(self.place, outcome)


def _redirected(order: CallOrder, target: str) -> CallOrder:
    """The same for another callee. Written out: `structs.replace` takes three times as long."""
    return CallOrder(
        target=target, method=order.method, schema=order.schema, kind=order.kind, body=order.body,
        deadline_at=order.deadline_at, is_resendable=order.is_resendable, chain=order.chain, trace=order.trace,
    )  # fmt: skip
