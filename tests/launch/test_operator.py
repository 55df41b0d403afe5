"""An operator's hand on the processes of a live run: scale, drain, restart, kill, logs, stack, profile. The actors are
toys (`toy_program.py`); the launcher, its control socket and the processes are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launch.conftest import launched

from myxa.core.errors import ConfigError
from myxa.launch.control.client import ControlClient
from myxa.launch.launcher import TWICE_S

FIRST = ("monitor", "buffer", "coordinator", "trainer/0", "rollout/0", "rollout/1")
TWO = ("--set", "roles.rollout.count=2")

pytestmark = pytest.mark.timeout(240)


def client_of(one) -> ControlClient:
    one.until(lambda: (one.dir / "control.json").exists(), "the control socket")
    return ControlClient.of(one.dir)


def roster(client: ControlClient) -> dict[str, dict[str, Any]]:
    return {actor["name"]: actor for actor in client.ask("ps")}


def pid_of(client: ControlClient, name: str) -> int:
    return roster(client)[name]["pid"]


def attempt_of(client: ControlClient, name: str) -> int:
    return roster(client)[name]["attempt"]


def test_engines_come_and_go_and_neither_is_a_failure(lively):
    one = lively
    client = client_of(one)
    more = client.ask("scale", 120, role="rollout", count=4, wait_s=60)
    assert more["is_done"], one.evidence()
    assert [actor["name"] for actor in more["joining"]] == ["rollout/2", "rollout/3"]
    one.until_serving("rollout/2", "rollout/3")
    gone = [psutil.Process(one.pid_of(f"rollout/{n}")) for n in (1, 2, 3)]
    fewer = client.ask("scale", 120, role="rollout", count=1, wait_s=60)
    assert fewer["is_done"], one.evidence()
    assert fewer["leaving"] == ["rollout/3", "rollout/2", "rollout/1"]
    one.until_gone(gone)
    assert sorted(roster(client)) == sorted(set(FIRST) - {"rollout/1"})
    for number in (1, 2, 3):
        assert (one.dir / f"rollout.{number}.drained").exists(), "its work was handed back"
        assert (one.dir / f"rollout.{number}.stopped").exists(), "it ended in good order"
    again = client.ask("scale", 120, role="rollout", count=2, wait_s=60)
    assert [actor["name"] for actor in again["joining"]] == ["rollout/1"], "a name that is free comes again"
    one.until_serving("rollout/1", attempt=1)
    launcher = one.log("launcher.0.log")
    assert (one.dir / "coordinator.leaving").read_text().split() == fewer["leaving"], "the coordinator was told first"
    assert "ended with" not in launcher, "no end was taken for a failure"
    assert one.log("rollout.3.1.log") == one.log("rollout.2.1.log") == "", "who left was not started again"


@contextlib.contextmanager
def started(folder: Path, *flags: str, **how: Any) -> Iterator[Any]:
    """A run that several tests look at, one after the other; it leaves no process."""
    with launched(folder, "up", *TWO, *flags, **how) as one:
        one.until_serving(*FIRST)
        yield one
        one.until_gone(one.family)


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """It ends by a second signal, which ends everything at once."""
    with started(tmp_path_factory.mktemp("lively"), is_plain=True) as one:  # its actors have no torch
        yield one
        one.family = one.children()
        runtime = Path(json.loads((one.dir / "control.json").read_text())["control"]).parent
        for switch in ("coordinator.deaf", "rollout.1.hang-at-stop"):
            one.switch(switch)
        one.signal(signal.SIGINT)
        one.until(lambda: (one.dir / "coordinator.asked").exists(), "the coordinator to be asked")
        time.sleep(TWICE_S)
        one.signal(signal.SIGINT)
        assert one.ended() == 130, one.evidence()
        assert not (one.dir / "monitor.stopped").exists(), "nobody was waited for"
        assert not runtime.exists()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Few restarts, a short patience at the end, and a third engine that cannot start. Its coordinator gives it up."""
    sets = ("--set", "roles.rollout.max_restarts=1", "--stop-timeout", "2")
    with started(tmp_path_factory.mktemp("strict"), *sets, toy="rollout.2.bad-data") as one:
        yield one
        one.family = one.children()
        one.switch("fail")
        assert one.ended() == 1, one.evidence()
        assert one.output.rstrip().splitlines()[-1] == "first failure: rollout/0: it told the coordinator so"
        assert "rollout.0.3.log" in one.output, "who failed is named"


