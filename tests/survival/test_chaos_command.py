"""`myxa chaos`: refused unless the run may fail; each act does what it says, is an event and a line of the audit
log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live, live_run
from tests.harness.run_job import events
from tests.harness.waiting import wait_until

from myxa.actors.coordinator.audit import read_audit
from myxa.core.chaos import POINTS
from myxa.core.config import RoleName
from myxa.core.errors import ConfigError
from myxa.launch.chaos import BALLAST, DiskFill, RandomFaults
from myxa.launch.cli import main
from myxa.launch.supervisor.run_actors import ActorStatus

MIB = 1 << 20


def actor(name: str, role: RoleName = "rollout", *, pid: int = 7) -> ActorStatus:
    return ActorStatus(name=name, role=role, node=0, host="h", state="up" if pid else "waiting", attempt=0, pid=pid)


CREW = (actor("buffer", "buffer"), *(actor(f"rollout/{n}") for n in range(3)), actor("trainer/0", "trainer"))


def series(seed: int, crew: tuple[ActorStatus, ...] = CREW) -> list[tuple[str, str]]:
    lots = RandomFaults(seed, ("kill", "stop"), ("rollout/*", "buffer"))
    return [(lot.fault, lot.actor) for _ in range(40) if (lot := lots.draw(crew)) is not None]


def test_a_seed_gives_the_same_faults_again():
    assert series(7) == series(7)
    assert series(7) != series(8)
    assert {name for _, name in series(7)} == {"buffer", "rollout/0", "rollout/1", "rollout/2"}
    assert {fault for fault, _ in series(7)} == {"kill", "stop"}


def test_who_is_not_up_is_not_struck():
    away = (actor("rollout/0", pid=0), actor("rollout/1"))
    assert {name for _, name in series(7, away)} == {"rollout/1"}
    assert series(7, (actor("rollout/0", pid=0),)) == []


def test_there_must_be_something_to_draw_from():
    with pytest.raises(ConfigError, match="need faults and targets"):
        RandomFaults(1, (), ("rollout/*",))


def test_the_machine_s_own_file_system_is_not_filled(tmp_path: Path):
    with pytest.raises(ConfigError, match="machine's own file system"):
        DiskFill(tmp_path, spared=tmp_path.parent).fill(MIB)
    assert list(tmp_path.iterdir()) == []
    ballast = DiskFill(tmp_path, spared=Path("/proc"))
    assert ballast.fill(MIB) == MIB
    assert (tmp_path / BALLAST).stat().st_size == MIB
    ballast.empty()
    assert list(tmp_path.iterdir()) == []


def test_points_are_named_where_no_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", "points", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == POINTS


@pytest.mark.timeout(300)
def test_a_run_that_may_fail_is_made_to(tmp_path: Path):
    with live_run(tmp_path, "run.chaos=true", "roles.rollout.count=2", steps=1) as live:
        run = live.run_dir
        assert live.ask("chaos", "kill", "rollout/1", "-m", "drill") == {"act": "kill", "actors": ["rollout/1"]}
        wait_until(lambda: restarted(live, "rollout/1"), "a second attempt of rollout/1")
        live.ask("chaos", "random", "--every", "0.5s", "--seed", "3", "--faults", "delay", "--for", "0.2s",
                 "--targets", "buffer")  # fmt: skip
        wait_until(lambda: len(live.ask("chaos")["acts"]) >= 3, "two random faults")
        assert live.ask("chaos")["has_series"]
        assert live.ask("chaos", "end") == {"act": "end", "was_on": True}
        told = live.ask("chaos")
        assert (told["may_fail"], told["has_series"]) == (True, False)
        assert told["acts"][0]["actors"] == ["rollout/1"]
        assert {(act["fault"], *act["actors"]) for act in told["acts"][1:]} == {("delay", "buffer")}
        notes = [record for record in read_audit(run / "audit.jsonl") if record.verb == "chaos"]
        assert notes[1].who.user != "chaos"
        assert notes[1].reason == "drill"
        assert [note.detail for note in notes if note.who.user == "chaos"][:2] == ["kill: rollout/1", "delay: buffer"]
        wait_until(lambda: len(events(run, "chaos")) >= 3, "events of the acts")
        for wrong, words in (
            (("chaos", "kill"), "of whom?"),
            (("chaos", "fill-disk"), "how much?"),
            (("chaos", "random", "--faults", "burn"), "burn"),
            (("chaos", "kill", "rolout/1"), "did you mean"),
        ):
            done = live.myxa(*wrong)
            assert done.returncode == 2, done.stdout + done.stderr
            assert words in done.stderr
        before = made(live)
        wait_until(lambda: made(live) > before, "a step after all that")


@pytest.mark.timeout(200)
def test_any_other_run_refuses(tmp_path: Path):
    with live_run(tmp_path, steps=-1) as live:
        for act in (("kill", "rollout/0"), ("random",), ("end",), ("fill-disk", "--mb", "1")):
            done = live.myxa("chaos", *act)
            assert done.returncode == 2
            assert "not to be made to fail -- start one with run.chaos = true" in done.stderr
        assert live.ask("chaos")["may_fail"] is False


def restarted(live: Live, name: str) -> bool:
    return any(row["name"] == name and row["attempt"] > 0 and row["state"] == "up" for row in live.ask("ps"))


def made(live: Live) -> int:
    return max((event["step"] for event in metrics_of(live.run_dir)), default=-1)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}") and '"train/loss"' in line]
