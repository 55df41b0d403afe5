"""Every check, and two of the three that show them: the preflight of a run's start, and `myxa doctor`.

The preflight takes a second, makes no run directory and starts no process. Each node checks what its own actors need.
It leaves the estimates to `myxa plan` (`plan.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...actors.hub import cached
from ...core.config import RunConfig
from ...core.config.loading import Finding
from ..actor_spec import ActorSpec
from . import files, node, run_arithmetic
from .check import Check, CheckedRun, run_checks
from .files import train_rows
from .machine import MACHINE_CHECKS, MachineFacts
from .memory_estimate import memory_findings, slow_transfer

CHECKS: tuple[Check, ...] = (
    Check("node", node.packages, of_models=True),
    Check("node", node.launched_servers, of_models=True),
    Check("node", node.environments),
    Check("node", node.devices, of_models=True),
    Check("named files", files.model_folder, of_models=True),
    Check("run file", files.fit, of_models=True),
    Check("named files", files.resume),
    Check("named files", files.functions),
    Check("named files", files.data),
    Check("node", node.sinks),
    Check("node", node.attached_servers, of_models=True),
    Check("node", node.listened_ports),
    Check("node", node.sandboxes),
    Check("node", node.run_folder),
    Check("estimate", run_arithmetic.amount_of_data),
    Check("estimate", run_arithmetic.rarely_meant),
    Check("estimate", run_arithmetic.sampling),
    Check("estimate", memory_findings, of_models=True),
    Check("estimate", slow_transfer),
    *(Check("machine", look) for look in MACHINE_CHECKS),
)
RESUME_CHECKS = tuple(check for check in CHECKS if check.look is files.resume)
"""Of what a run resumes from, on any machine."""
ABSENT_S = 7.0
"""How long a run that is started waits for an attached server that is not there."""


def check_node(
    config: RunConfig, actors: Iterable[ActorSpec], node: int = 0, checks: tuple[Check, ...] = CHECKS
) -> tuple[str, ...]:
    """Raise what is wrong for actors of this node: one error as it is, several as one of the first one's kind. Returns
    what is worth a look: on node 0 also by estimates, which are of all nodes."""
    actors, config = tuple(actors), cached(config)
    run = CheckedRun(config, [actor for actor in actors if actor.node == node], wait_s=ABSENT_S)
    findings = list(run_checks(checks, run, "run file", "named files", "node"))
    errors = [finding.error for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = "\n".join(f"  {error}" for error in errors)
        raise type(errors[0])(f"the run cannot start: {len(errors)} problems\n{lines}")
    if node == 0:
        rows: dict[Callable[..., object], object] = {train_rows: run.once(train_rows)} if run.of("buffer") else {}
        findings += run_checks(checks, CheckedRun(config, actors, known=rows), "estimate")
    return tuple(dict.fromkeys(finding.error.message for finding in findings))


MARKS = {"ok": "ok  ", "warning": "warn", "error": "FAIL"}


def judge(facts: MachineFacts) -> tuple[Finding, ...]:
    return tuple(run_checks(CHECKS, facts, "machine"))


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    rows = [
        {
            "name": finding.key,
            "status": finding.severity,
            "found": finding.error.message,
            "remedy": finding.error.remedy,
        }
        for finding in findings
    ]
    return {"ok": not any(finding.severity == "error" for finding in findings), "checks": rows}


def findings_text(findings: Sequence[Finding]) -> str:
    """The page: one line a finding, what to do below it."""
    width = max((len(finding.key) for finding in findings), default=0)
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{MARKS[finding.severity]}  {finding.key.ljust(width)}  {finding.error.message}")
        if finding.error.remedy:
            lines.append(f"      {' ' * width}  -> {finding.error.remedy}")
    counts = Counter(finding.severity for finding in findings)
    lines.append(f"{counts['ok']} ok, {counts['warning']} to look at, {counts['error']} to mend")
    return "\n".join(lines)
