"""Whole runs through SGLang servers in processes of their own: launched and attached, and what a lost one does."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.harness.commands import Command
from tests.harness.fake_sglang import stand_in_environment
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, events, metrics
from tests.harness.waiting import wait_until

LAUNCHES = ('roles.rollout.kind="sglang"', "sglang.stream_interval=4", "async.max_staleness=0")


def servers_of(run_dir: Path, folder: str = "model") -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "sglang.launch_server" in words and f"--model-path={run_dir.parents[1] / folder}" in words:
            found.append(process)
    return found


def compared(run_dir: Path) -> dict[int, float]:
    """Version -> difference between engine and trainer, of steps whose tokens are all of it."""
    steps = [point for point in metrics(run_dir) if point["values"].get("lag/max") == 0]
    return {point["step"]: point["values"].get("train/logprob_diff_abs_mean", 0.0) for point in steps}


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("leader/step_wall_s" in line for line in lines)


def losses(run_dir: Path) -> list[dict[str, Any]]:
    return events(run_dir, "engine-gone")


PAIRS = (
    'engine.groups.p.kind="prefill"', 'engine.groups.d.kind="decode"', 'sglang.disaggregation_transfer_backend="nixl"',
)  # fmt: skip


@pytest.mark.parametrize("victim_kind", ["", "prefill", pytest.param("decode", marks=pytest.mark.soak)])
def test_launched_servers_are_replaced_and_never_serve_what_they_do_not_have(job: Job, victim_kind: str) -> None:
    """One server for each of two rollout actors, from a folder of its own, or one actor with a prefill and a decode
    server."""
    folder = "model" if victim_kind else "served"
    if folder == "served":
        shutil.copytree(job.folder / "model", job.folder / folder)
    count = 1 if victim_kind else 2
    groups = PAIRS if victim_kind else (f'weights.served_folder="{job.folder / folder}"',)
    words = job.words(*LAUNCHES, *groups, "run.num_steps=400", f"roles.rollout.count={count}", *job.paced(2.0))
    run = Command(words, job.folder, env=stand_in_environment())
    try:
        wait_until(lambda: (job.folder / "runs").exists() and any(job.run_dir().iterdir()), "a run directory")
        run_dir = job.run_dir()
        wait_until(
            lambda: len(events(run_dir, "engine-joined")) == count and steps_done(run_dir) > 2, "engines at work"
        )
        mode = f"--disaggregation-mode={victim_kind}"
        victim = next(one for one in servers_of(run_dir, folder) if not victim_kind or mode in one.cmdline())
        victim.kill()
        wait_until(lambda: len(losses(run_dir)) == 1, "the loss is noticed")
        (gone,) = losses(run_dir)
        name = gone["text"].split()[0]
        at_loss = steps_done(run_dir)
        wait_until(lambda: len(events(run_dir, "engine-joined")) == count + 1, "the server is replaced")
        wait_until(lambda: len([e for e in events(run_dir, "weights-adopted") if e["source"] == name]) > 1, "adoption")
        wait_until(lambda: steps_done(run_dir) > at_loss + 2, "the run goes on")
    finally:
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=60)
    log = (run_dir / "logs" / f"{name.replace('/', '.')}.0.log").read_text()
    assert re.search(rf"its server \(pid {victim.pid}\) ended while it served with signal SIGKILL", log), text
    assert len(compared(run_dir)) > 5
    assert max(compared(run_dir).values()) < 1e-4
    assert events(run_dir, "run-paused") == []
    assert servers_of(run_dir, folder) == []
    logs = (
        [f"rollout.0.{kind}.0.sglang.log" for kind in ("prefill", "decode")]
        if victim_kind
        else ["rollout.0.sglang.log"]
    )
    assert all("fired up" in (run_dir / "logs" / log).read_text() for log in logs)
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
    assert not re.search(r"api.key.*[\w-]{32}", (run_dir / "logs" / "rollout.0.0.log").read_text())
