"""Whole runs through SGLang servers in processes of their own: launched and attached, and what a lost one does.

The servers are tests/harness/stand_in: SGLang's name, flags and routes with the embedded engine inside.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
from pathlib import Path

import psutil
from tests.harness.commands import run as run_command
from tests.harness.fake_sglang import STAND_IN
from tests.harness.run_job import Job, events, metrics
from tests.harness.waiting import wait_until

LAUNCHES = (
    'roles.rollout.kind="sglang"', f'roles.rollout.env={{PYTHONPATH="{STAND_IN}"}}', "sglang.stream_interval=4",
    "guard.every=1", "guard.prompts=4",
)  # fmt: skip


def servers_of(run_dir: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "sglang.launch_server" in words and f"--model-path={run_dir.parents[1] / 'model'}" in words:
            found.append(process)
    return found


def compared(run_dir: Path) -> dict[int, float]:
    """Version -> difference between engine and trainer."""
    return {
        point["step"]: point["values"]["guard/logprob_diff"]
        for point in metrics(run_dir)
        if "guard/logprob_diff" in point["values"]
    }


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("leader/step_wall_s" in line for line in lines)


def test_launched_servers_are_profiled_and_replaced_and_never_serve_what_they_do_not_have(job: Job) -> None:
    run = job.start(*LAUNCHES, "run.num_steps=400", "roles.rollout.count=2", *job.paced(2.0))
    try:
        wait_until(lambda: (job.folder / "runs").exists() and any(job.run_dir().iterdir()), "a run directory")
        run_dir = job.run_dir()
        wait_until(
            lambda: len(events(run_dir, "engine-joined")) == 2 and steps_done(run_dir) > 2, "two engines at work"
        )
        profile_server(job, run_dir)
        victim = servers_of(run_dir)[0]
        victim.kill()
        wait_until(lambda: len(events(run_dir, "engine-gone")) == 1, "the loss is noticed")
        (gone,) = events(run_dir, "engine-gone")
        name = gone["text"].split()[0]
        at_loss = steps_done(run_dir)
        wait_until(lambda: len(events(run_dir, "engine-joined")) == 3, "the server is replaced")
        wait_until(lambda: len([e for e in events(run_dir, "weights-adopted") if e["source"] == name]) > 1, "adoption")
        wait_until(lambda: steps_done(run_dir) > at_loss + 2, "the run goes on")
    finally:
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=60)
    log = (run_dir / "logs" / f"{name.replace('/', '.')}.0.log").read_text()
    assert re.search(rf"its server \(pid {victim.pid}\) ended while it served with signal SIGKILL", log), text
    # Each version was compared with one of the engines in turn: whatever the new server said, its weights said too.
    assert len(compared(run_dir)) > 5
    assert max(compared(run_dir).values()) < 1e-4
    assert events(run_dir, "run-paused") == []
    assert servers_of(run_dir) == []
    assert "fired up" in (run_dir / "logs" / "rollout.0.sglang.log").read_text()
    assert not re.search(r"api.key.*[\w-]{32}", (run_dir / "logs" / "rollout.0.0.log").read_text())


def profile_server(job: Job, run_dir: Path) -> None:
    """A profile of a rollout actor is also one of its server; what is in it: tests/engines/test_sglang_profile.py."""
    words = ("profile", "rollout/0", "--for", "0.2s", "--run", str(run_dir))
    done = run_command(*words, folder=job.folder, timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collapsedstack.txt" in done.stdout
    assert "rollout/0, its server http://127.0.0.1:" in done.stdout
    (trace,) = [line.strip() for line in done.stdout.splitlines() if line.endswith(".json.gz")]
    with gzip.open(run_dir / "profiles" / trace) as file:
        assert "traceEvents" in json.load(file)
