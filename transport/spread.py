"""One request to several actors at once: encoded once, one deadline for all, and no task for any of them.

Each is a call of its own to the session, with its own number, credit, outcome and cancellation; what is shared is what
does not depend on the callee. Whoever waits is woken when enough answers are there, not by each. Implements
`core.actor_group.Spread`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from ..core.errors import CallError, MyxaError
from .session.calls import Calls
from .session.frames import Envelope
from .session.pending import Order, Route

Decode = Callable[[Envelope, str], Any]
"""Value of an answer of the actor of that name; raises MyxaError."""
Fetch = Callable[[Envelope, str], Coroutine[Any, Any, Any] | None]
"""The same for an answer with arrays that must be fetched first; None: it has none."""


class Calling:
    """Calls of one request under way."""

    def __init__(self, calls: Calls, targets: Sequence[str], decode: Decode, fetch: Fetch) -> None:
        self._calls = calls
        self._targets = targets
        self._decode = decode
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()
        self._corrs: list[int] = []
        self._num_left = len(targets)
        self._came: list[tuple[int, Envelope | Exception | None]] = []
        self._fetched: dict[int, Any] = {}
        """Values of answers whose arrays had to be fetched, by place."""
        self._fetching: set[asyncio.Task[Any]] = set()
        self._has_error = False
        self._num_wanted = 1
        self._waiter: asyncio.Future[None] | None = None

    def send(self, order: Order, routes: Sequence[Route]) -> None:
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
        for task in self._fetching:
            task.cancel()

    async def take(self, num_wanted: int) -> list[tuple[int, Any]]:
        while self._num_left and len(self._came) < num_wanted and not self._has_error:
            self._num_wanted = num_wanted
            waiter = self._waiter = self._loop.create_future()
            await waiter
        came, self._came, self._has_error = self._came, [], False
        return [(place, self._value(place, outcome)) for place, outcome in came]

    def _value(self, place: int, outcome: Envelope | Exception | None) -> Any:
        if type(outcome) is not Envelope:
            return self._fetched.pop(place, None) if outcome is None else outcome
        try:
            return self._decode(outcome, self._targets[place])
        except MyxaError as error:
            return error

    def ended(self, place: int, outcome: Envelope | Exception | None) -> None:
        """The call to the callee at that place has an outcome."""
        if type(outcome) is Envelope:
            if outcome.frames and (work := self._fetch(outcome, self._targets[place])) is not None:
                task = self._loop.create_task(self._fetch_for(place, work))
                self._fetching.add(task)
                task.add_done_callback(self._fetching.discard)
                return
        elif outcome is not None:
            self._has_error = True
        self._came.append((place, outcome))
        self._num_left = num_left = self._num_left - 1
        waiter = self._waiter
        is_enough = not num_left or self._has_error or len(self._came) >= self._num_wanted
        if waiter is not None and is_enough and not waiter.done():
            waiter.set_result(None)

    async def _fetch_for(self, place: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._fetched[place] = await work
        except Exception as error:  # noqa: BLE001  # as the error of a call of its own would come
            self.ended(place, error)
        else:
            self.ended(place, None)


class _Member(msgspec.Struct, eq=False):
    """Sink of one of the calls."""

    calling: Calling
    place: int

    def done(self, outcome: Envelope | MyxaError | None) -> None:
        self.calling.ended(self.place, outcome)

    def item(self, envelope: Envelope) -> None:
        raise AssertionError(f"{envelope.kind} for a call that is no stream")


def _redirected(order: Order, target: str) -> Order:
    """The same for another callee. Written out: `structs.replace` takes three times as long."""
    return Order(
        target=target, method=order.method, schema=order.schema, kind=order.kind, body=order.body,
        deadline_at=order.deadline_at, is_resendable=order.is_resendable, chain=order.chain, trace=order.trace,
        is_plain=order.is_plain,
    )  # fmt: skip
