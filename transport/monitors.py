"""Who wants to hear of other actors' coming and going outside the handlers of an actor: `monitor` and `link`.

Actors that override `on_peer` are told by `hosting.py`; these are told by an iterator instead. Knows events and names;
the mirror says what happened.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ..core.actor import PeerEvent
from ..core.errors import PeerDied

MAX_UNREAD = 1024
"""Events that an iterator keeps for a reader that does not read; older ones are forgotten."""

StateOf = Callable[[str], PeerEvent | None]
"""How an actor stands now: up, down (it was there and is gone), or None for a name that was never heard of."""


class Monitors:
    """All iterators over peer events of one node."""

    def __init__(self, state_of: StateOf) -> None:
        self._state_of = state_of
        self._open: set[_Feed] = set()

    def __len__(self) -> int:
        return len(self._open)

    def tell(self, event: PeerEvent) -> None:
        """Something happened to another actor."""
        for feed in self._open:
            if feed.name == event.name:
                feed.put(event)

    async def of(self, name: str) -> AsyncGenerator[PeerEvent, None]:
        """How the actor stands now ("up" or "down"; nothing if it was never there), then all that happens to it."""
        feed = _Feed(name)
        self._open.add(feed)
        try:
            state = self._state_of(name)
            if state is not None:
                yield state
            while True:
                yield await feed.next()
        finally:
            self._open.discard(feed)

    async def until_down(self, name: str, whose: str) -> None:
        """Raises PeerDied when that incarnation of `name` ends; one that never was there is waited for first."""
        async with aclosing(self.of(name)) as events:
            was_up = False
            async for event in events:
                if event.kind == "up" and not was_up:
                    was_up = True
                elif event.kind in ("down", "restarted"):
                    reason = event.reason or "another incarnation took its place"
                    raise PeerDied(f"{name}, to which {whose} is linked, is gone: {reason}")


class _Feed:
    """Events for one reader."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._events: deque[PeerEvent] = deque(maxlen=MAX_UNREAD)
        self._has_news = asyncio.Event()

    def put(self, event: PeerEvent) -> None:
        self._events.append(event)
        self._has_news.set()

    async def next(self) -> PeerEvent:
        while not self._events:
            self._has_news.clear()
            await self._has_news.wait()
        return self._events.popleft()
