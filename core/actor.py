"""Actors: objects whose handlers are called by messages, one at a time unless a handler says otherwise.

Nothing here uses sockets or a loop. Background tasks (`ctx.spawn`) end with the actor; an error in one fails it.

The mailbox is a bounded first-in-first-out queue. A full mailbox refuses the sender; it never drops a message
silently. `asyncio.Queue` was considered: it has no second, unbounded class of items, and it cannot count what was
taken and is unfinished (re-entrant handlers), which the bound must include.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from .clock import Clock
from .errors import Overloaded
from .refs import ActorGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MailboxPolicy:
    """How much an actor lets others put before it."""

    size: int = 1024
    """Messages waiting or running at most; further ones are refused with `Overloaded`."""
    retry_after_s: float = 0.1
    """When a refused sender may try again."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a mailbox needs room for one message, not {self.size}")


class Mailbox(Generic[T]):
    """Bounded queue of one actor. Items of the house itself (peer events) are never refused."""

    def __init__(self, owner: str, policy: MailboxPolicy) -> None:
        self._owner = owner
        self._policy = policy
        self.waiting: deque[T] = deque()
        """Oldest first. Only this class changes it."""
        self.num_held = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def admit(self) -> None:
        """Count one more message, or raise Overloaded. Every admitted one is given back by `release`."""
        if self.num_held >= self._policy.size:
            self.num_refused += 1
            raise Overloaded(
                f"{self._owner}: mailbox is full ({self._policy.size} messages)",
                retry_after_s=self._policy.retry_after_s,
                remedy="come back later, or give it a larger MailboxPolicy",
            )
        self.num_held += 1

    def release(self) -> None:
        self.num_held -= 1

    def put(self, item: T) -> None:
        self.waiting.append(item)

    def take(self) -> T | None:
        return self.waiting.popleft() if self.waiting else None

    def remove(self, item: T) -> bool:
        """Take a waiting message out; False if it is not waiting (any more). The caller releases it."""
        for place, waiting in enumerate(self.waiting):
            if waiting is item:
                del self.waiting[place]
                return True
        return False

    def clear(self) -> list[T]:
        """Take everything; counted messages still have to be released."""
        items = list(self.waiting)
        self.waiting.clear()
        return items


A = TypeVar("A")


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

    def group(self, contract: type[A], members: str | Sequence[str]) -> ActorGroup[A]:
        """Several actors to be called at once: those of the given names, or all registered under a prefix
        ("trainer": trainer/0, trainer/1, ...) when a call begins."""
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
        """While inside, but for `limit_s` at most, this process may block its loop, or hold the interpreter lock,
        without being taken for hung. Its watchers hear of it before the block begins. Call it on the node's loop;
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
