"""Communicators with the manners of NCCL's suspend, for ranks that are threads of one process.

Collective without a deadline, only while idle, an error when done twice or on what was never built.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

MIB = 1 << 20
T = TypeVar("T")


class FakeGroup:
    """What the members share: who has come to which suspend or resume."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self._came: dict[tuple[str, int], set[int]] = {}
        self._changed = threading.Condition()
        self.aborted = False

    def meet(self, word: str, turn: int, rank: int) -> None:
        with self._changed:
            came = self._came.setdefault((word, turn), set())
            came.add(rank)
            self._changed.notify_all()
            while came != set(self.ranks) and not self.aborted:
                self._changed.wait()  # as long as it takes: so does NCCL
            if self.aborted:
                raise RuntimeError("NCCL error: remote process exited or there was a network error")

    def abort(self) -> None:
        with self._changed:
            self.aborted = True
            self._changed.notify_all()


class FakeBackend:
    """One rank's side, with the methods that torch's backend has."""

    def __init__(self, group: FakeGroup, rank: int, *, is_built: bool = True) -> None:
        self.group, self.rank = group, rank
        self.has_work = False
        self.calls: list[str] = []
        self._is_built = is_built
        self._is_suspended = False
        self._turn = 0

    def _is_initialized(self) -> bool:
        return self._is_built

    def suspend(self) -> None:
        self._check(is_suspended=False)
        if self.has_work:
            raise RuntimeError("suspend with work pending")
        self._turn += 1
        self.group.meet("suspend", self._turn, self.rank)
        self._is_suspended = True
        self.calls.append("suspend")

    def resume(self) -> None:
        self._check(is_suspended=True)
        self.group.meet("resume", self._turn, self.rank)
        self._is_suspended = False
        self.calls.append("resume")

    def memory_stats(self) -> dict[str, int]:
        self._check(is_suspended=self._is_suspended)
        return {"suspend": 96 * MIB, "persist": 32 * MIB, "total": 128 * MIB, "suspended": int(self._is_suspended)}

    def abort(self) -> None:
        self.group.abort()

    def use(self) -> int:
        """A collective: a fault of the device on suspended memory."""
        if self._is_suspended or self.group.aborted:
            raise RuntimeError("an illegal memory access was encountered")
        return self.rank

    def _check(self, *, is_suspended: bool) -> None:
        if not self._is_built:
            raise RuntimeError("communicator is not initialized")
        if is_suspended != self._is_suspended:
            raise RuntimeError("invalid usage: suspended twice, or resumed without")


def together(works: list[Callable[[], T]], deadline_s: float = 30.0) -> list[Any]:
    """What each gave, or the error that it raised; every rank in a thread of its own."""
    found: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            found[index] = works[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for index, thread in enumerate(threads):
        thread.join(deadline_s)
        assert not thread.is_alive(), f"rank {index} still waits after {deadline_s} s"
    return found
