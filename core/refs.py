"""References: how an actor calls another one (`Ref`), or several at once (`ActorGroup`).

A reference is typed as the contract of the actor that it names. A call of a group ends in one of these ways:

    all        the answer of every member; one error names all members that failed
    first      the first good answer
    quorum     as soon as k good answers have come
    each       answers and errors as they come
    scatter    as `all`, with different arguments for each member

The members are fixed when the call begins. Each is called at the same instant with the same deadline. A small request
that is the same for all is given to the transport once (`Spread`); any other takes one task per member.
`asyncio.gather` was considered: it loses the names, and after the first error it neither waits for the others nor
cancels them.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import msgspec

from .errors import BadRequest, CallError, GatherError, NoSuchActor, NotSent
from .handlers import HandlerSpec, handlers_of

A = TypeVar("A")
C = TypeVar("C")
T = TypeVar("T")
P = ParamSpec("P")


class RequestSender(Protocol):
    """What carries a proxy's calls."""

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        """Call, put or cast; returns the reply (None for a cast, once it is on its way)."""
        ...


class Ref:
    """Proxy of an actor elsewhere. Typed as its contract; made by `ctx.ref` and `node.ref`."""

    __slots__ = ("ref_caller", "ref_contract", "ref_deadline_s", "ref_target")

    def __init__(self, caller: RequestSender, contract: type, target: str, deadline_s: float | None = None) -> None:
        self.ref_caller = caller
        self.ref_contract = contract
        self.ref_target = target
        self.ref_deadline_s = deadline_s

    def __repr__(self) -> str:
        return f"<ref {self.ref_contract.__name__} {self.ref_target!r}>"


def make_ref(caller: RequestSender, contract: type[A], target: str) -> A:
    """A proxy for `target`, typed as `contract`."""
    return cast("A", ref_class(contract)(caller, contract, target))


def with_deadline(ref: A, seconds: float) -> A:
    """The same reference with another deadline than the declared ones. An inherited deadline still cuts it."""
    if not isinstance(ref, Ref):
        raise TypeError(f"with_deadline wants a reference, not {type(ref).__name__}")
    if seconds <= 0:
        raise ValueError(f"a deadline of {seconds} s is over before the call begins")
    return cast("A", type(ref)(ref.ref_caller, ref.ref_contract, ref.ref_target, seconds))


@functools.cache
def ref_class(contract: type) -> type[Ref]:
    """What references to such actors are, compiled once. Raises TypeError naming a handler that cannot travel."""
    methods = {spec.name: _method(spec) for spec in handlers_of(contract).specs}
    return type(f"Ref[{contract.__name__}]", (Ref,), {"__slots__": (), **methods})


def _method(spec: HandlerSpec) -> Callable[..., Any]:
    declared_s, make_request = spec.declaration.deadline_s, spec.request

    def bind(ref: Ref, args: tuple[Any, ...], kwargs: dict[str, Any]) -> msgspec.Struct:
        try:
            return spec.request(*args, **kwargs)
        except TypeError as error:
            raise BadRequest(f"{ref.ref_target}.{spec.name}: {error}", remedy="see the handler's signature") from error

    def request(ref: Ref, *args: Any, **kwargs: Any) -> Any:
        deadline_s = declared_s if ref.ref_deadline_s is None else ref.ref_deadline_s
        try:
            bound = make_request(*args, **kwargs)
        except TypeError:
            bound = bind(ref, args, kwargs)
        return ref.ref_caller.request(ref.ref_target, spec, bound, deadline_s)

    request.__name__ = spec.name  # what tracebacks show, and how `NodeThread.call` knows the handler
    return request


Send = Callable[[Any, int], Awaitable[T]]
"""Calls one member: its reference, its place among the members."""


class Spread(Protocol):
    """One request to several actors, under way."""

    async def take(self, num_wanted: int) -> list[tuple[int, Any]]:
        """What came since the last time, each answer or error with the place of its callee: once there are
        `num_wanted` of them, or an error is among them, or no more will come. Empty: all were taken."""
        ...

    def cancel(self) -> None:
        """The others are not needed any more: those calls, and their handlers, are cancelled."""
        ...


class GroupRequestSender(RequestSender, Protocol):
    """What carries a group's calls."""

    def spread(
        self, targets: Sequence[str], spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None
    ) -> Spread | None:
        """Send one request to several actors at once. None: this one cannot be sent so, or not to all of them; then
        nothing was sent, and `request` to each of them does it, or says why not."""
        ...


