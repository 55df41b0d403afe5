"""One judgement of the machine, and the way judgements are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .machine_facts import MachineFacts

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """What was looked at, and what came of it."""

    name: str
    status: Status
    found: str
    """What is there, and what that means."""
    remedy: str = ""
    """What to do; of an "ok" there is none."""


Judge = Callable[[MachineFacts], Iterator[MachineCheck]]


def ok(name: str, found: str) -> MachineCheck:
    """Nothing to do."""
    return MachineCheck(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> MachineCheck:
    """Works, or will for some runs."""
    return MachineCheck(name, "warning", found, remedy)


def error(name: str, found: str, remedy: str) -> MachineCheck:
    """No run, or none of the kind that the installed packages are for, will work."""
    return MachineCheck(name, "error", found, remedy)
