"""`myxa up` with real processes: restarts, budgets, ends. The actors are toys (`toy_program.py`), all else is real."""

from __future__ import annotations

import itertools
import os
import re
import signal
import tempfile
import time
from pathlib import Path

FIRST = ("monitor", "buffer", "coordinator", "trainer/0", "rollout/0")


def runtime_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("myxa-*"))


def test_actors_that_end_are_restarted_and_a_finished_run_leaves_only_its_files(tmp_path: Path, run):
    with run(tmp_path, "up", "--set", "roles.rollout.count=2", "--set", "roles.trainer.count=2") as one:
        one.until_serving(*FIRST, "rollout/1", "trainer/1")
        os.kill(one.pid_of("rollout/1"), signal.SIGKILL)
        one.switch("rollout.0.fail-now")
        one.until(
            lambda: one.log("rollout.0.0.log").rstrip().endswith("myxa: failed when it was told to"), "the message"
        )
        (one.dir / "rollout.0.fail-now").unlink()
        one.until_serving("rollout/1", "rollout/0", attempt=1)
        assert one.epoch_of("rollout/1", 1) == one.epoch_of("rollout/1", 0) + 1
        assert (one.dir / "logs/latest/rollout.1.log").readlink() == Path("../rollout.1.1.log")
        assert one.log("trainer.0.1.log") == "", "the gang went on"
        os.kill(one.pid_of("trainer/1"), signal.SIGKILL)
        one.until_serving("trainer/0", "trainer/1", attempt=1)
        assert one.log("rollout.0.2.log") == "", "the rollouts went on"
        children = one.children()
        one.switch("finish")
        assert one.ended() == 0, one.evidence()
        one.until_gone(children)
        assert "finished after 3 of 100 steps" in one.output
        assert (one.dir / "config.toml").exists() and (one.dir / "report.html").exists()
        order = ["rollout.0", "trainer.0", "coordinator", "buffer", "monitor"]
        stops = [float((one.dir / f"{name}.stopped").read_text().split()[-1]) for name in order]
        assert stops == sorted(stops), "the last started role ends first"
        assert runtime_folders() == []
        assert re.search(r"rollout/1: attempt 1 in \d\.\d s \(rollout/1 ended with signal SIGKILL\)", one.output)
        assert re.search(r"trainer/0, trainer/1: attempt 1 in \d\.\d s", one.output)
        for attempt in range(2):
            check_torchruns_contract(one, attempt)


def check_torchruns_contract(one, attempt: int) -> None:
    logs = [one.log(f"trainer.{rank}.{attempt}.log") for rank in range(2)]
    assert all(f"'TORCHELASTIC_RESTART_COUNT': '{attempt}'" in log for log in logs)
    ports = [re.findall(r"'MASTER_PORT': '(\d+)'", log) for log in logs]
    assert ports[0] == ports[1]


def test_a_spent_budget_ends_the_run_and_the_cause_comes_last(tmp_path: Path, run):
    with run(tmp_path, "up", "--quiet", "--set", "roles.rollout.max_restarts=1", toy="rollout.0.crash") as one:
        assert one.ended() == 4, one.evidence()
        assert re.match("toy: failed|run directory: |first failure: ", one.output), "quiet: only how it ended"
        lines = one.output.rstrip().splitlines()
        assert "first failure: rollout/0" in " ".join(lines[-2:])
        assert "its budget of 1 restarts is spent" in " ".join(lines[-2:])
        assert "myxa: this engine is made of glass -- do not drop it" in lines
        assert any("end of" in line and "rollout.0.1.log" in line for line in lines), "the last attempt's log"
        assert one.log("rollout.0.2.log") == ""


SLOW_SERVER = """
import sys, time
if "myxa.launch.nodes.fork_server" in sys.orig_argv:
    open("importing", "w").close()
    time.sleep(30)
"""


def test_ctrl_c_while_actors_wait_for_imports_ends_the_run(tmp_path: Path, run):
    """Nobody has a process yet: there is nothing to wait for, least of all the imports."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SLOW_SERVER)
    with run(tmp_path, "up", site=site) as one:
        one.until((tmp_path / "importing").exists, "the server's imports")
        one.until(lambda: bool(one.log("launcher.0.log")), "the launcher's log")
        time.sleep(0.5)  # by then the first start has been asked for
        begun_s = time.monotonic()
        one.signal(signal.SIGINT)
        assert one.ended() == 130, one.evidence()
        assert time.monotonic() - begun_s < 15, "it waited for the imports, or for nobody"


def test_neither_a_coordinator_nor_a_worker_that_hangs_at_the_end_is_waited_for_for_ever(tmp_path: Path, run):
    flags = ("--finish-timeout", "1", "--stop-timeout", "1")
    with run(tmp_path, "up", *flags, toy="coordinator.deaf rollout.0.hang-at-stop") as one:
        one.until_serving(*FIRST)
        children = one.children()
        one.signal(signal.SIGTERM)
        assert one.ended() == 143, one.evidence()
        one.until_gone(children)
        assert (one.dir / "coordinator.asked").read_text() == "SIGTERM\n"
        assert "no orderly end within 1 s" in one.output
        assert "rollout/0 did not end within 1 s and is killed" in one.output
        assert (one.dir / "monitor.stopped").exists(), "the others end well"


def test_a_schedulers_signal_to_every_process_of_a_job_ends_the_run_in_order(tmp_path: Path, run):
    """What Slurm (scancel, --signal=USR1@90) and systemd do: the launcher ends the run, its actors are there for that."""
    with run(tmp_path, "up") as one:
        one.until_serving(*FIRST)
        children = one.children()
        for name, number in itertools.product(FIRST, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)):
            os.kill(one.pid_of(name), number)
        time.sleep(0.5)  # an actor that ended now would be started again
        one.signal(signal.SIGUSR1)
        assert one.ended() == 0, one.evidence()
        one.until_gone(children)
        assert not [path for path in (one.dir / "logs").glob("*.log") if path.name.split(".")[-2] == "1"]
