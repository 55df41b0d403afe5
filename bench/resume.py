"""From `myxa resume` of a run that was killed to its first step: where the time goes.

    python bench/resume.py [--rounds 3]

Runs the small job of the tests until it has a checkpoint, kills everything with SIGKILL and resumes it, again and
again. Moments come out of the run's own files: the launcher's log (who is started when), the trainer's log (serves,
has loaded, may go) and the ledger (first batch claimed, first step trained). Medians over rounds, seconds, each part
from the end of the one before it. Prints markdown. The goal is that of docs/checkpoints.md, beyond the load of the
model; a machine that is busy with other things misses it, so the load is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil
from restarts import REWARD, moment, moves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.harness.run_job import Job, make_job
from tests.harness.waiting import wait_until

GOAL_S = 10.0
PARTS = ("command, checkpoint chosen", "launch", "imports", "load", "first engine", "first data", "step")
LOAD = "load"
"""The part that is the model's own."""
OVERRIDES = ("run.num_steps=1000000", 'reward.fn="patient.py:reward"', "trainer.checkpoint_every=5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="myxa-resume-") as folder:
        job = make_job(Path(folder))
        (job.folder / "patient.py").write_text(REWARD)
        launcher, began = job.start(*OVERRIDES), time.time()
        try:
            rounds: list[dict[str, float]] = []
            for _ in range(options.rounds):
                until_next_checkpoint(job, began)
                kill(launcher)
                began = time.time()
                launcher = resume(job)
                rounds.append(measure(job, began))
        finally:
            kill(launcher)
    print_table(rounds)


def print_table(rounds: list[dict[str, float]]) -> None:
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(PARTS)} | all (largest) | without the load | goal | |")
    print("|" + "---:|" * (len(PARTS) + 3) + "---|")
    medians = {part: statistics.median(each[part] for each in rounds) for part in PARTS}
    totals = [sum(each.values()) for each in rounds]
    beyond = statistics.median(sum(each.values()) - each[LOAD] for each in rounds)
    verdict = "met" if beyond < GOAL_S else "missed"
    shown = " | ".join(f"{medians[part]:.2f}" for part in PARTS)
    print(
        f"| {shown} | {statistics.median(totals):.2f} ({max(totals):.2f}) | {beyond:.2f} | < {GOAL_S:g} | {verdict} |"
    )


def until_next_checkpoint(job: Job, since: float) -> None:
    def has_one() -> bool:
        told = job.folder.glob("runs/*/checkpoints/version_*/run.json")
        return any(path.stat().st_mtime > since for path in told)

    wait_until(has_one, "a checkpoint", timeout_s=180)


def kill(launcher: subprocess.Popen[str]) -> None:
    """Everything, at once; returns when all are gone."""
    everyone: list[psutil.Process] = []
    if launcher.poll() is None:
        root = psutil.Process(launcher.pid)
        everyone = [root, *root.children(recursive=True)]
    for process in everyone:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    launcher.communicate(timeout=60)
    psutil.wait_procs(everyone, timeout=20)


def resume(job: Job) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "myxa.launch", "resume", str(job.run_dir()), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=job.folder)


def measure(job: Job, began: float) -> dict[str, float]:
    """Seconds of each part."""
    run_dir = job.run_dir()
    launcher, trainer = run_dir / "logs" / "launcher.0.log", run_dir / "logs" / "trainer.0.0.log"
    wait_until(lambda: bool(moves(job, "TRAINED", began)), "the first step", timeout_s=180)
    first_step = min(wall_s for wall_s, _ in moves(job, "TRAINED", began))
    may_go = moment(trainer, "lets the loop start", began)
    claimed = [wall_s for wall_s, _ in moves(job, "CLAIMED", began) if wall_s < first_step]
    moments = [
        began,
        moment(launcher, "", began),
        moment(launcher, "trainer/0: attempt 0 is process", began),
        moment(trainer, "serves as attempt", began),
        moment(trainer, "is ready at version", began),
        may_go,
        min(claimed, default=may_go),  # what was claimed at the checkpoint is the first batch of the next life
        first_step,
    ]
    gaps = [max(0.0, after - before) for before, after in pairwise(moments)]
    return dict(zip(PARTS, gaps, strict=True))


if __name__ == "__main__":
    main()
