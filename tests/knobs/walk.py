"""A walk through all that an operator can turn, on a real run, by its control socket; and what was seen on the way."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.dumps import read_groups
from tests.harness.run_job import Job, events, metrics
from tests.harness.waiting import wait_until

from myxa.actors.buffer.dumps import DumpedGroup
from myxa.core.errors import ConfigError
from myxa.launch.control.client import ControlClient

FIRST_LR = 1e-3
NEW_LR = 5e-4
COLD = 0.7
FEW = 3
NUM_TIMED = 24
ROWS = 40
"""Of each of two sources of prompts, `left` and `right`, in file order: their draw n is row n % ROWS."""
SOURCES = (
    'data.train=""',
    f"data.sources.left.path=data/prompts.jsonl@[0:{ROWS}]",
    f"data.sources.right.path=data/prompts.jsonl@[{ROWS}:{2 * ROWS}]",
    "data.shuffle=false",
)
MIX = "left:0.25,right:0.75"
LOW, HIGH, SKIPS = 0.3, 0.7, 1

REWARD = '''"""Half of all answers are right, and nothing of it can be learned: most groups have both kinds, and some do not."""

import random


def score(completion):
    return float(random.random() < 0.5)
'''


@dataclass
class Seat:
    """An operator at a run: what was asked, and what was answered."""

    job: Job
    client: ControlClient
    num_orders: int = 0
    """Verbs that the audit log must tell of."""

    @property
    def run_dir(self) -> Path:
        return self.client.run_dir

    def order(self, verb: str, **arguments: Any) -> Any:
        self.num_orders += 1
        return self.client.ask(verb, 150, **arguments)

    def set(self, **values: Any) -> dict[str, Any]:
        reply = self.order("set", values=values, reason="the walk")
        assert not reply["refused"], reply["refused"]
        return reply

    def version(self) -> int:
        return int(self.client.ask("status")["status"]["version"])

    def goes_on(self, num: int) -> int:
        """So many more versions; returns the newest."""
        goal = self.version() + num
        wait_until(lambda: self.version() >= goal, f"version {goal}")
        return goal

    def values(self) -> dict[str, dict[str, Any]]:
        """Owner -> its knobs as they are in force."""
        table = self.client.ask("get")
        return {s["owner"]: {k["tunable"]["name"]: k["value"] for k in s["knobs"]} for s in table["sheets"]}

    def samples(self) -> list[dict[str, Any]]:
        return self.client.ask("samples", num_groups=16, max_tokens=1)["groups"]

    def ledger(self, question: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as db:
            rows = db.execute(question).fetchall()
        db.close()
        return rows

    def in_force(self, name: str) -> list[dict[str, Any]]:
        """When its owners, each in its own process, said that they use a value of that knob."""
        found = events(self.run_dir, "knob-in-force")
        return [e for e in found if e["data"]["name"] == name]


@dataclass
class Walk:
    """What happened on the way."""

    seat: Seat
    replies: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    """Where the run stood when a change was answered."""
    asked_s: dict[int, float] = field(default_factory=dict)
    """Epoch of a timed change -> when it was asked for, wall clock."""
    crowd: list[int] = field(default_factory=list)
    """Groups in flight at one engine, as the ledger told after concurrency was lowered."""
    newcomers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Knobs of engines that came after the changes."""
    folder: str = ""
    refusals: dict[str, str] = field(default_factory=dict)

    def set(self, what: str, **values: Any) -> dict[str, Any]:
        reply = self.replies[what] = self.seat.set(**values)
        self.versions[what] = self.seat.version()
        return reply

    def undo(self, what: str, epoch: int = 0) -> dict[str, Any]:
        reply = self.replies[what] = self.seat.order("undo", epoch=epoch, reason="the walk")
        assert not reply["refused"], reply["refused"]
        self.versions[what] = self.seat.version()
        return reply

    def epoch(self, what: str) -> int:
        return int(self.replies[what]["epoch"])


@contextmanager
def seated(job: Job, *overrides: str) -> Iterator[Seat]:
    """A run on its way, ended by `down` when the block is left."""
    reward = job.folder / "half.py"
    reward.write_text(REWARD)
    process = job.start(
        "run.num_steps=100000", "async.max_staleness=0", f'reward.fn="{reward}:score"', *SOURCES, *overrides
    )
    try:
        wait_until(lambda: process.poll() is not None or _is_training(job), "the first step")
        seat = Seat(job, ControlClient.of(job.run_dir()))
        yield seat
        seat.order("down")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said


def _is_training(job: Job) -> bool:
    if not list((job.folder / "runs").glob("*/control.json")):
        return False
    try:
        return any("train/lr" in point["values"] for point in metrics(job.run_dir()))
    except (OSError, ValueError):
        return False


