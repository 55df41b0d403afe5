"""`myxa history --replay`: change the knobs of the live run as they were changed in another one.

Changes with a numbered boundary are asked for ahead of time, so that they are in force at the very number at which they
were; the others when the run stands at the version at which they were made. Synchronous; knows the audit log's records
and the control client.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...actors.audit import read_audit
from ...core.errors import ConfigError, LaunchError
from ...core.knobs import NUMBERED, AuditRecord, KnobMove, KnobValue
from ..control.client import ControlClient
from .knob_words import shown

CHANGE_S = 75.0
LOOK_EVERY_S = 0.05
AHEAD = 200
"""Versions that a change is asked for before it is to be in force."""
NOT_YET = -AHEAD - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One change of the other run."""

    number: int
    """In its audit log."""
    values: dict[str, KnobValue]
    target: str
    version: int
    """At which it was made."""
    at: int
    """Boundary at which it was in force; 0: it had none with a number."""
    reason: str

    @property
    def due(self) -> int:
        """Live version from which on it may be asked for."""
        return self.at - AHEAD if self.at else self.version


def trajectory(records: Iterable[AuditRecord]) -> tuple[Turn, ...]:
    """Everything that moved a knob, in order: changes, undone ones, those that went back by themselves."""
    return tuple(turn for record in records if record.result == "done" for turn in _turns(record))


def _turns(record: AuditRecord) -> Iterator[Turn]:
    """One for all owners; one for each when they got different values."""
    by_name: dict[str, set[KnobValue]] = {}
    for move in record.moves:
        by_name.setdefault(move.name, set()).add(move.new)
    if all(len(values) == 1 for values in by_name.values()):
        parts = {str(record.arguments.get("target") or ""): record.moves}
    else:
        parts = {owner: tuple(m for m in record.moves if m.owner == owner) for owner in {m.owner for m in record.moves}}
    for target, moves in parts.items():
        # Apart, because only those with a number can be asked for ahead of time.
        for is_numbered in (True, False):
            part = [move for move in moves if (record.at > 0 and move.boundary in NUMBERED) is is_numbered]
            if part:
                yield _turn(record, target, part, is_numbered=is_numbered)


def _turn(record: AuditRecord, target: str, moves: Sequence[KnobMove], *, is_numbered: bool) -> Turn:
    return Turn(
        number=record.number,
        values={move.name: move.new for move in moves},
        target=target,
        version=record.version,
        at=record.at if is_numbered else 0,
        reason=record.reason,
    )


def replay(client: ControlClient, log: Path) -> dict[str, Any]:
    """Ask for every change in order; returns what was done and what was refused, in words.

    Raises ConfigError for a log without changes, and whatever ends the run's answers.
    """
    turns = trajectory(read_audit(log))
    if not turns:
        raise ConfigError(f"{log} tells of no change of knobs", remedy="name the directory of a run with changes")
    told: dict[str, Any] = {"from": str(log), "done": [], "refused": []}
    pause = threading.Event()
    for turn in turns:
        while _version(client) < turn.due:
            pause.wait(LOOK_EVERY_S)
        reply = client.ask(
            "set", CHANGE_S, values=turn.values, target=turn.target, not_before=turn.at, force=True,
            reason=f"replay of #{turn.number}{': ' + turn.reason if turn.reason else ''}",
        )  # fmt: skip
        what = f"#{turn.number} {', '.join(f'{name} = {shown(value)}' for name, value in turn.values.items())}"
        if reply["refused"]:
            told["refused"].append(f"{what}: {reply['refused']}")
        else:
            late = f", was {turn.at}" if turn.at and reply["at"] != turn.at else ""
            when = f", at {reply['at']}{late}" if reply["at"] else ""
            told["done"].append(f"{what}: epoch {reply['epoch']}{when}")
    return told


def _version(client: ControlClient) -> int:
    """Of the live run; below every version until it runs. Raises LaunchError once it is over."""
    status = client.ask("status")["status"]
    if status is None or status["phase"] == "starting":
        return NOT_YET
    if status["phase"] in ("finished", "failed"):
        raise LaunchError("the run is over", remedy="changes that were to come later were not made")
    return int(status["version"])
