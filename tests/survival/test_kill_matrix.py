"""The kill matrix: an actor of every kind fails at every labelled point of its life, by SIGKILL and by SIGSTOP, or has
no network for a while, and the run ends by itself with every prompt trained exactly once, and nothing left over.

`make test` puts the cells into two runs, one fault after the other (every point by SIGKILL; by SIGSTOP an actor of every
kind, which its supervisor finds out and kills). `make soak` has a third of deltas, and gives every cell a run of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.commands import run as run_command
from tests.harness.nemesis import POINTS, struck
from tests.harness.run_job import Job, metrics
from tests.harness.waiting import wait_until
from tests.survival.under_chaos import ChaosRun, chaos_job, check_lossless, check_nobody_left, marks, run_under

CHECKPOINTS = "trainer.checkpoint_every=2"
GANG = "roles.trainer.count=2"
DELTAS = ("weights.channel=disk", "weights.full_every=3")
NUM_TRIES = 8


def nothing(_: Job) -> None:
    """Nobody does anything meanwhile."""


@dataclass(frozen=True)
class Cells:
    strikes: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    num_steps: int = 16
    reward_s: float = 0.1
    beside: Callable[[Job], None] = nothing


def turn_a_knob(job: Job, after: int = 0) -> None:
    """As an operator, once so many faults have come about: again while the coordinator is away and says so, until it
    dies of it."""
    wait_until(lambda: job.has("ledger.sqlite"), "a run")
    wait_until(lambda: len(struck(marks(job))) >= after and has_stepped(job.run_dir()), "steps", timeout_s=200)
    for _ in range(NUM_TRIES):
        run_command("set", "lr=0.0005", "-m", "drill", folder=job.folder, timeout_s=120)
        if len(struck(marks(job))) > after:
            return


def has_stepped(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and '"train/loss"' in (run_dir / "metrics.jsonl").read_text()


CUTS = (
    "buffer.put:cut=1:3", "rollout.put@rollout/1:cut=1", "coordinator.version_made:cut=1:2", "trainer.claim:cut=1",
)  # fmt: skip
RUNS = {
    "one rank": Cells(
        (*CUTS, "rollout.partial:kill:3", "trainer.claim:kill:2", "coordinator.ready:kill:1", "trainer.checkpoint_write:kill:1",
         "rollout.prepare:kill:1", "trainer.manifest_commit:kill:1", "coordinator.adopt:kill:2",
         "coordinator.knobs_decided:kill:1", "trainer.publish:kill:2", "rollout.commit:kill:1",
         "coordinator.version_made:kill:2", "trainer.trained:kill:2", "rollout.reward:kill:3",
         "monitor.telemetry:kill:3", "rollout.put:kill:2"),
        (CHECKPOINTS,),
        num_steps=48,
        reward_s=0.3,
        beside=lambda job: turn_a_knob(job, after=len(CUTS) + 7),
    ),
    "a gang": Cells(
        ("buffer.dispatch:kill:2", "buffer.put:kill:3", "trainer.forward@trainer/1:kill:2", "buffer.claim:kill:1",
         "trainer.all_reduce@trainer/0:kill:2", "buffer.trained:kill:1", "trainer.optimizer@trainer/1:kill:1",
         "buffer.durable:kill:1",
         "trainer.all_reduce@trainer/1:stop:2", "buffer.put:stop:3", "coordinator.adopt:stop:2",
         "rollout.partial@rollout/0:stop:1", "monitor.telemetry:stop:1"),
        (CHECKPOINTS, GANG),
        num_steps=30,
        reward_s=0.4,  # waiting costs nothing; the last two are stopped while others work, who must not be through by then
    ),
    "deltas": Cells(
        ("rollout.rebuild:kill:2", "trainer.delta:kill:2", "rollout.prepare:kill:2", "trainer.publish:kill:3",
         "rollout.commit:kill:2", "coordinator.adopt:kill:2", "rollout.rebuild:stop:2", "trainer.delta:stop:1"),
        (CHECKPOINTS, *DELTAS),
        num_steps=36,
        reward_s=0.3,
    ),
}  # fmt: skip


def check(folder: Path, cells: Cells) -> ChaosRun:
    run = run_under(
        chaos_job(folder, reward_s=cells.reward_s), cells.strikes, *cells.overrides, num_steps=cells.num_steps,
        beside=cells.beside,
    )  # fmt: skip
    check_lossless(run, cells.strikes)
    check_nobody_left(run)
    return run


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name == "deltas" else []) for name in RUNS]
)
def test_killed_and_stopped_one_after_the_other(name: str, tmp_path: Path):
    run = check(tmp_path, RUNS[name])
    if "coordinator.knobs_decided:kill:1" in RUNS[name].strikes:
        check_change(run)
    if CUTS[0] in RUNS[name].strikes:
        first_kill = run.strikes[len(CUTS)]
        restarted = run.said("actor-restarted", "trainer-restarted", "trainer-goes-back")
        assert all(event["wall_s"] > first_kill.wall_s for event in restarted), "a short partition costs no process"


def check_change(run: ChaosRun) -> None:
    """A change of which the coordinator died, after it was recorded and before anybody heard of it, is in force."""
    audit = [json.loads(line) for line in (run.run_dir / "audit.jsonl").read_text().splitlines()]
    assert [entry["result"] for entry in audit if entry["verb"] == "set" and entry["epoch"]] == ["done"]
    rates = [point["values"]["train/lr"] for point in metrics(run.run_dir) if "train/lr" in point["values"]]
    assert rates[-1] == pytest.approx(0.0005)


def test_every_point_is_killed_at_and_every_kind_is_stopped():
    strikes = [strike.partition(":") for cells in RUNS.values() for strike in cells.strikes]
    assert {point.partition("@")[0] for point, _, how in strikes if how.startswith("kill")} == set(POINTS)
    stopped = {point.partition(".")[0] for point, _, how in strikes if how.startswith("stop")}
    assert stopped == {point.partition(".")[0] for point in POINTS}


SOAKED = [f"{point}:{action}:1" for point in POINTS for action in ("kill", "stop")]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strike", [text for text in SOAKED if not text.startswith("coordinator.knobs_decided")])
def test_cell(strike: str, tmp_path: Path):
    has_deltas = strike.startswith(("trainer.delta", "rollout.rebuild"))
    check(tmp_path, Cells((strike,), (GANG, CHECKPOINTS, *(DELTAS if has_deltas else ()))))


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", ["rollout.put@rollout/1", "trainer.claim", "coordinator.version_made", "buffer.put"])
def test_an_actor_that_is_away_for_long_is_replaced(tmp_path: Path, point: str):
    """Its process lives on without a network; its launcher ends it."""
    cells = Cells((f"{point}:cut=20:2",), (GANG, CHECKPOINTS, "rollout.max_groups=1"), num_steps=14, reward_s=0.8)
    check(tmp_path, cells)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_cell_of_a_knob_that_was_decided(action: str, tmp_path: Path):
    strike = f"coordinator.knobs_decided:{action}:1"
    check_change(check(tmp_path, Cells((strike,), (GANG, CHECKPOINTS), beside=turn_a_knob, num_steps=40, reward_s=0.2)))
