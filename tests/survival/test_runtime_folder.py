"""The folder of the sockets goes under a living run: the shell that is to remove it at the end loses its `cat`, or somebody
tidies up. The run goes on, is found again, and its actors may still die: every prompt is trained exactly once."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.harness.commands import run as run_command
from tests.harness.run_job import is_alive, worker_pids
from tests.harness.waiting import wait_until
from tests.survival.gang_run import gang_run

from myxa.core.errors import LaunchError
from myxa.launch import runtime_dir
from myxa.launch.runtime_dir import RuntimeDir, ram_folder
from myxa.transport.address import make_private


def janitors_cat(launcher: int) -> psutil.Process:
    shell = next(child for child in psutil.Process(launcher).children() if child.name() == "sh")
    return next(child for child in shell.children() if child.name() == "cat")


def sockets_in(folder: Path) -> set[str]:
    """Those of processes that live; each names its file by its number."""
    found = {path for path in folder.rglob("*") if path.is_socket()}
    gone = {path for path in found if (pid := path.name.partition("-")[0]).isdigit() and not is_alive([int(pid)])}
    return {str(path.relative_to(folder)) for path in found - gone}


def remove_and_wait(folder: Path) -> None:
    """As a cleaner of /tmp does; then everybody listens again."""
    before = sockets_in(folder)
    shutil.rmtree(folder)
    shutil.rmtree(ram_folder(folder), ignore_errors=True)
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


@pytest.mark.timeout(300)
def test_e01_a_run_whose_folder_goes_is_found_and_trains_each_prompt_once(tmp_path: Path) -> None:
    with gang_run(tmp_path, "roles.buffer.max_restarts=1", patience_s=1.5) as run:
        run.until_version(1)
        note = json.loads((run.run_dir / "control.json").read_text())
        folder = Path(note["control"]).parent
        cat = janitors_cat(run.launcher.pid)
        cat.kill()
        wait_until(lambda: not cat.is_running() or cat.status() == psutil.STATUS_ZOMBIE, "the end of cat")
        remove_and_wait(folder)
        attempt = state(tmp_path, "buffer")[1]
        (pid,) = worker_pids(run.launcher.pid, "buffer")
        os.kill(pid, signal.SIGKILL)
        wait_until(partial(is_up_again, tmp_path, "buffer", attempt), "another buffer")
        run.end()
        run.prove()
    assert not folder.exists(), "it goes with the launcher"


def test_e01_the_shell_outlives_its_cat_and_removes_the_folder_at_the_end() -> None:
    runtime = RuntimeDir()
    try:
        shell = psutil.Process(runtime._janitor.pid)
        wait_until(lambda: any(child.name() == "cat" for child in shell.children()), "its cat")
        for _ in range(2):
            cat = next(child for child in shell.children() if child.name() == "cat")
            cat.kill()
            cat.wait(5)
            wait_until(lambda: any(child.name() == "cat" for child in shell.children()), "the next cat")
        assert runtime.path.is_dir()
    finally:
        runtime.close()
    assert not runtime.path.exists()


def test_e01_a_folder_that_is_gone_is_made_again_and_is_still_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "x"
    base.mkdir()
    monkeypatch.setattr(runtime_dir, "short_base", lambda: str(base))
    with RuntimeDir() as runtime:
        assert not runtime.restore()
        shutil.rmtree(base)
        assert runtime.restore()
        assert runtime.path.stat().st_mode & 0o777 == 0o700
        with RuntimeDir() as other:  # a launcher that starts removes what nobody holds
            assert runtime.path.is_dir()
            assert other.path != runtime.path
    assert not runtime.path.exists()


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(LaunchError, match="not a directory that only we can enter"):
        make_private(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="exists"):
        make_private(link)


def test_e01_a_folder_that_goes_at_logout_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = tmp_path / "user" / "1000"
    login.mkdir(parents=True)
    monkeypatch.setattr(runtime_dir, "_LOGIN", login.parent)
    monkeypatch.setattr(runtime_dir, "_LINGER", tmp_path / "linger")
    monkeypatch.setattr(runtime_dir, "SOCKET_NAME_ROOM", 0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert runtime_dir.short_base() != str(login)
    import pwd

    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert runtime_dir.short_base() == str(login)
