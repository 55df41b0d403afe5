"""One judgement of the machine, and the way judgements are made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .machine_facts import MachineFacts

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and what came of it."""

    name: str
    status: Status
    found: str
    """What is there, and what that means."""
    remedy: str = ""
    """What to do; of an "ok" there is none."""


Judge = Callable[[MachineFacts], Iterator[Check]]


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, "ok", found)


def warning(name: str, found: str, remedy: str) -> Check:
    """Works, or will for some runs."""
    return Check(name, "warning", found, remedy)


def error(name: str, found: str, remedy: str) -> Check:
    """No run, or none of the kind that the installed packages are for, will work."""
    return Check(name, "error", found, remedy)
