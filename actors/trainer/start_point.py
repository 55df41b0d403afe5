"""Where a trainer rank begins. Plain values; whoever puts the rank together knows where checkpoints lie.

Rank 0 looks, and tells the others: ranks that look for themselves may see different checkpoints, and would train on
from them in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...core.errors import MyxaError, TornCheckpoint, TrainError


@dataclass(frozen=True, slots=True)
class StartPoint:
    """The same for all ranks of an attempt."""

    checkpoint: str = ""
    """Folder to restore; empty: the model folder, which is version 0."""
    is_restart: bool = False
    """The gang was here before, in this run: what was trained after that version is undone."""
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that are not whole, each in words. Where there are any, what is newer is undone as well."""
    life: int = 1
    """Of the run, as its checkpoints are to say."""
    attempt: int = 0
    """Of the gang, in this life."""


class StartFinder(Protocol):
    """What rank 0 asks. Both may block."""

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        """Where to begin, as far as can be told without a look at every byte. `torn`: folders that it found before and
        that are not whole, each with the reason. Raises TrainError when there is none where one must be."""
        ...

    def begun(self, start: StartPoint, version: int) -> None:
        """All ranks have restored `start`, which is of `version`, and nothing is trained yet: from now on no newer one
        is found. Raises TrainError if the disk refuses."""
        ...


class FixedStart:
    """Always the same place."""

    def __init__(self, checkpoint: str = "") -> None:
        """Empty: the model folder."""
        self._start = StartPoint(checkpoint=checkpoint)

    def find(self, torn: Mapping[str, str]) -> StartPoint:
        """See `StartFinder`."""
        if self._start.checkpoint in torn:
            raise TrainError(torn[self._start.checkpoint], remedy="name another checkpoint")
        return self._start

    def begun(self, start: StartPoint, version: int) -> None:
        """See `StartFinder`."""


class _Word(msgspec.Struct, frozen=True, kw_only=True):
    start: StartPoint = StartPoint()
    problem: str = ""


def shared_start(
    rank: int, finder: StartFinder, torn: Mapping[str, str], exchange: Callable[[str], tuple[str, ...]]
) -> StartPoint:
    """What rank 0 finds, on every rank. Collective, by `exchange`. Raises TrainError on all if it finds none."""
    word, failure = _Word(), None
    if rank == 0:
        try:
            word = _Word(start=finder.find(torn))
        except (MyxaError, OSError) as error:
            word, failure = _Word(problem=str(error)), error
    told = msgspec.json.decode(exchange(msgspec.json.encode(word).decode())[0], type=_Word)
    if failure is not None:
        raise failure
    if told.problem:
        raise TrainError(f"rank 0 finds no place to begin: {told.problem}", remedy="see the log of trainer/0")
    return told.start


class Restorer(Protocol):
    """What of a `TrainBackend` is needed here."""

    def load(self, folder: str) -> dict[str, Any]: ...

    def exchange(self, text: str) -> tuple[str, ...]: ...


def restore(rank: int, finder: StartFinder, backend: Restorer) -> tuple[StartPoint, dict[str, Any]]:
    """Where all ranks stand then, and what was saved beside it; version 0 of the model folder where nothing was.

    Collective, in the backend's thread. A checkpoint that turns out to be torn is passed over by all ranks, if there is
    another one to begin from. Raises TrainError if there is none, or if one cannot be restored.
    """
    torn: dict[str, str] = {}
    while True:
        start = shared_start(rank, finder, torn, backend.exchange)
        try:
            extra = backend.load(start.checkpoint) if start.checkpoint else {"version": 0}
        except TornCheckpoint as error:
            torn[start.checkpoint] = error.message
            continue
        if rank == 0:
            finder.begun(start, int(extra["version"]))
        return start, extra


def marks_of(start: StartPoint, version: int) -> dict[str, Any]:
    """What a checkpoint of `version` says of who wrote it: one of an earlier life, or of an attempt of the gang that
    was undone, may appear late and must not be taken for the newest."""
    return {"version": version, "life": start.life, "attempt": start.attempt}
