"""A run's changes once more on another run, the end of a run, and a run that cannot be spoken to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.control.live import live_run
from tests.harness.run_job import make_job
from tests.harness.waiting import wait_until

from myxa.actors.coordinator.audit import read_audit
from myxa.launch.control.client import ControlClient

pytestmark = pytest.mark.timeout(600)


@pytest.mark.soak  # tests/knobs/test_walk.py replays a longer trajectory
def test_replay_gives_the_same_trajectory_on_another_run(tmp_path: Path):
    """Knobs with a numbered boundary at the very number, the others in order; then `down`, and nothing is left."""
    (tmp_path / "one").mkdir()
    with live_run(tmp_path / "one", "run.seed=5", steps=1) as one:
        client = ControlClient.of(one.run_dir)  # at once: the other run has to come as far as this one
        client.ask("set", values={"lr": 5e-4}, for_steps=2, reason="a")
        client.ask("set", values={"temperature": 0.8, "clip_high": 0.3})
        client.ask("set", values={"max_staleness": 1})
        client.ask("undo")
        wait_until(lambda: len([move for move in trajectory(one.run_dir) if move[0] == "lr"]) == 2, "back")
        was = trajectory(one.run_dir)
        source = one.run_dir
        one.ask("down", "-m", "enough")
        assert one.launcher.wait(90) == 0
        assert not (source / "control.json").exists()
        assert one.myxa("ps", "--run", str(source)).returncode == 3
        assert one.ask("history", "--run", str(source))[-1]["verb"] == "down"
    (tmp_path / "two").mkdir()
    with live_run(tmp_path / "two", "run.seed=6", steps=-1) as two:
        told = two.ask("history", "--replay", str(source))
        assert told["refused"] == []
        is_now = trajectory(two.run_dir)
    assert by_knob(is_now) == by_knob(was)


def trajectory(run_dir: Path) -> list[tuple[str, Any, Any, int]]:
    """(knob, old, new, number of its boundary or 0) of every move."""
    return [
        (move.name, move.old, move.new, record.at if move.boundary in ("batch", "step", "weights") else 0)
        for record in read_audit(run_dir / "audit.jsonl")
        for move in record.moves
    ]


def by_knob(moves: list[tuple[str, Any, Any, int]]) -> dict[str, list[tuple[Any, Any, int]]]:
    found: dict[str, list[tuple[Any, Any, int]]] = {}
    for name, old, new, at in moves:
        found.setdefault(name, []).append((old, new, at))
    return found


def test_without_sockets_a_run_cannot_be_spoken_to(tmp_path: Path):
    job = make_job(tmp_path)
    code, said, run_dir = job.run("control.socket=false", "run.num_steps=1")
    assert code == 0, said
    assert not (run_dir / "control.json").exists()
    assert not (run_dir / "audit.jsonl").exists()
