"""A bounded first-in-first-out queue of what an actor has still to do. Sans-IO: no loop, no waiting.

Knows nothing of messages. Full means an explicit refusal to the sender, never a silent drop.
`asyncio.Queue` was considered: it waits, but has no second, unbounded class of items and no way to count what is
taken but unfinished (re-entrant handlers), which the bound must include.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from .errors import Overloaded

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MailboxPolicy:
    """How much an actor lets others put before it."""

    size: int = 1024
    """Messages waiting or running at most; further ones are refused with `Overloaded`."""
    retry_after_s: float = 0.1
    """What a refused sender is told."""

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
        self._num_counted = 0
        self.num_refused = 0

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def num_held(self) -> int:
        """Messages waiting or running."""
        return self._num_counted

    def admit(self) -> None:
        """Count one more message, or raise Overloaded. Every admitted one is given back by `release`."""
        if self._num_counted >= self._policy.size:
            self.num_refused += 1
            raise Overloaded(
                f"{self._owner}: mailbox is full ({self._policy.size} messages)",
                retry_after_s=self._policy.retry_after_s,
                remedy="come back later, or give it a larger MailboxPolicy",
            )
        self._num_counted += 1

    def release(self) -> None:
        """An admitted message is done with."""
        self._num_counted -= 1

    def put(self, item: T) -> None:
        """Queue an admitted message."""
        self.waiting.append(item)

    def put_event(self, item: T) -> None:
        """Queue something that does not count and is never refused."""
        self.waiting.append(item)

    def take(self) -> T | None:
        """Oldest item, or None."""
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
