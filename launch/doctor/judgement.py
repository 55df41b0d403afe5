"""All judges in the order of the page, and the page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .check import Judge, MachineCheck
from .judge_packages import JUDGES as PACKAGES
from .judge_surroundings import JUDGES as SURROUNDINGS
from .judge_system import JUDGES as SYSTEM
from .machine_facts import MachineFacts

JUDGES: tuple[Judge, ...] = (*SYSTEM, *PACKAGES, *SURROUNDINGS)
MARKS = {"ok": "ok  ", "warning": "warn", "error": "FAIL"}


def judge(facts: MachineFacts) -> tuple[MachineCheck, ...]:
    """Every check."""
    return tuple(check for one in JUDGES for check in one(facts))


def checks_json(checks: Sequence[MachineCheck]) -> dict[str, Any]:
    """For programs."""
    return {
        "ok": not any(check.status == "error" for check in checks),
        "checks": [
            {"name": check.name, "status": check.status, "found": check.found, "remedy": check.remedy}
            for check in checks
        ],
    }


def checks_text(checks: Sequence[MachineCheck]) -> str:
    """The page: one line a check, what to do below it."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{MARKS[check.status]}  {check.name.ljust(width)}  {check.found}")
        if check.remedy:
            lines.append(f"      {' ' * width}  -> {check.remedy}")
    counts = {status: sum(check.status == status for check in checks) for status in MARKS}
    lines.append(f"{counts['ok']} ok, {counts['warning']} to look at, {counts['error']} to mend")
    return "\n".join(lines)
