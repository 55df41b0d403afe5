"""How the communicators of a process leave its devices and come back, and how the members of a gang agree on it.

A release is collective in effect: every member of every group does the same under the same epoch, in one order. The
control group (gloo) of a gang is never among them. `MembershipCheck`: members report that they reached a point, and
absent members are named, by keys in the store of the process group: short requests and no wait in the store, so that
each member can give up at its own deadline without disturbing the others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from ...core.clock import Clock
from ...core.errors import MemoryFault, first_line

_T = TypeVar("_T")
POLL_S = 0.001
MAX_POLL_S = 0.02
GAVE_UP = "gave up"


class CommResidency(Protocol):
    """Releases communicators. Methods block: call them in the backend thread, never on the event loop."""

    def release(self, epoch: int, timeout_s: float) -> None:
        """Give the memory back; nothing to do where that was done. No epoch is older than one before, or used by two
        restores. Raises MemoryFault naming group and rank when the others did not come within `timeout_s`."""

    def restore(self, epoch: int, timeout_s: float) -> None:
        """Usable again under `epoch`."""

    def abort(self) -> None:
        """A member died: give up whatever hangs in a collective, and the memory with it."""


class Absent(MemoryFault):
    """Some did not come in time."""

    def __init__(self, message: str, ranks: tuple[int, ...], *, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.ranks = ranks


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class MembershipCheck:
    """One member's side. Ranks are those of the gang (WORLD)."""

    def __init__(self, store: Store, rank: int, clock: Clock) -> None:
        self.rank = rank
        self._store = store
        self._clock = clock
        self._left: list[str] = []

    def tell(self, place: str) -> None:
        """Where this member is now, for the others' error messages."""
        self._guard(lambda: self._store.set(f"at/{self.rank}", place))

    def arrive(self, point: str) -> None:
        """Come to `point` without waiting for anybody: others may count on this member there."""
        key = f"{point}/{self.rank}"
        self._guard(lambda: self._store.set(key, ""))
        self._left.append(key)

    def meet(self, point: str, ranks: Collection[int], deadline: float, word: str = "") -> dict[int, str]:
        """Wait until all `ranks` came to `point`; the word that each brought. `deadline` is a reading of the clock.
        Raises Absent with the ranks that did not come."""
        keys = {rank: f"{point}/{rank}" for rank in sorted(ranks)}
        own_key = f"{point}/{self.rank}"
        self._guard(lambda: self._store.set(own_key, word))
        missing = self._wait(keys, deadline)
        if missing:
            with contextlib.suppress(MemoryFault):
                # Else a late member would find all others here and continue alone.
                self._guard(lambda: self._store.delete_key(own_key))
                self.tell(f"{GAVE_UP} at '{point}' without rank {', '.join(map(str, missing))}")
            raise self._absent(point, missing)
        answers = {rank: self._guard(lambda key=key: self._store.get(key)).decode() for rank, key in keys.items()}
        for key in self._left:  # everybody who came here has read the keys of the point before
            self._guard(lambda key=key: self._store.delete_key(key))
        self._left = [own_key]
        return answers

    def _wait(self, keys: dict[int, str], deadline: float) -> list[int]:
        pause_s = POLL_S
        while not self._guard(lambda: self._store.check(list(keys.values()))):
            if self._clock.monotonic() >= deadline:
                return [rank for rank, key in keys.items() if not self._store.check([key])]
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
        return []

    def _absent(self, point: str, missing: list[int]) -> Absent:
        """Who was missing first, and who gave up because of that."""
        places = {rank: self._last_place(rank) for rank in missing}
        culprits = [rank for rank in missing if not places[rank].startswith(GAVE_UP)] or missing
        absent = ", ".join(f"rank {rank} ({places[rank]})" for rank in culprits)
        also = [f"rank {rank}" for rank in missing if rank not in culprits]
        given_up = f"; {', '.join(also)} gave up earlier" if also else ""
        remedy = "see the logs of the ranks named"
        return Absent(f"{absent} did not come to '{point}'{given_up}", tuple(culprits), remedy=remedy)

    def _last_place(self, rank: int) -> str:
        """What that member reported last; never raises."""
        try:
            key = f"at/{rank}"
            return self._store.get(key).decode() if self._store.check([key]) else "never heard of"
        except RuntimeError as error:
            return f"the store is gone ({first_line(error)})"

    def _guard(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except RuntimeError as error:
            raise MemoryFault(
                f"rank {self.rank} lost the store of its process group: {first_line(error)}",
                remedy="the process that hosts it (usually rank 0) has ended; the gang has to be started again",
            ) from error
