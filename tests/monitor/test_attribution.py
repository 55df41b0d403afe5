"""Where the time goes, in real runs: every actor books at least 95 % of it to something better than "other"."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness.run_job import Job, make_job, metrics

from myxa.core.activity import ACTIVITY_KINDS
from myxa.launch.views.bottleneck import START
from myxa.launch.views.why import unattributed

LEAST = 0.95

Totals = dict[str, dict[str, float]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path)


def time_points(run_dir: Path) -> Iterator[tuple[str, float, dict[str, float]]]:
    """(actor, wall time, kind or "kind/name" -> cumulative seconds)."""
    for point in metrics(run_dir):
        seconds = {k.removeprefix("time/"): v for k, v in point["values"].items() if k.startswith("time/")}
        if seconds:
            yield point["source"], point["wall_s"], seconds


def totals(run_dir: Path) -> Totals:
    """What each actor had booked when it was heard last."""
    newest: Totals = {}
    for source, _, seconds in time_points(run_dir):
        newest[source] = seconds
    return newest


def shares(seconds: dict[str, float]) -> dict[str, float]:
    whole = sum(seconds.get(kind, 0.0) for kind in ACTIVITY_KINDS)
    return {kind: value / whole for kind, value in seconds.items()}


def check(found: Totals, *, expected: set[str]) -> None:
    assert expected <= set(found), found.keys()
    for actor, seconds in found.items():
        told = {kind: round(value, 3) for kind, value in seconds.items() if value > 0}
        print(actor, told)
        assert unattributed(shares(seconds)) <= 1 - LEAST, (actor, told)


def check_against_the_clock(run_dir: Path) -> None:
    """What is booked between the first and the last word of an actor is the time that went by between them: nothing is
    lost and nothing booked twice."""
    heard: dict[str, list[tuple[float, float]]] = {}
    for source, wall_s, seconds in time_points(run_dir):
        heard.setdefault(source, []).append((wall_s, sum(seconds.get(kind, 0.0) for kind in ACTIVITY_KINDS)))
    for source, points in heard.items():
        (first_wall_s, first_s), (last_wall_s, last_s) = points[0], points[-1]
        assert last_s - first_s == pytest.approx(last_wall_s - first_wall_s, rel=0.02, abs=0.1), source


def start_s(seconds: dict[str, float]) -> float:
    return sum(value for name, value in seconds.items() if name.startswith(START))


@pytest.mark.timeout(300)
def test_every_actor_of_a_whole_run(job: Job) -> None:
    """Two ranks, two engines, evaluation, checkpoints, comparison with the engines, an export at the end."""
    code, out, run_dir = job.run(
        "run.num_steps=40",
        "roles.trainer.count=2",
        "roles.rollout.count=2",
        "eval.data=data/heldout.jsonl",
        "eval.every=10",
        "eval.num_prompts=8",
        "trainer.checkpoint_every=10",
        "guard.every=10",
        timeout_s=240,
    )
    assert code == 0, out
    found = totals(run_dir)
    check(
        found,
        expected={"coordinator", "buffer", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "monitor"},
    )
    check_against_the_clock(run_dir)
    for actor in ("trainer/0", "trainer/1", "rollout/0", "rollout/1"):
        assert found[actor]["compute"] > 0, actor
        assert start_s(found[actor]) > 0, actor
    assert any(name.startswith("compute/train") for name in found["trainer/0"])
    assert any(actor not in _ROLES for actor in found), "the launcher tells its time too"


_ROLES = {"coordinator", "buffer", "trainer/0", "trainer/1", "rollout/0", "rollout/1", "monitor"}


@pytest.mark.timeout(300)
def test_every_actor_of_a_run_whose_trainer_and_engine_take_turns(job: Job) -> None:
    """The memory manager and the switches are accounted for."""
    code, out, run_dir = job.run(
        "run.num_steps=12",
        'memory.share="switch"',
        "memory.capacity_mb=9",
        "memory.switch_s=40",
        "engine.context_length=64",
        "engine.max_running=4",
        timeout_s=240,
    )
    assert code == 0, out
    found = totals(run_dir)
    check(found, expected={"coordinator", "buffer", "trainer/0", "rollout/0", "monitor"})
    managers = [actor for actor in found if actor.startswith("memory")]
    assert managers, found.keys()
    assert found["trainer/0"]["wait-memory"] > 0
    assert found["rollout/0"]["wait-memory"] > 0
    check_against_the_clock(run_dir)


def test_the_measure_itself_can_fail() -> None:
    chores: dict[str, Any] = {"compute": 0.5, "other": 0.5, "other/start": 0.4, "other/lead": 0.1}
    assert unattributed(chores) == pytest.approx(1 / 6)
    assert unattributed({**chores, "other/start": 0.49}) < 0.05
