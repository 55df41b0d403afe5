"""A trainer rank that dies or stands still costs time and nothing else: the gang comes back as one, engines go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from tests.harness.commands import run as run_command
from tests.harness.run_job import is_alive, worker_pids
from tests.harness.waiting import wait_until
from tests.survival.lives import Lives, gang_run

pytestmark = pytest.mark.timeout(300)


def sockets_in(folder: Path) -> set[str]:
    """Those of processes that live; each names its file by its number."""
    found = {path for path in folder.rglob("*") if path.is_socket()}
    gone = {path for path in found if (pid := path.name.partition("-")[0]).isdigit() and not is_alive([int(pid)])}
    return {str(path.relative_to(folder)) for path in found - gone}


def remove_and_wait(folder: Path) -> None:
    """As a cleaner of /tmp does; then everybody listens again."""
    before = sockets_in(folder)
    gone = folder.rename(folder.with_suffix(".gone"))  # at once: who listens again writes into a folder that is there
    shutil.rmtree(gone)
    wait_until(lambda: before <= sockets_in(folder), "all sockets")
    assert folder.stat().st_mode & 0o777 == 0o700


def state(site: Path, actor: str) -> tuple[str, int]:
    """Of an actor, as `myxa ps` finds the run and tells."""
    done = run_command("ps", "--json", folder=site, timeout_s=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    rows = told if isinstance(told, list) else told["actors"]
    found = next(row for row in rows if row["name"] == actor)
    return found["state"], found["attempt"]


def is_up_again(site: Path, actor: str, attempt: int) -> bool:
    return state(site, actor) == ("up", attempt + 1)


def test_with_a_checkpoint_each_step_a_death_costs_a_step_and_a_run_whose_folder_goes_trains_each_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    knobs = ("trainer.checkpoint_every=1", "roles.buffer.max_restarts=1")
    with gang_run(tmp_path, *knobs, patience_s=1.5, num_prompts=112) as run:
        run.until_version(3)
        run.check_sockets()
        os.kill(run.rank(0), signal.SIGSTOP)
        made = run.version()
        at = time.time()
        os.kill(run.rank(1), signal.SIGKILL)
        wait_until(lambda: bool(run.told("trainer-goes-back")), "the gang's next attempt")
        print(f"recovered in {run.recovery_s(time.time()) + time.time() - at:.1f} s")
        runtime = the_folder_goes_and_the_buffer_dies(tmp_path, run)
        assert run.wait() == 0
        run.prove()
        (back,) = run.told("trainer-goes-back")
        version = int(back.split()[2].rstrip(","))
        assert version >= made - 1
        made_again = [step["step"] for step in run.steps()].count(version)
        assert made_again <= 1, "what is known is not trained again; its metrics may die with its rank"
    assert not runtime.exists(), "it goes with the launcher"


def the_folder_goes_and_the_buffer_dies(site: Path, run: Lives) -> Path:
    """E01: a cleaner removes the folder of the sockets. The run is found again, and its actors may still die."""
    folder = Path(json.loads((run.run_dir / "control.json").read_text())["control"]).parent
    remove_and_wait(folder)
    attempt = state(site, "buffer")[1]
    (pid,) = worker_pids(run.launcher.pid, "buffer")
    os.kill(pid, signal.SIGKILL)
    wait_until(partial(is_up_again, site, "buffer", attempt), "another buffer")
    return folder


@pytest.mark.soak
def test_the_trainer_dies_where_it_shares_its_device_in_turns(tmp_path: Path):
    with gang_run(
        tmp_path, "roles.trainer.count=1", "roles.rollout.count=1", 'memory.share="switch"', "memory.capacity_mb=9",
        "memory.switch_s=40", "engine.context_length=64", "engine.max_running=4", "trainer.checkpoint_every=2",
    ) as run:  # fmt: skip
        run.until_version(5)
        engines = run.engines()
        at = time.time()
        os.kill(run.rank(0), signal.SIGKILL)
        print(f"recovered in {run.recovery_s(at):.1f} s")
        assert run.engines() == engines
        assert run.wait() == 0
        run.prove()
