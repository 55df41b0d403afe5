"""From the death of an actor's process to its next work: where the time goes.

    python bench/restarts.py [--rounds 3] [--roles buffer,coordinator,rollout,monitor]

Runs the small job of the tests with a reward that sleeps, kills one actor after another with SIGKILL and reads the
moments out of the run's own files: the launcher's log (death seen, restart decided, process started, registered), the
actor's log (serves) and the ledger and events (first work). Medians over rounds, seconds, each part from the end of the
one before it. Prints markdown. Goals are those of docs/reliability.md; a machine that is busy with other things misses
them, so the load is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.harness.run_job import Job, make_job
from tests.harness.waiting import wait_until

from myxa.launch.control.client import ControlClient

GOALS_S = {"coordinator": 2.0, "buffer": 3.0, "rollout": 5.0, "trainer": 15.0, "monitor": 5.0}
PARTS = ("seen", "started", "serves", "registered", "first work")
REWARD = """
import asyncio

async def reward(completion):
    await asyncio.sleep(0.2)
    return float(len(completion.text) % 3)
"""
OVERRIDES = (
    "run.num_steps=1000000", "roles.rollout.count=2", 'reward.fn="patient.py:reward"', "trainer.checkpoint_every=5",
    *(f"roles.{role}.max_restarts=1000" for role in ("coordinator", "buffer", "monitor", "trainer", "rollout")),
)  # fmt: skip
STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--roles", default="monitor,buffer,coordinator,rollout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="myxa-restarts-") as folder:
        job = make_job(Path(folder))
        (job.folder / "patient.py").write_text(REWARD)
        launcher = job.start(*OVERRIDES)
        try:
            wait_until(lambda: has_begun(job), "the first steps", timeout_s=180)
            measured = {role: [measure(job, role) for _ in range(options.rounds)] for role in options.roles.split(",")}
            assert launcher.poll() is None, "the run went on"
        finally:
            launcher.send_signal(signal.SIGINT)
            try:
                launcher.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.communicate()
    print_table(measured)


def print_table(measured: dict[str, list[dict[str, float]]]) -> None:
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print(f"| actor | {' | '.join(PARTS)} | all (largest) | goal | |")
    print("|---|" + "---:|" * (len(PARTS) + 2) + "---|")
    for role, rounds in measured.items():
        parts = [statistics.median(row[part] for row in rounds) for part in PARTS]
        totals = [sum(row.values()) for row in rounds]
        verdict = "met" if statistics.median(totals) <= GOALS_S[role] else "missed"
        shown = " | ".join(f"{part:.2f}" for part in parts)
        total = f"{statistics.median(totals):.2f} ({max(totals):.2f})"
        print(f"| {role} | {shown} | {total} | {GOALS_S[role]:g} | {verdict} |")


def has_begun(job: Job) -> bool:
    return any((job.folder / "runs").glob("*/control.json")) and len(moves(job, "TRAINED", 0.0)) >= 8


def measure(job: Job, role: str) -> dict[str, float]:
    """Kill one; seconds of each part."""
    name = {"rollout": "rollout/0", "trainer": "trainer/0"}.get(role, role)
    record = next(actor for actor in ControlClient.of(job.run_dir()).ask("ps") if actor["name"] == name)
    time.sleep(1.0)
    began = time.time()
    os.kill(record["pid"], signal.SIGKILL)
    attempt = record["attempt"] + 1
    log = job.run_dir() / "logs/launcher.0.log"
    log = job.run_dir() / "logs" / f"{name.replace('/', '.')}.{attempt}.log"
    wait_until(lambda: first_work(job, role, name, began) is not None, f"{name} to work again", timeout_s=120)
    moments = [
        began,
        moment(log, f"{name} ended", began),
        moment(log, f"{name}: attempt {attempt} is process", began),
        moment(log, "serves as attempt", began),
        moment(log, f"{name} is up", began),
        first_work(job, role, name, began) or began,
    ]
    gaps = [max(0.0, after - before) for before, after in pairwise(moments)]
    return dict(zip(PARTS, gaps, strict=True))


def moment(path: Path, pattern: str, after: float) -> float:
    """When a line of a log was written; the first one after that moment."""
    deadline = time.monotonic() + 30.0
    while True:
        for line in path.read_text().splitlines() if path.exists() else ():
            match = STAMP.match(line)
            if match and pattern in line:
                wall_s = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").timestamp() + int(match[2]) / 1000
                if wall_s >= after - 0.002:
                    return wall_s
        assert time.monotonic() < deadline, f"{path} does not say {pattern!r}"
        time.sleep(0.05)


def first_work(job: Job, role: str, name: str, after: float) -> float | None:
    """What only a working actor of that role brings about."""
    if role == "buffer":
        moments = [wall_s for wall_s, detail in moves(job, "", after) if detail != "the buffer was restarted"]
    elif role == "trainer":
        moments = [wall_s for wall_s, _ in moves(job, "TRAINED", after)]
    elif role == "monitor":
        moments = wall_times(job.run_dir() / "metrics.jsonl", "", after)
    elif role == "rollout":
        moments = wall_times(job.run_dir() / "events.jsonl", "weights-adopted", after, name)
    else:
        moments = wall_times(job.run_dir() / "events.jsonl", "", after, name)
    return min(moments, default=None)


def moves(job: Job, to: str, after: float) -> list[tuple[float, str]]:
    path = job.run_dir() / "ledger.sqlite"
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'transitions'").fetchall():
            return []
        rows = db.execute("SELECT wall_s, detail, to_state FROM transitions WHERE wall_s > ?", (after,)).fetchall()
    return [(wall_s, detail) for wall_s, detail, state in rows if to in ("", state)]


def wall_times(path: Path, kind: str, after: float, source: str = "") -> list[float]:
    moments: list[float] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line) if line.endswith("}") else {}
        is_meant = source in ("", entry.get("source")) and kind in ("", entry.get("kind"))
        if is_meant and entry.get("wall_s", 0.0) > after:
            moments.append(float(entry["wall_s"]))
    return moments


if __name__ == "__main__":
    main()