def workers(one) -> list[psutil.Process]:
    """That live: who was not wanted any more when it was forked may still wait to be reaped."""
    found: list[psutil.Process] = []
    for child in one.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            if child.cmdline()[1:3] == ["-m", "myxa.launch.worker"]:
                found.append(child)
    return found


def test_scaling_down_while_one_is_being_started_leaves_nothing(lively):
    one = lively
    client = client_of(one)
    client.ask("scale", role="rollout", count=4)
    fewer = client.ask("scale", 120, role="rollout", count=2, wait_s=60)
    assert fewer["is_done"], one.evidence()
    assert len(workers(one)) == len(FIRST)


def test_a_restart_that_was_wished_spends_no_budget(strict):
    one = strict
    client = client_of(one)
    for attempt in (1, 2):
        assert client.ask("restart", 120, target="rollout/0", wait_s=60)["is_done"], one.evidence()
        one.until_serving("rollout/0", attempt=attempt)
        assert roster(client)["rollout/0"]["restarts_left"] == 1
    assert (one.dir / "rollout.0.drained").read_text().count("\n") == 2
    assert client.ask("kill", target="rollout/0")["killed"] == ["rollout/0"]
    one.until_serving("rollout/0", attempt=3)
    assert roster(client)["rollout/0"]["restarts_left"] == 0, "a killed one was started again, which counts"
    assert client.ask("restart", 120, target="coordinator", wait_s=60)["is_done"], one.evidence()
    audit = [json.loads(line) for line in (one.dir / "audit.jsonl").read_text().splitlines()]
    assert [(r["verb"], r["result"]) for r in audit] == [
        ("restart", "done"), ("restart", "done"), ("kill", "done"), ("restart", "done"),
    ]  # fmt: skip


def test_a_role_restarts_one_after_another(lively):
    one = lively
    client = client_of(one)
    attempt = attempt_of(client, "rollout/0") + 1
    assert client.ask("restart", 120, target="rollout", wait_s=100)["is_done"], one.evidence()
    back = float((one.dir / "rollout.1.stopped").read_text().split()[-1])
    log = f"rollout.0.{attempt}.log"
    assert f"serves as attempt {attempt}" in one.log(log)
    assert (one.dir / "logs" / log).stat().st_ctime <= back + 1.0, "0 was back before 1 was ended"


def test_stacks_of_a_process_that_answers_and_of_one_that_hangs(lively):
    one = lively
    client = client_of(one)
    (stack,) = client.ask("stack", target="rollout/0")
    assert (stack["how"], stack["pid"]) == ("process", pid_of(client, "rollout/0"))
    assert "task rollout/0: misbehave" in stack["text"], "tasks by name"
    assert "toy_program.py" in stack["text"], "down to the line that waits"
    assert "thread MainThread" in stack["text"]
    one.switch("rollout.1.hang")
    one.until(lambda: client.ask("stack", 60, target="rollout/1")[0]["how"] == "signal", "rollout/1 to hang")
    alive, hung = client.ask("stack", 60, target="rollout")
    assert (alive["how"], hung["how"]) == ("process", "signal")
    assert "toy_program.py" in hung["text"], "the line at which it hangs"
    assert "in _misbehave" in hung["text"]
    (one.dir / "rollout.1.hang").unlink()  # or the next one may hang before it has said that it serves
    attempt = attempt_of(client, "rollout/1")
    os.kill(pid_of(client, "rollout/1"), signal.SIGKILL)
    one.until_serving("rollout/1", attempt=attempt + 1)
    one.until(lambda: roster(client)["rollout/1"]["state"] == "up", "rollout/1 to be up")


