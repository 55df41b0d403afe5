"""Faults at labelled points: read as they are written, each carried out once, in order, by whoever comes there first."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from myxa.core import chaos
from myxa.core.chaos import POINTS, Nemesis, Plan, Strike, parse_strike
from myxa.core.clock import ManualClock
from myxa.core.config import load_config
from myxa.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "strike"),
    [
        ("buffer.put:kill:3", Strike("buffer.put", "kill", 3)),
        ("rollout.partial@rollout/1:stop", Strike("rollout.partial", "stop", 1, "rollout/1")),
        ("trainer.forward@trainer/*:delay=2.5:2", Strike("trainer.forward", "delay", 2, "trainer/*", 2.5)),
        ("buffer.put:raise", Strike("buffer.put", "raise")),
    ],
)
def test_a_strike_is_read_as_it_is_written(text: str, strike: Strike):
    assert parse_strike(text) == strike
    assert parse_strike(str(strike)) == strike


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("buffer.putt:kill", 'did you mean "buffer.put"'),
        ("buffer.put:kil", 'did you mean "kill"'),
        ("buffer.put", "is not point"),
        ("buffer.put:kill:0", "counted from 1"),
        ("buffer.put:kill=3", 'only "delay"'),
        ("buffer.put:delay=1.2.3", "not a number"),
    ],
)
def test_a_mistake_is_named(text: str, words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_strike(text)


def nemesis(folder: Path, *strikes: str, actor: str = "buffer", rest_s: float = 0.0, clock: ManualClock | None = None):
    return Nemesis(Plan(tuple(map(parse_strike, strikes)), rest_s), actor, folder, clock)


def strikes_at(it: Nemesis, point: str) -> bool:
    try:
        it.reached(point)
    except RuntimeError:
        return True
    return False


def test_the_nth_visit_is_struck_and_no_other_not_even_in_the_next_process(tmp_path: Path):
    it = nemesis(tmp_path, "buffer.put:raise:3")
    assert [strikes_at(it, "buffer.put") for _ in range(5)] == [False, False, True, False, False]
    assert [strikes_at(nemesis(tmp_path, "buffer.put:raise:1"), "buffer.put") for _ in range(3)] == [False] * 3


def test_strikes_wait_for_the_one_before_whoever_carries_it_out(tmp_path: Path):
    plan = ("rollout.put@rollout/1:raise:1", "buffer.put:raise:1")
    buffer, other, meant = (nemesis(tmp_path, *plan, actor=name) for name in ("buffer", "rollout/0", "rollout/1"))
    assert not strikes_at(buffer, "buffer.put")
    assert not strikes_at(other, "rollout.put")
    assert strikes_at(meant, "rollout.put")
    assert strikes_at(buffer, "buffer.put")


def test_one_of_many_is_struck(tmp_path: Path):
    ranks = [nemesis(tmp_path, "trainer.forward:raise", actor=f"trainer/{rank}") for rank in range(4)]
    assert [strikes_at(rank, "trainer.forward") for rank in ranks] == [True, False, False, False]


def test_the_next_one_waits_for_a_rest(tmp_path: Path):
    clock = ManualClock(wall_s=time.time())  # marks carry the file system's time
    it = nemesis(tmp_path, "buffer.put:raise", "buffer.claim:raise", rest_s=30, clock=clock)
    assert strikes_at(it, "buffer.put")
    assert not strikes_at(it, "buffer.claim")
    clock.advance(31)
    assert strikes_at(it, "buffer.claim")


def test_nothing_happens_unless_armed(tmp_path: Path):
    chaos.reached("buffer.put")
    try:
        chaos.arm(nemesis(tmp_path, "buffer.put:raise"))
        with pytest.raises(RuntimeError, match="chaos"):
            chaos.reached("buffer.put")
    finally:
        chaos.arm(None)


@pytest.mark.parametrize(("action", "status"), [("kill", -9), ("delay=0.01", 0)])
def test_what_is_done(tmp_path: Path, action: str, status: int):
    code = (
        "import sys; from pathlib import Path; from myxa.core.chaos import *\n"
        f"Nemesis(Plan((parse_strike('buffer.put:{action}'),)), 'buffer', Path(sys.argv[1])).reached('buffer.put')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["0000.json"]


def test_every_point_is_in_the_product_and_none_else():
    found: set[str] = set()
    for path in (ROOT / "actors").rglob("*.py"):
        found |= set(re.findall(r'reached\("([a-z_.]+)"\)', path.read_text()))
    assert found == set(POINTS)


def test_the_table_needs_leave(tmp_path: Path):
    file = tmp_path / "run.toml"
    head = '[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n'
    file.write_text(head + '[chaos]\nstrikes = ["buffer.put:kill"]\n')
    with pytest.raises(ConfigError, match=r"run\.chaos"):
        load_config(str(file))
    file.write_text(head + '[run]\nchaos = true\n[chaos]\nstrikes = ["buffer.put:kill"]\n')
    assert load_config(str(file)).chaos.plan.strikes == (Strike("buffer.put", "kill"),)
    file.write_text(head + '[run]\nchaos = true\n[chaos]\nstrikes = ["bufer.put:kill"]\nfaults = ["kil"]\n')
    with pytest.raises(ConfigError, match="did you mean") as error:
        load_config(str(file))
    assert "buffer.put" in str(error.value)
    assert '"kill"' in str(error.value)
