"""How long after a fault the first sign of normal work of that actor came, read from the run's files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.harness.nemesis import Struck
from tests.survival.under_chaos import ChaosRun

SIGNS = {
    "rollout": "serves a weight version",
    "buffer": "moves a group in the ledger",
    "coordinator": "reports that the run goes on",
    "monitor": "writes a measurement",
    "trainer": "has finished a step that the ledger took",
}
"""What counts, by role."""
PROMISED_S = {"rollout": 5.0, "coordinator": 2.0, "buffer": 3.0, "trainer": 15.0, "monitor": 5.0}
"""From SIGKILL to that sign, on an idle machine of two cores."""
OF_OTHERS = "actor-"
"""Kinds of events in an actor's name that its supervisor tells: it is suspect, it hangs."""
AT_LOAD, STEP = "the buffer was restarted", "version "
"""What the ledger notes of a transition: at its load; when a step was made."""


def recoveries(run: ChaosRun) -> list[tuple[Struck, float]]:
    """(fault, seconds); left out are faults after which there was nothing more for that actor to do, and those with
    another fault between them and the recovery."""
    found: list[tuple[Struck, float]] = []
    for strike in run.strikes:
        signs = (wall_s for wall_s in _signs(run.run_dir, strike) if wall_s > strike.wall_s)
        first_s = min(signs, default=None)
        if first_s is not None and not any(strike.wall_s < other.wall_s < first_s for other in run.strikes):
            found.append((strike, first_s - strike.wall_s))
    return found


def _signs(run_dir: Path, strike: Struck) -> Iterator[float]:
    role = strike.role
    if role == "rollout":
        yield from (
            e["wall_s"] for e in _lines(run_dir / "events.jsonl", strike.actor) if e["kind"] == "weights-adopted"
        )
    elif role == "coordinator":
        told = _lines(run_dir / "events.jsonl", role)
        yield from (event["wall_s"] for event in told if not event["kind"].startswith(OF_OTHERS))
    elif role == "monitor":
        yield from (metric["wall_s"] for metric in _lines(run_dir / "metrics.jsonl", role))
    else:
        yield from (wall_s for wall_s, to, detail in _moves(run_dir) if _is_sign(role, to, detail))


def _is_sign(role: str, to: str, detail: str) -> bool:
    """A rewind moves groups to TRAINED too, but makes no step."""
    return detail != AT_LOAD if role == "buffer" else to == "TRAINED" and detail.startswith(STEP)


def _moves(run_dir: Path) -> list[tuple[float, str, str]]:
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return db.execute("SELECT wall_s, to_state, detail FROM transitions").fetchall()


def _lines(path: Path, source: str) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["source"] == source:
            yield entry


def table(runs: list[ChaosRun]) -> str:
    """One line per fault: what, when it was over."""
    rows = [(str(strike.text), strike.actor, seconds) for run in runs for strike, seconds in recoveries(run)]
    lines = [f"{text:40} {actor:12} {seconds:6.1f} s" for text, actor, seconds in sorted(rows)]
    return "\n".join(lines)