def test_a_process_without_torch_has_no_profile(lively):
    client = client_of(lively)
    with pytest.raises(ConfigError, match="does not use torch"):
        client.ask("profile", 90, target="rollout/1", for_s=0.5)


def test_a_late_engine_that_cannot_start_is_given_up_and_the_run_goes_on(strict):
    one = strict
    client = client_of(one)
    client.ask("scale", role="rollout", count=3)
    one.until(lambda: roster(client)["rollout/2"]["state"] == "failed", "rollout/2 to be given up")
    assert "the run continues without it: 2 are left, 1 must be" in one.log("launcher.0.log")


def test_one_that_hangs_is_ended_too(strict):
    one = strict
    client = client_of(one)
    one.switch("rollout.1.hang")
    one.until(lambda: (one.dir / "rollout.1.hangs").exists(), "rollout/1 to hang")
    assert client.ask("drain", 200, target="rollout/1", wait_s=100)["is_done"], one.evidence()
    assert "rollout/1 did not end within 2 s and is killed" in one.log("launcher.0.log")
    assert "rollout/1" not in roster(client), "it does not come again"


def test_one_that_hangs_is_killed_where_its_role_says_so_and_its_log_says_where_it_hung(lively):
    one = lively
    one.switch("buffer.hang")
    one.until(lambda: "buffer hangs (" in one.output and "killed" in one.output, "the kill")
    (one.dir / "buffer.hang").unlink()
    one.until_serving("buffer", attempt=1)
    assert "_misbehave" in one.log("buffer.0.log").rpartition("most recent call first")[2], "the stack of the hang"


def test_logs_are_read_and_followed_over_attempts(lively):
    one = lively
    client = client_of(one)
    before = attempt_of(client, "rollout/1")
    (last,) = client.ask("logs", target="rollout/1", num_lines=1)
    assert f"rollout/1 serves as attempt {before}" in last["lines"][0]
    assert {chunk["name"] for chunk in client.ask("logs", target="all", num_lines=1)} == roster(client).keys()
    (launcher,) = client.ask("logs", target="launcher", grep="rollout/1 is up")
    assert len(launcher["lines"]) == before + 1
    words = [sys.executable, "-m", "myxa", "logs", "rollout/1", "-f", "-n", "1", "--run", str(one.dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as reader:
        got: list[str] = []
        threading.Thread(target=lambda: got.extend(reader.stdout or ()), daemon=True).start()
        one.until(lambda: bool(got), "the last line there was")
        os.kill(one.pid_of("rollout/1", attempt=before), signal.SIGKILL)
        one.until_serving("rollout/1", attempt=before + 1)
        one.until(lambda: any(f"serves as attempt {before + 1}" in line for line in got), "the new attempt's lines")
        assert len(got) == len(set(got)), "no line comes twice"
        reader.send_signal(signal.SIGINT)
        assert reader.wait(20) == 130
    one.until(lambda: roster(client)["rollout/1"]["state"] == "up", "rollout/1 to be up")


def test_drain_ends_one_for_good_and_the_last_one_stays(lively):
    one = lively
    client = client_of(one)
    assert client.ask("drain", 120, target="rollout/0", wait_s=60)["is_done"], one.evidence()
    assert "rollout/0" not in roster(client)
    with pytest.raises(ConfigError, match="too few: a run needs one that generates"):
        client.ask("drain", target="rollout/1")
    with pytest.raises(ConfigError, match="no buffer can join or leave a run"):
        client.ask("drain", target="buffer")
    with pytest.raises(ConfigError, match="did you mean 'rollout/1'"):
        client.ask("drain", target="rollout/0")
    with pytest.raises(ConfigError, match=r"'rolout' is no role.*did you mean \"rollout\""):
        client.ask("scale", role="rolout", count=2)
