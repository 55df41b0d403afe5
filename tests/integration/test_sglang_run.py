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

pytestmark = pytest.mark.timeout(300)

LAUNCHES = ('roles.rollout.kind="sglang"', "sglang.stream_interval=4", "async.max_staleness=0")


def servers_of(run_dir: Path, folder: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        if "sglang.launch_server" in words and f"--model-path={run_dir.parents[1] / folder}" in words:
            found.append(process)
    return sorted(found, key=lambda one: one.info["create_time"])  # numbers of processes begin anew some day


def compared(run_dir: Path) -> dict[int, float]:
    """Version -> difference between engine and trainer, of steps whose tokens are all of it."""
    steps = [point for point in metrics(run_dir) if point["values"].get("lag/max") == 0]
    return {point["step"]: point["values"].get("train/logprob_diff_abs_mean", 0.0) for point in steps}


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("leader/step_wall_s" in line for line in lines)


def num_adopted(run_dir: Path, name: str) -> int:
    return sum(event["source"] == name for event in events(run_dir, "weights-adopted"))


def losses(run_dir: Path) -> list[dict[str, Any]]:
    return events(run_dir, "engine-gone")


GROUPS = (
    "engine.groups.r.servers=1", 'engine.groups.p.kind="prefill"', 'engine.groups.d.kind="decode"',
    'sglang.disaggregation_transfer_backend="nixl"',
)  # fmt: skip
LOGS = ("rollout.0.sglang.log", "rollout.1.prefill.0.sglang.log", "rollout.1.decode.0.sglang.log")


def test_launched_servers_are_replaced_and_never_serve_what_they_do_not_have(job: Job) -> None:
    """A server of one rollout actor, and a prefill and a decode server of the other one, from a folder of their own."""
    shutil.copytree(job.folder / "model", job.folder / "served")
    served = f'weights.served_folder="{job.folder / "served"}"'
    words = job.words(*LAUNCHES, *GROUPS, served, "run.num_steps=400", "roles.rollout.count=2", *job.paced(2.0))
    run = Command(words, job.folder, env=stand_in_environment())
    try:
        wait_until(lambda: job.has("config.toml"), "a run directory")
        run_dir = job.run_dir()
        wait_until(lambda: len(events(run_dir, "engine-joined")) == 2 and steps_done(run_dir) > 2, "engines at work")
        victims: dict[str, psutil.Process] = {}
        for server in servers_of(run_dir, "served"):  # the first of each is its subreaper
            kind = next((word for word in server.cmdline() if word.startswith("--disaggregation-mode=")), "")
            if not kind.endswith("decode"):
                victims.setdefault("rollout/1" if kind else "rollout/0", server)
        for victim in victims.values():
            victim.kill()
        wait_until(lambda: {gone["text"].split()[0] for gone in losses(run_dir)} == set(victims), "losses are noticed")
        at_loss = steps_done(run_dir)
        wait_until(lambda: len(events(run_dir, "engine-joined")) == 4, "the servers are replaced")
        wait_until(lambda: min(num_adopted(run_dir, name) for name in victims) > 1, "adoption")
        wait_until(lambda: steps_done(run_dir) > at_loss + 2, "the run goes on")
    finally:
        run.send_signal(signal.SIGINT)
        text, _ = run.communicate(timeout=120)
    logs = run_dir / "logs"
    for name, victim in victims.items():
        log = (logs / f"{name.replace('/', '.')}.0.log").read_text()
        assert re.search(rf"its server \(pid {victim.pid}\) ended while it served with signal SIGKILL", log), text
        assert not re.search(r"api.key.*[\w-]{32}", log)
    assert len(compared(run_dir)) > 5
    assert max(compared(run_dir).values()) < 1e-4
    assert events(run_dir, "run-paused") == []
    assert servers_of(run_dir, "served") == []
    assert all("fired up" in (logs / log).read_text() for log in LOGS)
    assert audit_ledger(run_dir / "ledger.sqlite").problems == ()
