"""The watch over devices where no switch is: the memory of the dead is proven free, strangers are noticed. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable

from .book import PROOF_GAP_S, Book
from .instructions import Instruction, Measure, Told
from .refusal import in_words

WATCH_S = 5.0
"""A quiet device is measured so often."""
GHOST_S = 0.05
"""One whose dead are not proven gone, so often."""
KEY = "watch"


class Wake:
    """See the module's head. Keeps the baseline of unattributed memory of each device."""

    def __init__(self, book: Book, emit: Callable[[Instruction], None], *, alarm_bytes: int = 256 << 20) -> None:
        self._book = book
        self._emit = emit
        self._alarm_bytes = alarm_bytes
        self._due: dict[str, float] = {}
        self._gone_since: dict[str, float] = {}
        self._alarmed: set[str] = set()
        self._extra = float("inf")

    def at(self, when: float) -> None:
        """Somebody needs a tick then."""
        self._extra = min(self._extra, when)

    def measured(self, device: str, now: float, *, is_busy: bool, is_moving: bool) -> None:
        """A reading is in the books, whoever asked for it. `is_moving`: tenants of the device come or go right now, so
        that the books and the reading are of different moments, and prove nothing."""
        if any(g.is_dead for g in self._book.ghosts_on([device])):
            if is_moving:
                self._gone_since.pop(device, None)
            else:
                self._prove(device, now)
        elif not is_busy:
            self._book.settle_baseline(device)
            self._alarm(device, self._book.unattributed(device))

    def _prove(self, device: str, now: float) -> None:
        """Two readings, 20 ms apart, that have the memory of the dead free."""
        if not self._book.dead_are_gone(device):
            self._gone_since.pop(device, None)
        elif device not in self._gone_since:
            self._gone_since[device] = now
        elif now - self._gone_since[device] >= PROOF_GAP_S:
            del self._gone_since[device]
            for ghost in self._book.proven(device):
                self._emit(Told(device, ghost.name, "proven free", in_words(ghost.held_bytes)))

    def _alarm(self, device: str, num_bytes: int) -> None:
        if num_bytes > self._alarm_bytes and device not in self._alarmed:
            self._alarmed.add(device)
            self._emit(Told(device, "", "unattributed", f"{in_words(num_bytes)} are held by nobody that registered"))
        elif num_bytes <= self._alarm_bytes:
            self._alarmed.discard(device)

    def tick(self, now: float, busy: set[str]) -> None:
        """Measure what is due. A device in a switch is measured by it, but its dead are proven all the same."""
        if now >= self._extra:
            self._extra = float("inf")
        ghosts = self._haunted()
        due = [d for d in self._book.devices if now >= self._due_of(d, d in ghosts)]
        for device in due:
            self._due[device] = now
        if wanted := sorted(d for d in due if d in ghosts or d not in busy):
            self._emit(Measure(KEY, tuple(wanted)))

    def _haunted(self) -> set[str]:
        """Devices whose dead are not proven gone."""
        return {device for device in self._book.devices if any(g.is_dead for g in self._book.ghosts_on([device]))}

    def _due_of(self, device: str, has_ghosts: bool) -> float:
        last = self._due.get(device)
        return -float("inf") if last is None else last + (GHOST_S if has_ghosts else WATCH_S)

    def wakes_at(self) -> float:
        """When `tick` has something to do."""
        ghosts = self._haunted()
        return min([self._extra, *(self._due_of(d, d in ghosts) for d in self._book.devices)])
