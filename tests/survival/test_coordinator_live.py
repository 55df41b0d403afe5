"""The coordinator of a real run is killed at the start, paused, counting steps, and just before Ctrl-C: the run continues from
where it was and ends well. The kill matrix has it killed in the middle of its work."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live, live_run, made_steps
from tests.harness.run_job import audit, events, metrics, newest_step_in, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.coordinator.audit import verify_audit
from myxa.launch.control.client import ControlClient

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 60
OPTIONS = ("roles.coordinator.max_restarts=100", "eval.every=4")


class Victim:
    """The coordinator of a live run."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in events(self.live.run_dir, kind) if e["source"] == "coordinator"]

    def kill(self, when: str) -> None:
        """Until the next one is attached."""
        self.strike()
        self.until_back(when)

    def strike(self) -> None:
        self._before = len(self.told("coordinator-attached"))
        wait_until(lambda: worker_pids(self.live.launcher.pid, "coordinator"), "a coordinator", PATIENCE_S)
        os.kill(worker_pids(self.live.launcher.pid, "coordinator")[-1], signal.SIGKILL)

    def until_back(self, when: str) -> None:
        wait_until(lambda: len(self.told("coordinator-attached")) > self._before, f"back, {when}", PATIENCE_S)

    def steps_on(self, count: int = 3) -> None:
        newest = self.newest
        wait_until(lambda: made_steps(self.live, newest + count), f"{count} more steps", PATIENCE_S)

    @property
    def newest(self) -> int:
        return newest_step_in(self.live.run_dir)

    @property
    def status(self) -> dict[str, Any]:
        return ControlClient.of(self.live.run_dir).ask("status")["status"]


def test_a_run_survives_its_coordinator_in_every_state(tmp_path: Path) -> None:
    with live_run(tmp_path, *OPTIONS, steps=-1) as live:
        victim = Victim(live)
        _at_start(victim)
        assert live.ask("set", "lr=0.0005")["epoch"] == 1
        victim.steps_on()
        _paused(victim)
        victim.strike()
        live.launcher.send_signal(signal.SIGINT)  # who would have to hear of it is away
        said, _ = live.launcher.communicate(timeout=120)
        assert live.launcher.returncode in (0, 130), said
        assert [event for event in victim.told("phase") if "-> finished" in event["text"]], said
        _check_what_is_left(victim)


def _at_start(victim: Victim) -> None:
    log = victim.live.run_dir / "logs" / "coordinator.0.log"
    wait_until(lambda: log.exists() and "trainer-ready" in log.read_text(), "the trainer", PATIENCE_S)
    victim.kill("at start")
    wait_until(lambda: made_steps(victim.live, 3), "the first steps", PATIENCE_S)


def _paused(victim: Victim) -> None:
    rests_at = victim.live.ask("pause", "-m", "look")["rests_at"]
    wait_until(lambda: victim.newest >= rests_at, "the rest", PATIENCE_S)
    victim.strike()
    seen = {row["name"]: row["state"] for row in victim.live.ask("ps")}
    assert seen["trainer/0"] == "up", "`myxa ps` works meanwhile"
    victim.until_back("paused")
    status = victim.status
    assert (status["paused"], status["version"]) == ("look", rests_at)
    pauses_at = victim.live.ask("step", "2")["pauses_at"]
    victim.kill("counting steps")
    wait_until(lambda: victim.newest >= pauses_at, "two more steps", PATIENCE_S)
    time.sleep(1.0)
    assert victim.newest == pauses_at == rests_at + 2, "and no more"
    assert audit(victim.live.run_dir).states.get("CLAIMED", 0) == 0, "no batch was claimed beyond"
    victim.live.ask("undo")
    victim.live.ask("resume")
    victim.steps_on()


def _check_what_is_left(victim: Victim) -> None:
    run_dir = victim.live.run_dir
    left = audit(run_dir)
    assert len(left.trained) == len(set(left.trained)), "no group was trained twice"
    steps = sorted(p["step"] for p in metrics(run_dir) if "train/loss" in p["values"])
    assert steps == list(range(1, max(steps) + 1)), "each version was made once"
    assert len(left.trained) == 4 * max(steps)
    assert not verify_audit(run_dir / "audit.jsonl").complaint
    lets = sum(path.read_text().count("lets the loop start") for path in (run_dir / "logs").glob("trainer.0.*.log"))
    assert lets == 1, "the leader was let go once"
