"""Where a trainer rank begins: at a checkpoint on disk, or at the model folder.

Rank 0 looks and sends the other ranks its choice: ranks that look for themselves might see different checkpoints and
silently train from different states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...core.errors import MyxaError, TornCheckpoint, TrainError
from ...core.protocols import TrainBackend
from ..checkpoints.folder import weights_version


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
        """Where to begin, as far as can be seen without reading every byte. `torn`: folders that it found before and
        that are not whole, each with the reason. Raises TrainError when there is none where one must be."""
        ...

    def begun(self, start: StartPoint, version: int) -> None:
        """All ranks have restored `start`, of `version`: no newer one is found from now on. Raises TrainError."""


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
    word = msgspec.json.decode(exchange(msgspec.json.encode(word).decode())[0], type=_Word)
    if failure is not None:
        raise failure
    if word.problem:
        raise TrainError(f"rank 0 finds no place to begin: {word.problem}", remedy="see the log of trainer/0")
    return word.start


def restore(rank: int, finder: StartFinder, backend: TrainBackend) -> tuple[StartPoint, dict[str, Any]]:
    """Where all ranks begin, and what was saved beside it; version 0 of the model folder where nothing was. Collective.
    A checkpoint that turns out to be torn is passed over by all ranks. Raises TrainError if there is none."""
    torn: dict[str, str] = {}
    while True:
        start = shared_start(rank, finder, torn, backend.exchange)
        try:
            extra = backend.load(start.checkpoint) if start.checkpoint else {"version": 0}
        except TornCheckpoint as error:
            torn[start.checkpoint] = error.message
            continue
        version = weights_version(Path(start.checkpoint), extra)
        if version < 0:
            raise TrainError(
                f"checkpoint {start.checkpoint} does not say of which version it is",
                remedy="name its folder version_N, as it was",
            )
        if rank == 0:
            finder.begun(start, version)
        return start, extra | {"version": version}