def take(walk: Walk) -> None:
    """The whole way."""
    seat = walk.seat
    seat.order("dump", next_groups=1_000_000)
    walk.versions["dump"] = seat.version()
    seat.goes_on(4)
    walk.set("looser", max_staleness=4)
    seat.goes_on(20)
    walk.set("tighter", max_staleness=1)
    seat.goes_on(5)
    lr = walk.set("lr", lr=NEW_LR)
    wait_until(lambda: seat.version() >= lr["at"] + 2, "steps with the new rate")
    walk.set("temperature", temperature=COLD)
    wait_until(lambda: any(g["knobs"] >= walk.epoch("temperature") for g in seat.samples()), "samples of the new epoch")
    walk.replies["crowded"] = seat.client.ask("set", values={"concurrency": 60000}, dry_run=True)
    _time_sets(walk)
    _scale(walk)
    _leave_groups_out(walk)
    _hold(walk)
    walk.set("mix", mix=MIX)
    seat.goes_on(6)
    walk.set("difficulty", difficulty_low=LOW, difficulty_high=HIGH, difficulty_skips=SKIPS)
    wait_until(lambda: bool(seat.ledger("SELECT 1 FROM groups WHERE reason = 'out-of-window'")), "a prompt passed over")
    seat.goes_on(10)
    undone = walk.undo("undo lr", walk.epoch("lr"))
    wait_until(lambda: seat.version() >= undone["at"] + 2, "steps with the old rate")
    _ask_for_nonsense(walk)
    seat.goes_on(8)


def _time_sets(walk: Walk) -> None:
    for turn in range(NUM_TIMED):
        asked_s = time.time()
        reply = walk.seat.set(concurrency=FEW if turn % 2 else FEW - 1)
        walk.asked_s[reply["epoch"]] = asked_s


def _scale(walk: Walk) -> None:
    """2 -> 4 -> 1."""
    seat = walk.seat

    def is_at_work() -> bool:
        rows = seat.ledger("SELECT rollout, COUNT(*) FROM groups WHERE state = 'DISPATCHED' GROUP BY rollout")
        walk.crowd.extend(count for _, count in rows)
        done = seat.ledger("SELECT DISTINCT rollout FROM groups WHERE state IN ('READY', 'CLAIMED', 'TRAINED')")
        return {("rollout/2",), ("rollout/3",)} <= set(done)

    assert seat.order("scale", role="rollout", count=4, wait_s=120)["is_done"]
    wait_until(is_at_work, "groups of the new engines")
    walk.newcomers = {name: v for name, v in seat.values().items() if name in ("rollout/2", "rollout/3")}
    assert seat.order("scale", role="rollout", count=1, wait_s=120)["is_done"]
    seat.goes_on(3)


def _leave_groups_out(walk: Walk) -> None:
    seat = walk.seat
    walk.set("filter", group_filter="zero_variance")
    wait_until(lambda: any(g["reason"] == "zero_variance" for g in seat.samples()), "a group that is left out")
    walk.undo("undo filter")
    seat.goes_on(5)


def _hold(walk: Walk) -> None:
    """Pause, three steps, a checkpoint, and on."""
    seat = walk.seat
    walk.versions["pause"] = rests_at = seat.order("pause")["rests_at"]
    wait_until(lambda: seat.version() == rests_at, "the pause")
    time.sleep(0.5)  # time enough for many steps
    assert seat.version() == rests_at, "nothing is trained while it is paused"
    walk.versions["step"] = until_step = seat.order("step", num_steps=3)["pauses_at"]
    wait_until(lambda: seat.version() == until_step, "three steps")
    time.sleep(0.5)
    assert seat.version() == until_step, "and no fourth"
    walk.folder = seat.order("ckpt")["folder"]
    assert seat.version() == until_step
    seat.order("resume")
    seat.goes_on(3)


def _ask_for_nonsense(walk: Walk) -> None:
    seat = walk.seat
    before = seat.client.ask("get")
    for what, asked in {
        "range": {"values": {"lr": -1}},
        "greedy": {"values": {"temperature": 0}},
        "unknown": {"values": {"learning_rat": 1e-4}},
        "guard": {"values": {"lr": 100 * FIRST_LR}},
        "expect": {"values": {"temperature": 0.9}, "expect": {"temperature": 0.123}},
        "half": {"values": {"temperature": 0.9, "lr": -1}},
        "source": {"values": {"mix": "left:1,rigt:1"}},
        "window": {"values": {"difficulty_low": 0.9}},
    }.items():
        walk.refusals[what] = _refusal(seat, asked)
    after = seat.client.ask("get")
    assert after["sheets"] == before["sheets"], "nothing was changed"
    assert after["epoch"] == before["epoch"]


def _refusal(seat: Seat, asked: dict[str, Any]) -> str:
    try:
        reply = seat.order("set", **asked)
    except ConfigError as error:
        return str(error)
    assert reply["epoch"] == 0
    return str(reply["refused"])


# -- what the run itself tells


def steps(run_dir: Path) -> dict[int, dict[str, float]]:
    """Version trained from -> what was told of that step."""
    return {p["step"] - 1: p["values"] for p in metrics(run_dir) if "train/lr" in p["values"]}


def claimed(run_dir: Path) -> dict[int, list[DumpedGroup]]:
    """Step -> the groups that it was trained on, with all samples; from when the dump began."""
    found: dict[int, list[DumpedGroup]] = {}
    for path in (run_dir / "dumps").glob("next-*.jsonl"):
        for group in read_groups(path):
            found.setdefault(group.step, []).append(group)
    return found


def knobs_of_checkpoint(folder: str) -> dict[str, Any]:
    """Live values in a checkpoint."""
    found = json.loads((Path(folder) / "manifest.json").read_text())["extra"]["knobs"]
    return {"epoch": found["epoch"], **{k["name"]: k["value"] for k in found["knobs"]}}
