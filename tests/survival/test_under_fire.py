"""Random kills: the demo reaches the same reward while an actor is killed every ten seconds, in at most 1.6 times the
time. That takes minutes per seed, so only `make soak` does it (`bench/under_fire.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.nemesis import SPEC, Nemesis, Plan, RandomKills, actors_of
from tests.harness.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "bench" / "under_fire.py"


def test_random_kills_meet_the_actors_that_are_named(tmp_path: Path):
    names = ("buffer", "rollout/0", "rollout/1")
    children: dict[str, subprocess.Popen[bytes]] = {}
    for name in names:
        spec = tmp_path / f"{name.replace('/', '.')}.0.json"
        spec.write_text(json.dumps({"actor": {"name": name}}))
        children[name] = subprocess.Popen(["sleep", "60"], env={**os.environ, SPEC: str(spec)})
    try:
        assert actors_of(os.getpid()) == {name: child.pid for name, child in children.items()}
        kills = RandomKills(os.getpid(), 0.01, seed=1, patterns=("rollout/*",))
        kills.start()
        wait_until(lambda: all(children[name].poll() == -9 for name in names[1:]), "both kills")
        kills.stop()
        assert sorted(kills.killed) == ["rollout/0", "rollout/1"]
        assert children["buffer"].poll() is None
    finally:
        for child in children.values():
            child.kill()
            child.wait()


@pytest.mark.parametrize("text", ["buffer.putt:kill", "buffer.put:burn", "buffer.put", "buffer.put:kill:0"])
def test_a_strike_that_does_not_exist_is_refused(text: str):
    with pytest.raises(ValueError, match="no strike"):
        Nemesis(Plan((text,), "marks"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_demo_learns_under_fire(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "3"],
        capture_output=True, text=True, timeout=3500, check=False, cwd=tmp_path,
    )  # fmt: skip
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
