"""The coordinator of a real run is killed (SIGKILL) at many moments of it: the run goes on where it stood, and ends well.

Proved, in two live runs: at start, in mid-run, paused, counting steps, just before Ctrl-C; in an evaluation, over a change
of knobs, during an adoption, while the run drains; hung (SIGSTOP, soak). Afterwards the ledger has each drawn prompt in one
state and none trained twice, the audit log's chain holds, the leader was let go once, versions have no gap. Times of
recovery are printed; they are promised on a machine that is not loaded, and bounded here with patience.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live, live_run, made_steps
from tests.harness.commands import Command
from tests.harness.run_job import audit, events, metrics, worker_pids
from tests.harness.waiting import wait_until

from myxa.actors.coordinator.audit import read_audit, verify_audit
from myxa.launch.control.client import ControlClient

pytestmark = pytest.mark.timeout(400)

PATIENCE_S = 60
OPTIONS = ("roles.coordinator.max_restarts=100", "eval.every=4")


class Victim:
    """The coordinator of a live run, and how long it was away each time."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.took_s: dict[str, float] = {}

    @property
    def pid(self) -> int:
        found: list[int] = []

        def look() -> bool:
            found[:] = worker_pids(self.live.launcher.pid, "coordinator")
            return len(found) == 1

        wait_until(look, "a coordinator", PATIENCE_S)
        return found[0]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in events(self.live.run_dir, kind) if e["source"] == "coordinator"]

    def kill(self, when: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Until the next one is attached."""
        self.strike(number)
        self.until_back(when)

    def strike(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._before = len(self.told("coordinator-attached"))
        pid, self._at_s = self.pid, time.time()
        os.kill(pid, number)

    def until_back(self, when: str) -> None:
        wait_until(lambda: len(self.told("coordinator-attached")) > self._before, f"back, {when}", PATIENCE_S)
        self.took_s[when] = self.told("coordinator-attached")[-1]["wall_s"] - self._at_s

    def steps_on(self, count: int = 3) -> None:
        newest = self.newest
        wait_until(lambda: made_steps(self.live, newest + count), f"{count} more steps", PATIENCE_S)

    @property
    def newest(self) -> int:
        return max((p["step"] for p in metrics(self.live.run_dir) if "train/loss" in p["values"]), default=0)

    @property
    def status(self) -> dict[str, Any]:
        return ControlClient.of(self.live.run_dir).ask("status")["status"]

    def journal(self) -> dict[str, Any]:
        return json.loads((self.live.run_dir / "coordinator.journal").read_bytes().partition(b"\n")[2])


def test_a_run_survives_its_coordinator_in_every_state(tmp_path: Path) -> None:
    with live_run(tmp_path, *OPTIONS, steps=-1) as live:
        victim = Victim(live)
        _at_start(victim)
        _in_mid_run(victim)
        _paused(victim)
        victim.strike()
        live.launcher.send_signal(signal.SIGINT)  # who would have to hear of it is away
        _end(victim)


@pytest.mark.soak
def test_a_run_survives_its_coordinator_in_the_middle_of_its_work(tmp_path: Path) -> None:
    with live_run(tmp_path, *OPTIONS, steps=1) as live:
        victim = Victim(live)
        _in_an_evaluation(victim)
        _during_an_adoption(victim)
        _over_a_change(victim)
        live.launcher.send_signal(signal.SIGINT)
        wait_until(lambda: bool(_phase(victim, "-> draining")), "draining", PATIENCE_S)
        for pid in worker_pids(live.launcher.pid, "coordinator"):  # none, if it is through by now
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _end(victim)


@pytest.mark.soak
def test_a_coordinator_that_stands_still_is_killed_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path, *OPTIONS, steps=2) as live:
        victim = Victim(live)
        victim.kill("hung", signal.SIGSTOP)
        victim.steps_on()
        live.launcher.send_signal(signal.SIGINT)
        _end(victim)


def _end(victim: Victim) -> None:
    said, _ = victim.live.launcher.communicate(timeout=120)
    print("back after", {when: f"{took_s:.2f} s" for when, took_s in victim.took_s.items()})
    assert victim.live.launcher.returncode in (0, 130), said
    assert _phase(victim, "-> finished"), said
    _check_what_is_left(victim)


def _phase(victim: Victim, text: str) -> list[dict[str, Any]]:
    return [event for event in victim.told("phase") if text in event["text"]]


def _at_start(victim: Victim) -> None:
    log = victim.live.run_dir / "logs" / "coordinator.0.log"
    wait_until(lambda: log.exists() and "trainer-ready" in log.read_text(), "the trainer", PATIENCE_S)
    victim.kill("at start")
    wait_until(lambda: made_steps(victim.live, 3), "the first steps", PATIENCE_S)


def _in_mid_run(victim: Victim) -> None:
    victim.strike()
    seen = {row["name"]: row["state"] for row in victim.live.ask("ps")}
    assert seen["trainer/0"] == "up", "`myxa ps` works meanwhile"
    victim.until_back("in mid-run")
    assert victim.live.ask("set", "lr=0.0005")["epoch"] == 1
    victim.steps_on()


def _paused(victim: Victim) -> None:
    rests_at = victim.live.ask("pause", "-m", "look")["rests_at"]
    wait_until(lambda: victim.newest >= rests_at, "the rest", PATIENCE_S)
    victim.kill("paused")
    status = victim.status
    assert (status["paused"], status["version"]) == ("look", rests_at)
    pauses_at = victim.live.ask("step", "2")["pauses_at"]
    victim.kill("counting steps")
    wait_until(lambda: victim.newest >= pauses_at, "two more steps", PATIENCE_S)
    time.sleep(1.0)
    assert victim.newest == pauses_at == rests_at + 2, "and no more"
    victim.live.ask("undo")
    victim.live.ask("resume")
    victim.steps_on()


def _over_a_change(victim: Victim) -> None:
    (engine,) = worker_pids(victim.live.launcher.pid, "rollout/0")
    held = _in_background(victim, "set", "concurrency=8", "lr=0.0007")
    wait_until(lambda: victim.journal()["knobs"]["undecided"] != "" or held.poll() is not None, "a vote", PATIENCE_S)
    os.kill(engine, signal.SIGSTOP)
    victim.strike()
    os.kill(engine, signal.SIGCONT)
    victim.until_back("over a change")
    output, _ = held.communicate(timeout=60)
    sheets = victim.live.ask("get", "concurrency", "lr")["sheets"]
    values = {state["tunable"]["name"]: state["value"] for sheet in sheets for state in sheet["knobs"]}
    is_made = any(r.epoch == 1 and r.result == "done" for r in read_audit(victim.live.run_dir / "audit.jsonl"))
    print("made:", is_made, values, output[-300:])
    assert (values["concurrency"] == 8) == (values["lr"] == 0.0007) == is_made
    victim.steps_on()


def _in_background(victim: Victim, *arguments: str) -> subprocess.Popen[str]:
    return Command(arguments, victim.live.job.folder)


def _in_an_evaluation(victim: Victim) -> None:
    wait_until(lambda: victim.journal()["run"]["evaluating"] >= 0, "an evaluation", PATIENCE_S)
    victim.kill("in an evaluation")
    if not victim.told("eval-repeated"):
        return  # it was through when the signal came
    number = len(victim.told("eval"))
    wait_until(lambda: len(victim.told("eval")) > number, "the same evaluation again", PATIENCE_S)


def _during_an_adoption(victim: Victim) -> None:
    (engine,) = worker_pids(victim.live.launcher.pid, "rollout/0")
    os.kill(engine, signal.SIGSTOP)  # whatever the coordinator asks of it now stays open
    time.sleep(2.0)  # the trainer comes to its bound
    victim.strike()
    os.kill(engine, signal.SIGCONT)
    victim.until_back("during an adoption")
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
