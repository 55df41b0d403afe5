"""Actors: objects whose handlers are called by messages, one at a time unless a handler says otherwise.

Knows no sockets and no loop; a node (`transport/node.py`) hosts actors, gives each its context and carries messages.
An actor's background tasks live in its task scope (`ctx.spawn`): they end with it, and an error in one fails it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast

import msgspec

from .clock import Clock
from .errors import BadRequest
from .handlers import HandlerSpec, handlers_of
from .mailbox import MailboxPolicy

if TYPE_CHECKING:
    from .actor_group import ActorGroup
    from .tensors import TensorStore

__all__ = [
    "CLOSED",
    "FAILED",
    "Actor",
    "ActorContext",
    "Caller",
    "MailboxPolicy",
    "PeerEvent",
    "Ref",
    "make_ref",
    "ref_class",
    "with_deadline",
]

A = TypeVar("A")
T = TypeVar("T")

FAILED, CLOSED = "it failed", "it was closed"
"""How a reason begins that a process gave itself when one of its actors, or all of them, ended."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something happened to another actor that this one watches."""

    kind: Literal["up", "down", "restarted", "suspect", "hung", "recovered"]
    """restarted: a new incarnation registered before anybody saw the old one end. suspect, hung, recovered: its process
    is there, but its event loop gives no sign of life (any more, or gives one again), as this node sees it."""
    name: str
    """Actor name."""
    epoch: int
    """Of the incarnation that came up, or went down."""
    reason: str = ""

    @property
    def is_own_word(self) -> bool:
        """Its process said so, in good order: it knows that it ends."""
        return self.reason.startswith((FAILED, CLOSED))


class ActorContext(Protocol):
    """What an actor has of its surroundings."""

    @property
    def name(self) -> str:
        """Own name, e.g. "rollout/0"."""
        ...

    @property
    def epoch(self) -> int:
        """Of the hosting process."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> logging.Logger: ...

    @property
    def tensors(self) -> TensorStore:
        """For large arrays that are produced where other processes of this host can read them."""
        ...

    def ref(self, contract: type[A], name: str) -> A:
        """A proxy whose methods call the actor of that name. Needs nobody to be there yet."""
        ...

    def group(self, contract: type[A], members: str | Sequence[str]) -> ActorGroup[A]:
        """Several actors to be called at once: those of the given names, or all registered under a prefix
        ("trainer": trainer/0, trainer/1, ...) when a call begins."""
        ...

    def monitor(self, name: str) -> AsyncGenerator[PeerEvent, None]:
        """How that actor stands now, if it ever was there, and everything that happens to it from now on."""
        ...

    def link(self, name: str) -> None:
        """This actor fails with PeerDied when that incarnation of the other one ends (if it is not there yet: once it
        was). One way; the other may link too."""
        ...

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a task in the actor's scope: cancelled at stop; an exception in it fails the actor."""
        ...

    def fail(self, error: BaseException) -> None:
        """This actor cannot go on: stop it and report the error to its node."""
        ...

    def peers(self, prefix: str) -> tuple[str, ...]:
        """Names registered now that start with `prefix`, sorted."""
        ...

    def watch(self, prefix: str) -> None:
        """From now on `on_peer` is called for names that start with `prefix`."""
        ...

    async def wait_for(self, *names: str, timeout_s: float) -> None:
        """Until all are registered; LaunchError naming the missing ones."""
        ...

    def deadline(self) -> float | None:
        """Seconds left of the call being handled; None: no limit."""
        ...

    def busy(self, limit_s: float, why: str) -> AbstractContextManager[None]:
        """While inside, but for `limit_s` at most, this process may block its loop, or hold the interpreter lock,
        without being taken for hung. Whoever watches it was told before the block begins. Call it on the node's loop;
        ConfigError for a limit that is none."""
        ...


class Actor:
    """Base of contracts and roles. `ctx` is set before `on_start`."""

    mailbox: ClassVar[MailboxPolicy] = MailboxPolicy()
    ctx: ActorContext

    async def on_start(self) -> None:
        """Before the first message. An exception here means the actor never starts; then there is no `on_stop`."""

    async def on_stop(self, why: str) -> None:
        """After the last message; background tasks are cancelled already."""

    async def on_peer(self, event: PeerEvent) -> None:
        """A watched actor came, went or was replaced. In turn with the serial handlers."""


class Caller(Protocol):
    """What carries a proxy's calls."""

    async def request(self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None) -> Any:
        """Call, put or cast; returns the reply (None for a cast, once it is on its way)."""
        ...

    def items(
        self, target: str, spec: HandlerSpec, request: msgspec.Struct, deadline_s: float | None
    ) -> AsyncIterator[Any]:
        """Open a stream."""
        ...


class Ref:
    """Proxy of an actor elsewhere. Typed as its contract; made by `ctx.ref` and `node.ref`."""

    __slots__ = ("ref_caller", "ref_contract", "ref_deadline_s", "ref_target")

    def __init__(self, caller: Caller, contract: type, target: str, deadline_s: float | None = None) -> None:
        self.ref_caller = caller
        self.ref_contract = contract
        self.ref_target = target
        self.ref_deadline_s = deadline_s

    def __repr__(self) -> str:
        return f"<ref {self.ref_contract.__name__} {self.ref_target!r}>"


def make_ref(caller: Caller, contract: type[A], target: str) -> A:
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

    def items(ref: Ref, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        deadline_s = declared_s if ref.ref_deadline_s is None else ref.ref_deadline_s
        return ref.ref_caller.items(ref.ref_target, spec, bind(ref, args, kwargs), deadline_s)

    made = items if spec.declaration.kind == "stream" else request
    made.__name__ = spec.name  # what tracebacks show, and how `SyncNode.call` knows the handler
    return made
