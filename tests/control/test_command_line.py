"""The commands against a real run, one for the whole module."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.control.live import Live, live_run
from tests.harness.run_job import metrics
from tests.harness.waiting import wait_until

from myxa.actors.coordinator.audit import read_audit
from myxa.launch.cli import main
from myxa.launch.control.client import ControlClient
from myxa.transport.security import JobKey

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("seat")
    keys = {name: JobKey.generate() for name in ("server", "ada")}
    for name, key in keys.items():
        key.save(folder / f"{name}.key")
    (folder / "allowed").write_text(f"view {keys['ada'].public} ada\n")
    flags = ('control.tcp="127.0.0.1:0"', 'control.key_file="server.key"', 'control.allow_file="allowed"')
    with live_run(folder, *flags) as run:
        yield run


def lr_of(live: Live) -> float:
    (sheet,) = live.ask("get", "lr")["sheets"]
    state = sheet["knobs"][0]
    return state["pending"] if state["pending"] is not None else state["value"]


# -- which run -----------------------------------------------------------------------------------------------------


def test_the_only_run_needs_no_name_and_is_found_from_elsewhere(live: Live, tmp_path: Path):
    note = json.loads((live.run_dir / "control.json").read_text())
    assert note["pid"] == live.launcher.pid
    here = live.ask("control", "where")
    assert here["run_dir"] == str(live.run_dir.resolve())
    there = live.myxa("control", "where", "--json", folder=tmp_path)
    assert json.loads(there.stdout) == here
    by_name = live.myxa("ps", "--json", "--run", str(live.run_dir), folder=tmp_path)
    assert len(json.loads(by_name.stdout)) == 5


def test_two_runs_are_listed(live: Live, tmp_path: Path):
    """A second launcher's note is enough: its socket is there."""
    for name in ("a", "b"):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as link:
            link.bind(str(folder / "s"))
        note = {"run_dir": str(folder), "control": str(folder / "s"), "view": str(folder / "s"), "pid": 1}
        (folder / "control.json").write_text(json.dumps(note))
    done = live.myxa("ps", folder=tmp_path)
    assert done.returncode == 3
    assert "2 runs are live:" in done.stderr
    assert str(tmp_path / "runs/a") in done.stderr
    assert "--run RUN" in done.stderr
    (tmp_path / "runs/b/s").unlink()
    done = live.myxa("ps", folder=tmp_path)
    assert (done.returncode, "does not answer" in done.stderr) == (3, True), done.stderr


@pytest.mark.parametrize("name", ["nowhere", "over"])
def test_a_run_that_is_not_there_is_told_with_status_3(live: Live, tmp_path: Path, name: str):
    (tmp_path / "over").mkdir()
    done = live.myxa("get", "--run", str(tmp_path / name), "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"]["type"] == "LaunchError"


def test_a_command_starts_fast_and_light():
    heavy = ("zmq", "asyncio", "torch", "numpy", "pydantic", "rich", "aiohttp", "textual")
    code = f"import sys; from myxa.launch.cli import make_parser; make_parser(); import myxa.launch.control.client; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (out.stdout.strip(), out.stderr) == ("[]", "")


# -- looking -------------------------------------------------------------------------------------------------------


def test_ps_tells_processes_as_they_are(live: Live):
    rows = {row["name"]: row for row in live.ask("ps")}
    assert set(rows) == {"monitor", "buffer", "coordinator", "trainer/0", "rollout/0"}
    for row in rows.values():
        assert row["state"] == "up"
        assert Path(f"/proc/{row['pid']}").exists()
        assert row["memory_bytes"] > 10 << 20
        assert 0 < row["uptime_s"] < 3600
        assert (row["host"], row["node"], row["attempt"], row["epoch"]) == (socket.gethostname(), 0, 0, 1)
    assert rows["trainer/0"]["doing"]