@dataclass(frozen=True, slots=True)
class GatherOptions:
    """How a fan-out ends."""

    deadline_s: float | None = None
    """For all of it, instead of the handler's declared one; None: the declared one."""
    fails_fast: bool = False
    """`all` and `scatter` end with the first error instead of waiting for every member."""
    cancels_rest: bool = True
    """Calls that are not needed any more are cancelled, their handlers too; else they run to their ends unheard."""


class ActorGroup(Generic[C]):
    """Several actors of one contract. Made by `ctx.group` and `node.group`; takes methods of the contract's class:
    `await group.all(TrainerContract.publish, version)`."""

    def __init__(
        self,
        caller: GroupRequestSender,
        contract: type[C],
        members: str | Sequence[str],
        peers: Callable[[str], tuple[str, ...]],
        options: GatherOptions | None = None,
    ) -> None:
        self._caller = caller
        self._contract = contract
        self._members = members if isinstance(members, str) else tuple(members)
        self._peers = peers
        self._options = options or GatherOptions()
        self._unheard: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<group of {self._contract.__name__} {self._members!r}>"

    def options(
        self, *, deadline_s: float | None = None, fails_fast: bool = False, cancels_rest: bool = True
    ) -> ActorGroup[C]:
        """The same members, waited for in another way; see `GatherOptions`."""
        chosen = replace(self._options, deadline_s=deadline_s, fails_fast=fails_fast, cancels_rest=cancels_rest)
        return ActorGroup(self._caller, self._contract, self._members, self._peers, chosen)

    @property
    def names(self) -> tuple[str, ...]:
        """The members if a call began now: the names given, or those registered under the prefix, numbers in order.

        Raises NoSuchActor if there are none.
        """
        if not isinstance(self._members, str):
            names = self._members
        else:
            prefix = self._members.rstrip("/")
            found = (name for name in self._peers(prefix) if name == prefix or name.startswith(f"{prefix}/"))
            names = tuple(sorted(found, key=_rank))
        if not names:
            raise NoSuchActor(
                f"no actor is named {self._members}/..." if self._members else "a group of no names has no members",
                remedy="wait_for() the members before calling them",
            )
        return names

    # -- ways to wait

    async def all(
        self, method: Callable[Concatenate[C, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Every member's answer, in the order of the names. Raises GatherError if one fails, once all have ended
        (`fails_fast`: at once)."""
        return await self._all(self._same(method, args, kwargs))

    async def scatter(self, send: Callable[[C, int], Awaitable[T]]) -> dict[str, T]:
        """As `all`; `send(member, place)` makes the call: `lambda rank, i: rank.train_shard(shards[i], knobs)`."""
        return await self._all(send)

    async def first(
        self, method: Callable[Concatenate[C, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[str, T]:
        """Name and answer of the first member that has a good one. Raises GatherError if all fail."""
        answers = await self._some(1, self._same(method, args, kwargs))
        return next(iter(answers.items()))

    async def quorum(
        self, num_needed: int, method: Callable[Concatenate[C, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """`num_needed` good answers, in the order in which they came. Raises GatherError once so many cannot be had
        any more, NotSent if there are fewer members than that."""
        return await self._some(num_needed, self._same(method, args, kwargs))

    async def each(
        self, method: Callable[Concatenate[C, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[tuple[str, T | Exception], None]:
        """(name, answer or error) of every member as it comes. Leave early inside `contextlib.aclosing`."""
        async with aclosing(self._answers(self._same(method, args, kwargs), self.names)) as answers:
            async for came in answers:
                for answer in came:
                    yield answer

    # -- how

    def _same(
        self, method: Callable[Concatenate[C, P], Awaitable[T]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Send[T]:
        """Calls `method` of every member with the same arguments."""
        name = getattr(method, "__name__", "")
        spec = handlers_of(self._contract).by_name.get(name)
        if spec is None:
            raise BadRequest(
                f"a group of {self._contract.__name__} cannot call {name or method!r}: it is none of its handlers",
                remedy=f"write e.g. group.all({self._contract.__name__}.<handler>, ...)",
            )
        return _Same(spec, args, kwargs)

    async def _all(self, send: Send[T]) -> dict[str, T]:
        names = self.names
        good: dict[str, T] = {}
        errors: dict[str, Exception] = {}
        async with aclosing(self._answers(send, names, len(names))) as answers:
            async for came in answers:
                for name, answer in came:
                    if isinstance(answer, Exception):
                        errors[name] = answer
                    else:
                        good[name] = answer
                if errors and self._options.fails_fast:
                    break
        if errors:
            unheard = tuple(name for name in names if name not in good and name not in errors)
            raise _failed(names, errors, len(names), unheard)
        return {name: good[name] for name in names}

    async def _some(self, num_needed: int, send: Send[T]) -> dict[str, T]:
        names = self.names
        if not 0 < num_needed <= len(names):
            raise NotSent(
                f"{num_needed} answers cannot come from {len(names)} members ({', '.join(names)})",
                remedy="ask for fewer, or wait until more are there",
            )
        good: dict[str, T] = {}
        errors: dict[str, Exception] = {}
        async with aclosing(self._answers(send, names)) as answers:
            async for came in answers:
                for name, answer in came:
                    if isinstance(answer, Exception):
                        errors[name] = answer
                    elif len(good) < num_needed:
                        good[name] = answer
                if len(good) == num_needed:
                    break
                if len(names) - len(errors) < num_needed:
                    raise _failed(names, errors, num_needed)
        return good

    async def _answers(
        self, send: Send[T], names: tuple[str, ...], num_at_once: int = 1
    ) -> AsyncGenerator[list[tuple[str, T | Exception]], None]:
        """Answers and errors as they come, `num_at_once` of them together if none is an error; whatever is still
        running when this is closed is dropped."""
        spread = send.spread(self._caller, names, self._options.deadline_s) if isinstance(send, _Same) else None
        if spread is None:
            async with aclosing(self._answers_of_tasks(send, names)) as answers:
                async for answer in answers:
                    yield [answer]
            return
        try:
            while came := await spread.take(num_at_once):
                yield [(names[place], answer) for place, answer in came]
        finally:
            if self._options.cancels_rest:
                spread.cancel()

    async def _answers_of_tasks(
        self, send: Send[T], names: tuple[str, ...]
    ) -> AsyncGenerator[tuple[str, T | Exception], None]:
        """With one task a member."""
        loop = asyncio.get_running_loop()
        ended: deque[asyncio.Task[T]] = deque()
        news = asyncio.Event()

        def note(task: asyncio.Task[T]) -> None:
            ended.append(task)
            news.set()

        tasks: dict[asyncio.Task[T], str] = {}
        for place, name in enumerate(names):
            task = loop.create_task(self._one(send, name, place), name=f"{self!r}: {name}")
            task.add_done_callback(note)
            tasks[task] = name
        try:
            while tasks:
                while ended:
                    task = ended.popleft()
                    yield tasks.pop(task), _outcome(task)
                if tasks:
                    news.clear()
                    await news.wait()
        finally:
            await self._drop(tasks)

    async def _one(self, send: Send[T], name: str, place: int) -> T:
        member = make_ref(self._caller, self._contract, name)
        deadline_s = self._options.deadline_s
        return await send(member if deadline_s is None else with_deadline(member, deadline_s), place)

    async def _drop(self, tasks: dict[asyncio.Task[T], str]) -> None:
        """End the tasks that are not needed, or let them finish without a listener."""
        if not self._options.cancels_rest:
            self._unheard.update(tasks)
            for task in tasks:
                task.add_done_callback(self._forget)
            return
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            _ = task.cancelled() or task.exception()  # seen, so that asyncio does not report it as lost

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._unheard.discard(task)
        _ = task.cancelled() or task.exception()


@dataclass(frozen=True, slots=True)
class _Same:
    """Calls one handler of every member with the same arguments."""

    spec: HandlerSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, member: Any, place: int) -> Awaitable[Any]:
        del place
        return getattr(member, self.spec.name)(*self.args, **self.kwargs)

    def spread(self, caller: GroupRequestSender, names: tuple[str, ...], deadline_s: float | None) -> Spread | None:
        """Of all members in one."""
        try:
            request = self.spec.request(*self.args, **self.kwargs)
        except TypeError:
            return None  # each member's reference says what is wrong
        if deadline_s is None:
            deadline_s = self.spec.declaration.deadline_s
        return caller.spread(names, self.spec, request, deadline_s)


def _outcome(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():
        return CallError(f"{task.get_name()} was cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


def _failed(
    names: tuple[str, ...], errors: dict[str, Exception], num_needed: int, unheard: tuple[str, ...] = ()
) -> GatherError:
    """One error for all; members in order, so that the message is the same each time."""
    ordered = {name: errors[name] for name in names if name in errors}
    wanted = "all were needed" if num_needed == len(names) else f"{num_needed} good answers were needed"
    causes = "; ".join(f"{name}: {error}" for name, error in ordered.items())
    message = f"{len(ordered)} of {len(names)} members failed, {wanted}: {causes}"
    failure = GatherError(message, errors=ordered, unheard=unheard)
    failure.__cause__ = next(iter(ordered.values()))
    return failure


def _rank(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "trainer/10" after "trainer/2"."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("/"))
