"""Actors: objects whose handlers are called by messages, one at a time unless a handler says otherwise.

Background tasks (`ctx.spawn`) end with the actor; an error in one fails it. A mailbox is bounded and first in, first
out; a full one refuses the sender. What is being handled counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from .clock import Clock

T = TypeVar("T")


A = TypeVar("A")


MANY_PEERS = 16384
"""As many processes as one may have connections to: bounds of what each of a run's processes has one of."""

FAILED, CLOSED = "it failed", "it was closed"
"""How a reason begins that a process gave itself when one of its actors, or all of them, ended."""


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something happened to another actor that this one watches."""

    kind: Literal["up", "down", "restarted", "suspect", "hung", "recovered"]
    """restarted: a new incarnation registered before the end of the old one was seen. suspect, hung, recovered: its
    process exists, but its event loop does not answer (any more, or answers again), as this node sees it."""
    name: str
    epoch: int
    """Of the incarnation that came up, or went down."""
    reason: str = ""

    @property
    def is_own_word(self) -> bool:
        """Its process reported the end itself."""
        return self.reason.startswith((FAILED, CLOSED))


class ActorContext(Protocol):
    """What an actor has of its surroundings."""

    @property
    def name(self) -> str: ...

    @property
    def epoch(self) -> int:
        """Of the hosting process."""
        ...

    @property
    def clock(self) -> Clock: ...

    @property
    def log(self) -> logging.Logger: ...

    def ref(self, contract: type[A], name: str) -> A:
        """A proxy whose methods call the actor of that name. The actor need not be there yet."""
        ...

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Run a task in the actor's scope: cancelled at stop; an exception in it fails the actor."""
        ...

    def fail(self, error: BaseException) -> None:
        """This actor cannot continue: stop it and report the error to its node."""
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
        """While inside, for `limit_s` at most, this process may block its loop without being taken for hung. Its
        watchers hear of it before. Call it on the node's loop; ConfigError for a limit that is none."""
        ...


class Actor:
    """Base of contracts and roles. `ctx` is set before `on_start`."""

    mailbox_size: ClassVar[int] = 1024
    """Messages waiting or running at most; further ones are refused with `Overloaded`."""
    ctx: ActorContext

    async def on_start(self) -> None:
        """Before the first message. An exception here means the actor never starts; then there is no `on_stop`."""

    async def on_stop(self, why: str) -> None:
        """After the last message; background tasks are cancelled already."""

    async def on_peer(self, event: PeerEvent) -> None:
        """A watched actor came, went or was replaced. In turn with the serial handlers."""
