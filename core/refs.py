"""References: how an actor calls another one (`Ref`), or several at once (`ActorGroup`).

A reference is typed as the contract of the actor that it names. A call of a group gives the answer of every member, or
one error that names all members that failed. The members are fixed when the call begins, each is called by a task of
its own. `asyncio.gather` was considered: it loses the names, and after the first error it neither waits for the others
nor cancels them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import msgspec

from .errors import BadRequest, CallError, GatherError, NoSuchActor
from .handlers import HandlerSpec, handlers_of

A = TypeVar("A")
C = TypeVar("C")
T = TypeVar("T")
P = ParamSpec("P")


class RequestSender(Protocol):
    """What carries a proxy's calls."""

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        """Call; returns the reply."""
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

    def request(ref: Ref, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = make_request(*args, **kwargs)
        except TypeError as error:
            raise BadRequest(f"{ref.ref_target}.{spec.name}: {error}", remedy="see the handler's signature") from error
        deadline_s = declared_s if ref.ref_deadline_s is None else ref.ref_deadline_s
        return ref.ref_caller.request(ref.ref_target, spec, bound, deadline_s)

    request.__name__ = spec.name  # what tracebacks show
    return request


class ActorGroup(Generic[C]):
    """Several actors of one contract. Made by `ctx.group` and `node.group`; takes methods of the contract's class:
    `await group.all(TrainerContract.publish, version)`."""

    def __init__(
        self,
        caller: RequestSender,
        contract: type[C],
        members: str | Sequence[str],
        peers: Callable[[str], tuple[str, ...]],
        deadline_s: float | None = None,
        fails_fast: bool = False,
    ) -> None:
        self._caller = caller
        self._contract = contract
        self._members = members if isinstance(members, str) else tuple(members)
        self._peers = peers
        self._deadline_s = deadline_s
        self._fails_fast = fails_fast
        self._unheard: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<group of {self._contract.__name__} {self._members!r}>"

    def options(self, *, deadline_s: float | None = None, fails_fast: bool = False) -> ActorGroup[C]:
        """The same members, with one deadline for all instead of the declared one. `fails_fast`: a call ends with the
        first error; the others run to their ends unheard."""
        return ActorGroup(self._caller, self._contract, self._members, self._peers, deadline_s, fails_fast)

    @property
    def names(self) -> tuple[str, ...]:
        """The members if a call began now: the names given, or those registered under the prefix, numbers in order.
        Raises NoSuchActor if there are none."""
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

    async def all(
        self, method: Callable[Concatenate[C, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, T]:
        """Every member's answer, in the order of the names. Raises GatherError if one fails, once all have ended
        (`fails_fast`: at once)."""
        name = getattr(method, "__name__", "")
        if name not in handlers_of(self._contract).by_name:
            raise BadRequest(
                f"a group of {self._contract.__name__} cannot call {name or method!r}: it is none of its handlers",
                remedy=f"write e.g. group.all({self._contract.__name__}.<handler>, ...)",
            )
        return await self.scatter(lambda member, _: getattr(member, name)(*args, **kwargs))

    async def scatter(self, send: Callable[[C, int], Awaitable[T]]) -> dict[str, T]:
        """As `all`; `send(member, place)` makes the call: `lambda rank, i: rank.train_shard(shards[i], knobs)`."""
        names, loop = self.names, asyncio.get_running_loop()
        tasks = {
            name: loop.create_task(self._one(send, name, place), name=f"{self!r}: {name}")
            for place, name in enumerate(names)
        }
        try:
            when = asyncio.FIRST_EXCEPTION if self._fails_fast else asyncio.ALL_COMPLETED
            await asyncio.wait(tasks.values(), return_when=when)
        finally:
            unheard = tuple(name for name, task in tasks.items() if not task.done())
            rest = [tasks[name] for name in unheard]
            for task in rest:
                self._unheard.add(task)
                task.add_done_callback(self._forget)
                if not self._fails_fast:  # the waiter was cancelled
                    task.cancel()
            if rest and not self._fails_fast:
                await asyncio.wait(rest)
        answers = {name: _outcome(task) for name, task in tasks.items() if name not in unheard}
        errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
        if errors:
            raise _failed(len(names), errors, unheard)
        return cast("dict[str, T]", answers)

    async def _one(self, send: Callable[[C, int], Awaitable[T]], name: str, place: int) -> T:
        member = make_ref(self._caller, self._contract, name)
        return await send(member if self._deadline_s is None else with_deadline(member, self._deadline_s), place)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._unheard.discard(task)
        _ = task.cancelled() or task.exception()  # seen, so that asyncio does not report it as lost


def _outcome(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():
        return CallError(f"{task.get_name()} was cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


def _failed(num_members: int, errors: dict[str, Exception], unheard: tuple[str, ...]) -> GatherError:
    """One error for all."""
    causes = "; ".join(f"{name}: {error}" for name, error in errors.items())
    message = f"{len(errors)} of {num_members} members failed, all were needed: {causes}"
    failure = GatherError(message, errors=errors, unheard=unheard)
    failure.__cause__ = next(iter(errors.values()))
    return failure


def _rank(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts "trainer/10" after "trainer/2"."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("/"))
