"""What happened in a simulated run, line by line, and a digest that two runs can be compared by."""

from __future__ import annotations

import hashlib

from .loop import SimLoop


class EventLog:
    """Entries carry virtual time and the number of callbacks run so far, so that any difference in what ran shows."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._entries: list[tuple[float, int, str, tuple[object, ...]]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, kind: str, *words: object) -> None:
        """Note an event; `words` are names and numbers of the run, nothing of the machine it runs on."""
        self._entries.append((self._loop.time(), self._loop.num_steps, kind, words))

    def lines(self, kind: str = "") -> list[str]:
        """Readable, oldest first; only of that kind, if given."""
        return [
            " ".join((f"{at:.6f}", str(step), what, *map(str, words)))
            for at, step, what, words in self._entries
            if not kind or kind == what
        ]

    @property
    def digest(self) -> str:
        """16 hex digits over all entries."""
        state = hashlib.blake2b(digest_size=8)
        for line in self.lines():
            state.update(line.encode())
            state.update(b"\n")
        return state.hexdigest()
