"""What an actor answers to: handlers declared by `@call`, compiled once from their annotations.

A call is a request and its reply, at most once, with a deadline. A method that overrides a declared one inherits the
declaration. `CallScope` is what a handler inherits from its caller: the time left. It travels in a context variable;
tasks that outlive the handler (`ctx.spawn`) start with an empty one.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from .ids import PeerKey

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__myxa_handler__"


@dataclass(frozen=True, slots=True)
class Declaration:
    """How a handler may be called."""

    deadline_s: float | None = 30.0
    """Default; None must be written out and means: for ever."""
    is_reentrant: bool = False
    """Runs beside the actor's other handlers instead of waiting for its turn."""
    is_cancellable: bool = True
    """The handler is cancelled when its caller waits no more; else only its reply is lost."""


def _mark(fn: F, declaration: Declaration) -> F:
    if not callable(fn):
        raise TypeError(f"a handler decorator needs parentheses or a method, not {fn!r}")
    setattr(fn, _MARK, declaration)
    return fn


def call(*, deadline: float | None = 30.0, reentrant: bool = False, cancellable: bool = True) -> Callable[[F], F]:
    """Request and reply. `deadline` in seconds is the default and may be shortened or stretched per call."""
    declaration = Declaration(deadline, reentrant, cancellable)
    return lambda fn: _mark(fn, declaration)


@dataclass(frozen=True, slots=True, eq=False)
class HandlerSpec:
    """One compiled handler. There is one object per class and handler, so identity is equality."""

    name: str
    index: int
    """Position in the actor's table; travels instead of the name."""
    declaration: Declaration
    request: type[msgspec.Struct]
    reply: Any


class HandlerTable:
    """All handlers of an actor class, by name and by index."""

    def __init__(self, specs: tuple[HandlerSpec, ...]) -> None:
        self.specs = specs
        self.by_name = {spec.name: spec for spec in specs}
        self.names = tuple(self.by_name)
        """In the order of the indexes."""


@functools.cache
def handlers_of(cls: type) -> HandlerTable:
    """Compile a class's handlers. Raises TypeError naming class and handler for what cannot travel."""
    declared: dict[str, Callable[..., Any]] = {}
    for ancestor in reversed(cls.__mro__):
        declared.update({name: value for name, value in vars(ancestor).items() if hasattr(value, _MARK)})
    return HandlerTable(tuple(_compile(cls, i, declared[name]) for i, name in enumerate(sorted(declared))))


def _compile(cls: type, index: int, declarer: Callable[..., Any]) -> HandlerSpec:
    name = declarer.__name__
    place = f"{cls.__qualname__}.{name}"
    declaration: Declaration = getattr(declarer, _MARK)
    implementation = getattr(cls, name)
    parameters = _parameters(place, declarer)
    if [p.name for p in _parameters(place, implementation)] != [p.name for p in parameters]:
        raise TypeError(f"{place}: parameters differ from the declaration in {declarer.__qualname__}")
    hints = typing.get_type_hints(declarer, include_extras=True)
    missing = [p.name for p in parameters if p.name not in hints] + ([] if "return" in hints else ["return"])
    if missing:
        raise TypeError(f"{place}: not annotated: {', '.join(missing)}; everything that travels has a type")
    fields: list[Any] = [
        (p.name, hints[p.name]) if p.default is p.empty else (p.name, hints[p.name], p.default) for p in parameters
    ]
    request = msgspec.defstruct(f"{cls.__name__}_{name}", fields, frozen=True, forbid_unknown_fields=True)
    reply = hints["return"]
    for kind in (request, reply):
        try:
            msgspec.json.Decoder(kind, dec_hook=lambda _, value: value)
        except TypeError as error:
            raise TypeError(f"{place}: cannot travel: {error}") from error
    if not inspect.iscoroutinefunction(implementation):
        raise TypeError(f"{place}: a handler is `async def`")
    return HandlerSpec(name, index, declaration, request, reply)


def _parameters(place: str, fn: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(fn).parameters.values())[1:]
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{place}: parameter {parameter.name!r} must be a plain one (no *, /, **)")
    return parameters


class CallScope(msgspec.Struct, frozen=True, gc=False):
    """The call being handled in this task, if any."""

    deadline_at: float | None = None
    """Seconds on the node's monotonic clock; None: no limit."""
    caller: PeerKey | None = None
    """Incarnation that made the call, as its connection proved it."""


NO_SCOPE = CallScope()

_scope: contextvars.ContextVar[CallScope] = contextvars.ContextVar("myxa_call_scope", default=NO_SCOPE)


def current_caller() -> PeerKey | None:
    """Incarnation that made the call being handled, as its connection proved it; None outside of a handler."""
    return _scope.get().caller


enter_scope = _scope.set
"""Make a scope the current one."""


def fresh_context() -> contextvars.Context:
    """A copy of the current context without a call that is being handled."""
    context = contextvars.copy_context()
    context.run(_scope.set, NO_SCOPE)
    return context


def remaining_s(deadline_s: float | None, now: float) -> float | None:
    """Seconds for a nested call: its own deadline, cut to what the call being handled has left; None: no limit."""
    inherited = _scope.get().deadline_at
    if inherited is None:
        return deadline_s
    remaining = inherited - now
    return remaining if deadline_s is None else min(remaining, deadline_s)
