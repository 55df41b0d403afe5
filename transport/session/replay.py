"""Once in effect: what this incarnation remembers of keyed puts, so that one sent twice is executed once. Sans-IO.

Bounded by number, bytes and age. Survives reconnects, not a restart: over a restart the actor's own ledger decides.
A failed put is forgotten, so that it can be tried again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .frames import Buffer

W = TypeVar("W")

MAX_KEYS = 10_000
MAX_BYTES = 64 << 20
MAX_AGE_S = 600.0


@dataclass(slots=True)
class _Entry(Generic[W]):
    began_at: float
    waiting: list[W] = field(default_factory=lambda: list[W]())
    answer: tuple[Buffer, tuple[Buffer, ...]] | None = None
    num_bytes: int = 0


class ReplayCache(Generic[W]):
    """Key -> running (with who waits for it) or answered (with the answer)."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, _Entry[W]] = OrderedDict()
        self._num_bytes = 0
        self.num_replayed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, key: bytes, waiter: W, now: float) -> tuple[bool, tuple[Buffer, tuple[Buffer, ...]] | None]:
        """(execute it?, answer if it is known). Neither: it runs already, and `waiter` is answered with the others."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = _Entry(now, [waiter])
            self._trim(now)
            return True, None
        self.num_replayed += 1
        if entry.answer is None:
            entry.waiting.append(waiter)
        return False, entry.answer

    def answered(self, key: bytes, body: Buffer, frames: tuple[Buffer, ...]) -> list[W]:
        """It is done; everybody who waits for this answer."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        entry.answer = (bytes(body), tuple(bytes(f) for f in frames))
        entry.num_bytes = len(body) + sum(map(len, frames))
        self._num_bytes += entry.num_bytes
        waiting, entry.waiting = entry.waiting, []
        return waiting

    def failed(self, key: bytes) -> list[W]:
        """It had no effect that can be relied on: forget it; everybody who waits for it."""
        entry = self._entries.pop(key, None)
        return entry.waiting if entry is not None else []

    def _trim(self, now: float) -> None:
        while self._entries:
            key, oldest = next(iter(self._entries.items()))
            too_many = len(self._entries) > MAX_KEYS or self._num_bytes > MAX_BYTES
            if oldest.answer is None or not (too_many or now - oldest.began_at > MAX_AGE_S):
                return
            self._num_bytes -= oldest.num_bytes
            del self._entries[key]
