"""What `myxa plan` says of one problem: place, key, cause, remedy; and the order in which problems are told. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ...core.config import Inspected
from ...core.config.problems import KeyOrigin, Problem
from ...core.errors import MyxaError
from ..preflight.finding import ConfigFinding

Severity = Literal["error", "warning"]
PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One problem."""

    severity: Severity
    file: str
    """Run file, or the flag; empty: neither."""
    line: int
    """0: none."""
    key: str
    """Dotted path in the run file; empty: about none."""
    message: str
    """With the key and its value."""
    remedy: str = ""
    """Empty: the message says it."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.message}" + (f" -- {self.remedy}" if self.remedy else "")


def of_problem(problem: Problem, inspected: Inspected) -> PlanProblem:
    """One that the run file itself has."""
    origin = problem.origin or inspected.origins.of(problem.path)
    text = str(problem).removeprefix(f"{problem.origin}: ") if problem.origin else str(problem)
    cause, _, remedy = text.partition(" -- ")
    return PlanProblem("error", origin.place, origin.line, ".".join(problem.path), cause, remedy)


def of_finding(finding: ConfigFinding, inspected: Inspected) -> PlanProblem:
    """One of the machine, the files, or what the numbers come to."""
    origin = inspected.origins.of(tuple(finding.key.split("."))) if finding.key else KeyOrigin("", 0)
    severity: Severity = "warning" if finding.is_warning else "error"
    return PlanProblem(severity, origin.place, origin.line, finding.key, finding.error.message, finding.error.remedy)


def of_error(error: MyxaError) -> PlanProblem:
    """One that kept the run file from being read."""
    match = PLACE.fullmatch(error.message)
    if match is None:
        return PlanProblem("error", "", 0, "", error.message, error.remedy)
    return PlanProblem("error", match["file"], int(match["line"]), "", match["rest"], error.remedy)


def in_order(told: Iterable[PlanProblem], files: Sequence[str]) -> tuple[PlanProblem, ...]:
    """Errors first; file by file and line by line, flags last; each once."""
    order = {file: number for number, file in enumerate(files)}

    def place(one: PlanProblem) -> tuple[bool, int, int]:
        return (one.severity == "warning", order.get(one.file, len(files)), one.line)

    return tuple(sorted(dict.fromkeys(told), key=place))
