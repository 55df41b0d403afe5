"""Deadlines of many calls in one structure: a hashed timer wheel. Sans-IO.

Setting and clearing is O(1) and a finished call leaves nothing behind; a heap would keep it until its deadline, and one
`loop.call_later` per call costs more than the call.
"""

from __future__ import annotations

TICK_S = 0.05


class Wheel:
    """Numbers with due times, in slots of `TICK_S`."""

    def __init__(self, now: float) -> None:
        self._slots: dict[int, set[int]] = {}
        self._slot_of: dict[int, int] = {}
        self._next = int(now / TICK_S)

    def __len__(self) -> int:
        return len(self._slot_of)

    def set(self, number: int, due_at: float) -> None:
        """Due at the first tick not before `due_at`; setting again moves it."""
        self.clear(number)
        slot = max(int(due_at / TICK_S) + 1, self._next)
        self._slot_of[number] = slot
        self._slots.setdefault(slot, set()).add(number)

    def clear(self, number: int) -> None:
        slot = self._slot_of.pop(number, None)
        if slot is not None:
            numbers = self._slots[slot]
            numbers.discard(number)
            if not numbers:
                del self._slots[slot]

    def due(self, now: float) -> list[int]:
        """Take out everything that is due, in order of due time."""
        current = int(now / TICK_S)
        if current < self._next:
            return []
        slots = range(self._next, current + 1)
        ready = [s for s in slots if s in self._slots] if len(slots) <= len(self._slots) else self._ready(current)
        self._next = current + 1
        numbers: list[int] = []
        for slot in ready:
            for number in sorted(self._slots.pop(slot)):
                del self._slot_of[number]
                numbers.append(number)
        return numbers

    def _ready(self, current: int) -> list[int]:
        return sorted(slot for slot in self._slots if slot <= current)
