"""References: how an actor calls another one (`Ref`), or several at once (`together`).

A reference is typed as the contract of the actor that it names. `together` gives the answer of every call, or one error
that names all that failed; `all_or_first_error` is for other work than calls.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar, cast

import msgspec

from .errors import BadRequest, CallError, GatherError
from .handlers import HandlerSpec, handlers_of

A = TypeVar("A")
T = TypeVar("T")


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
    return cast("A", ref_class(contract)(caller, contract, target))


def with_deadline(ref: A, seconds: float) -> A:
    """The same reference with another deadline than the declared ones. An inherited deadline still cuts it."""
    if not isinstance(ref, Ref):
        raise TypeError(f"with_deadline wants a reference, not {type(ref).__name__}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"a deadline is a number of seconds above 0, and not {seconds}: every wait has an end")
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


_UNHEARD: set[asyncio.Task[Any]] = set()
"""Calls whose answers are not waited for any more."""


@asynccontextmanager
async def unwrapped_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """Its first error is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def all_or_first_error(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the others and is raised as it is."""
    async with unwrapped_group() as group:
        tasks = [group.create_task(job) for job in jobs]
    return [task.result() for task in tasks]


async def together(calls: Mapping[str, Coroutine[Any, Any, T]], *, fails_fast: bool = False) -> dict[str, T]:
    """By name. Raises GatherError if one fails, once all have ended, or (`fails_fast`) at the first error."""
    loop = asyncio.get_running_loop()
    tasks = {name: loop.create_task(coroutine, name=f"call of {name}") for name, coroutine in calls.items()}
    try:
        if tasks:
            when = asyncio.FIRST_EXCEPTION if fails_fast else asyncio.ALL_COMPLETED
            await asyncio.wait(tasks.values(), return_when=when)
    finally:
        pending = {name: task for name, task in tasks.items() if not task.done()}
        _UNHEARD.update(pending.values())
        for task in pending.values():
            task.add_done_callback(_forget)
            if not fails_fast:  # the waiter was cancelled
                task.cancel()
        if pending and not fails_fast:
            await asyncio.wait(pending.values())
    answers = {name: _outcome(task) for name, task in tasks.items() if name not in pending}
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if errors:
        causes = "; ".join(f"{name}: {error}" for name, error in errors.items())
        message = f"{len(errors)} of {len(tasks)} members failed, all were needed: {causes}"
        raise GatherError(message, errors=errors, unheard=tuple(pending)) from next(iter(errors.values()))
    return cast("dict[str, T]", answers)


def _forget(task: asyncio.Task[Any]) -> None:
    _UNHEARD.discard(task)
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