def test_every_json_is_one_line_of_json(live: Live):
    for command in (["ps"], ["get", "--all"], ["explain", "lr"], ["history"], ["config", "diff"], ["status"], ["why"]):
        done = live.myxa(*command, "--json")
        if command == ["status"]:
            assert done.returncode == 2, "a verb without a command"
            assert json.loads(done.stdout)["error"]["message"].startswith("'status' is no command")
            continue
        assert len(done.stdout.splitlines()) == 1, command
        json.loads(done.stdout)


# -- changing ------------------------------------------------------------------------------------------------------


def test_a_change_is_seen_in_the_metrics_at_the_boundary_it_told(live: Live):
    reply = live.ask("set", "lr=3e-4", "-m", "see it")
    at = reply["at"]
    assert [(m["name"], m["owner"], m["new"]) for m in reply["moves"]] == [("lr", "trainer/0", 3e-4)]
    wait_until(lambda: any(p["step"] > at + 1 and "train/lr" in p["values"] for p in metrics(live.run_dir)), "steps")
    rates = {p["step"]: p["values"]["train/lr"] for p in metrics(live.run_dir) if "train/lr" in p["values"]}
    used = {step: rate for step, rate in rates.items() if at - 3 <= step <= at + 2}
    assert any(rate == pytest.approx(3e-4) for rate in used.values())
    record = read_audit(live.run_dir / "audit.jsonl")[-1]
    assert (record.verb, record.reason, record.at, record.who.uid) == ("set", "see it", at, os.getuid())
    live.ask("undo")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lr=-1"], "must be above 0"),
        (["lr=1.0"], "say --force"),
        (["lr=true"], "must be a number"),
        (["lr=inf"], "must be finite"),
        (["lr=[1]"], "knobs are numbers, text, true or false"),
        (["lr = 1 2"], "is no TOML value"),
        (["lr"], "must look like NAME=VALUE"),
        (["lr=1e-4", "lr=2e-4"], "given twice"),
        (["lr=1" + "0" * 400], ""),
        (["lrr=1"], "is no knob"),
        (["learning_rate=1"], 'did you mean "lr"'),
        (["optimizer.lr=1"], "the knob is 'lr'"),
        (["lr=1e-4", "--for", "soon"], "is no time"),
        (["lr=1e-4", "--for", "0steps"], "is no time"),
        (["lr=1e-4", "--if", "lr=0.5"], "not 0.5 as expected"),
        (["lr=1e-4", "--target", "rolout"], "rolout"),
        (["lr=1e-4", "--target", "node:7"], "node:7"),
        (["max_staleness=1.5"], "whole number"),
        (["on_stale=fast"], "pace"),
        (["temperature=0.9", "lr=-1"], "must be above 0"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    live: Live, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    client = ControlClient.of(live.run_dir)
    before = client.ask("get")
    monkeypatch.chdir(live.job.folder)
    assert main(["set", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err
    assert len(err.strip().splitlines()) == 1
    assert values_of(client.ask("get")) == values_of(before)


def values_of(table: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """What holds once all that is decided is in force: a change made before may reach its boundary meanwhile."""
    return {
        (sheet["owner"], state["tunable"]["name"]): state["value"] if state["pending"] is None else state["pending"]
        for sheet in table["sheets"]
        for state in sheet["knobs"]
    }


def test_compare_and_set_dry_run_and_time(live: Live):
    first = lr_of(live)
    dry = live.ask("set", f"lr={first * 2}", "--dry-run")
    assert (dry["epoch"], [m["new"] for m in dry["moves"]]) == (0, [first * 2])
    assert lr_of(live) == first
    live.ask("set", f"lr={first / 2}", "--if", f"lr={first}", "--for", "3steps")
    wait_until(lambda: lr_of(live) == first, "it goes back by itself")
    live.ask("set", "concurrency=5", "--for", "0.5s", "--target", "node:0")
    wait_until(
        lambda: live.ask("get", "concurrency")["sheets"][0]["knobs"][0]["value"] == 16, "so does a change for a time"
    )


def test_apply_is_all_or_none(live: Live):
    first = lr_of(live)
    patch = live.job.folder / "patch.toml"
    patch.write_text(f"[optimizer]\nlr = {first / 4}\n[rollout]\ntemperature = -1.0\n")
    done = live.myxa("apply", str(patch))
    assert (done.returncode, "temperature" in done.stderr) == (2, True)
    patch.write_text(f'[optimizer]\nlr = {first / 4}\nlrr = 1\n[model]\npath = "x"\n[run]\nname = "small"\n')
    done = live.myxa("apply", str(patch))
    assert done.returncode == 2
    assert "optimizer.lrr is no key" in done.stderr
    assert "model.path is no knob and needs a restart" in done.stderr
    assert "run.name" not in done.stderr, "it is as the run has it"
    assert lr_of(live) == first
    patch.write_text(f"[optimizer]\nlr = {first / 4}\n[rollout]\ntemperature = 0.75\n")
    reply = live.ask("apply", str(patch))
    assert {m["name"]: m["new"] for m in reply["moves"]} == {"lr": first / 4, "temperature": 0.75}
    live.ask("undo", "--epoch", str(reply["epoch"]))
    assert lr_of(live) == first


def test_config_save_keeps_comments_and_makes_a_file_that_runs(live: Live):
    live.ask("set", "lr=7e-4", "eval_every=7")
    try:
        found = {d["knob"]: (d["key"], d["file"], d["live"]) for d in live.ask("config", "diff")}
        assert found["lr"] == ("optimizer.lr", 1e-3, 7e-4)
        old = live.job.folder / "mine.toml"
        old.write_text("# mine\n[optimizer]\nlr = 1.0  # too high\nweight_decay = 0.1\n")
        live.ask("config", "save", str(old))
        text = old.read_text()
        assert "# mine" in text
        assert "# too high" in text
        assert tomllib.loads(text)["optimizer"] == {"lr": 7e-4, "weight_decay": 0.1}
        assert tomllib.loads(text)["eval"]["every"] == 7
        new = live.job.folder / "new.toml"
        live.ask("config", "save", str(new))
        planned = live.myxa("plan", str(live.job.folder / "run.toml"), str(new), '--set=eval.data="data/heldout.jsonl"')
        assert planned.returncode == 0, planned.stdout + planned.stderr
    finally:
        live.ask("set", "lr=1e-3", "eval_every=0")
    assert not [d for d in live.ask("config", "diff") if d["knob"] in ("lr", "eval_every")]


def test_watch_shows_changes_steps_and_events_as_they_come(live: Live):
    watcher = subprocess.Popen(
        [sys.executable, "-m", "myxa.launch", "watch", "--json"], stdout=subprocess.PIPE, text=True, cwd=live.job.folder
    )
    try:
        assert watcher.stdout is not None
        json.loads(watcher.stdout.readline())
        live.ask("set", "top_p=0.9", "-m", "watched")
        kinds: set[str] = set()
        deadline = time.monotonic() + 60
        while kinds < {"change", "metrics", "event"} and time.monotonic() < deadline:
            item = json.loads(watcher.stdout.readline())
            kinds.add(item["kind"])
            if item["kind"] == "change":
                assert item["reason"] == "watched"
        assert kinds == {"change", "metrics", "event"}
    finally:
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(30) == 130
        if watcher.stdout is not None:
            watcher.stdout.close()
        live.ask("undo")


# -- holding -------------------------------------------------------------------------------------------------------


def test_pause_steps_and_resume(live: Live):
    rests = live.ask("pause", "-m", "hold")["rests_at"]
    # The trainer asks for its next batch as soon as it has made one: time it spent refused is proof that it did.
    wait_until(lambda: version(live) == rests and share_refused(live) > 0, "it rests")
    assert num_claimed(live) == rests
    assert live.ask("step", "2")["pauses_at"] == rests + 2
    wait_until(lambda: version(live) == rests + 2, "two steps")
    folder = Path(live.ask("ckpt")["folder"])
    assert num_claimed(live) == version(live) == rests + 2, "no batch was claimed beyond"
    assert folder.is_dir()
    assert folder.name == f"version_{rests + 2:08d}"
    assert live.ask("resume") == {"resumed": True}
    wait_until(lambda: version(live) > rests + 3, "it goes on")


def version(live: Live) -> int:
    return status(live)["status"]["version"]


def share_refused(live: Live) -> float:
    """Of the trainer's time: that it asked for a batch and got none, because the run is paused."""
    return status(live)["snapshot"].get("time/trainer/0", {}).get("paused/claim", 0.0)


def num_claimed(live: Live) -> int:
    """Steps whose batch was ever taken out of the ledger."""
    with contextlib.closing(sqlite3.connect(f"file:{live.run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return db.execute("SELECT MAX(step) FROM groups").fetchone()[0] + 1


def status(live: Live) -> dict[str, Any]:
    path = json.loads((live.run_dir / "control.json").read_text())["view"]
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(b'{"verb": "status"}\n')
        return json.loads(link.makefile().readline())["result"]


# -- history -------------------------------------------------------------------------------------------------------


def test_history_verifies_and_sees_a_changed_line(live: Live, tmp_path: Path):
    told = live.ask("history", "--verify")
    assert told["num_records"] == len(read_audit(live.run_dir / "audit.jsonl")) > 10
    forged = tmp_path / "forged"
    forged.mkdir()
    lines = (live.run_dir / "audit.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = re.sub(rb'"reason":"[^"]*"', b'"reason":"it was not me"', lines[2])
    (forged / "audit.jsonl").write_bytes(b"".join(lines))
    done = live.myxa("history", "--verify", "--run", str(forged))
    assert done.returncode == 1
    assert "line 3 was changed" in done.stderr


def test_attempts_are_in_the_audit_log(live: Live):
    live.myxa("set", "lr=-5")
    live.myxa("scale", "rollout=0")
    path = live.ask("control", "where")["view"]
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(b'{"verb": "down"}\n')
        assert not json.loads(link.makefile().readline())["ok"]
    tail = [(r.verb, r.result) for r in read_audit(live.run_dir / "audit.jsonl")[-2:]]
    assert tail == [("set", "refused"), ("scale", "refused")], "and not what the socket that only shows refused"


# -- from another host ---------------------------------------------------------------------------------------------


def test_a_remote_file_is_a_run(live: Live):
    note = json.loads((live.run_dir / "control.json").read_text())
    far = str(live.job.folder / "far.json")
    key = str(live.job.folder / "ada.key")
    live.ask("control", "remote", far, "--at", note["tcp"], "--server", note["tcp_key"], "--key", key)
    assert len(live.ask("ps", "--run", far)) == 5
    assert live.ask("history", "--run", far, "-n", "2")
    assert live.myxa("watch", "--run", far, "--count", "2").returncode == 0
    done = live.myxa("set", "lr=1e-4", "--run", far)
    assert (done.returncode, "only shows" in done.stderr) == (2, True)


# -- trouble -------------------------------------------------------------------------------------------------------


def test_the_seat_answers_while_the_coordinator_does_not(live: Live):
    """The last test of this run: whoever is stopped for long is taken for hung, and started anew."""
    live.ask("kill", "coordinator", "--signal", "STOP", "-m", "drill")
    try:
        rows = {row["name"]: row for row in live.ask("ps")}
        assert rows["coordinator"]["pid"]
        assert live.ask("history", "-n", "1")[0]["reason"] == "drill"
        assert live.ask("logs", "coordinator", "-n", "3")
        told = status(live)
        assert told["status"] is None, "the coordinator's part is missing, the others' are there"
        assert told["buffer"]["states"]
    finally:
        live.myxa("kill", "coordinator", "--signal", "CONT")
