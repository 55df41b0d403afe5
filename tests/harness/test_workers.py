"""`pytest --workers`: a session that ends early ends what its interrupted tests have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.harness.waiting import is_running, wait_until

ROOT = Path(__file__).parents[2]
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib")


def env_of(folder: Path) -> dict[str, str]:
    """Of a session whose files are there: plugins, which take most of its start, have no part in it."""
    own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **own}


FILES = {
    "conftest.py": "from tests.harness.workers import pytest_addoption, pytest_runtestloop",
    "test_waits.py": """
        import os, pathlib, subprocess, sys, time
        import pytest

        FOLDER = pathlib.Path(__file__).parent

        @pytest.fixture(scope="module")
        def helper():
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            with subprocess.Popen(command, start_new_session=True) as process:
                yield process.pid
                process.kill()

        def test_that_waits(helper):
            (FOLDER / "draft").write_text(f"{os.getpid()} {helper}")
            (FOLDER / "draft").rename(FOLDER / "pids")
            time.sleep(600)
    """,
    "test_fails.py": """
        import pathlib, time

        def test_that_fails():
            while not (pathlib.Path(__file__).parent / "pids").exists():
                time.sleep(0.01)
            (pathlib.Path(__file__).parent / "fail").rename("gone")
    """,
}


FOLDERS = {
    "conftest.py": """
        import pytest
        from tests.harness.workers import pytest_addoption, pytest_runtestloop

        @pytest.fixture(scope="session")
        def lives():
            lives = []
            yield lives
            assert lives == [["a"], ["b"], ["c"]], lives

        @pytest.fixture(scope="module")
        def life(lives, request):
            yield lives
            lives.append([request.path.parent.name])
    """,
    **{f"{name}/test_{name}.py": "def test_one(life): pass\ndef test_two(life): pass" for name in "abc"},
}


def test_a_file_s_fixtures_end_with_it_and_those_of_the_session_with_all(tmp_path: Path) -> None:
    for name, text in FOLDERS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    words = [*PYTEST, "--workers", "1", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=env_of(tmp_path))
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["-x", "SIGINT", "SIGKILL"])
def test_it_leaves_no_process(how: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        if how == "-x" or name != "test_fails.py":
            (tmp_path / name).write_text(textwrap.dedent(text))
    session = subprocess.Popen(
        [*PYTEST, "-x", "--workers", "2", str(tmp_path)], cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=env_of(tmp_path),
    )  # fmt: skip
    pids = tmp_path / "pids"
    try:
        wait_until(pids.exists, "a test that waits")
        if how != "-x":
            session.send_signal(signal.Signals[how])
        assert session.wait(60) == {"-x": 1, "SIGINT": 2, "SIGKILL": -9}[how]
        wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()), "the end of all")
    finally:
        session.kill()
        session.wait()
