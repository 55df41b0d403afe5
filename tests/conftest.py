"""Leak checks over the whole suite: what a test module started, it must also have ended.

After each module: no child process, no thread that would keep the process alive, no shared-memory segment, no
run-time folder is left. After the session: no process that descends from any test, wherever it was re-parented to.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from tests.harness.commands import KEPT, close_servers, left_processes
from tests.harness.own_segments import own_segments
from tests.harness.pending_tasks import pending_tasks
from tests.harness.workers import pytest_addoption, pytest_collection, pytest_runtestloop  # noqa: F401  # its hooks

MARK = "MYXA_TEST_SESSION"
PATIENCE_S = 10.0
BENCH = Path(__file__).resolve().parents[1] / "bench"
GPU = BENCH / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    # `make test` tries the same examples every time, so that it says of a change what the change did; `make soak` draws
    # new ones.
    slow_machine = [HealthCheck.too_slow]  # how fast examples are drawn and tried says something of the machine only
    settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=slow_machine)
    settings.register_profile("fresh", deadline=None, suppress_health_check=slow_machine)
    settings.load_profile("fresh" if config.getoption("-m") == "soak" else "steady")
    # Hundreds of interpreters are started, some by us and most by what we start: each would compile the tree anew where
    # Python was told to keep no bytecode, as containers do.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # What a shell's `&` and `nohup` ignore would be ignored by all that is started here, which is asked to end by it.
    for sig in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(sig) is signal.SIG_IGN:
            signal.signal(sig, lambda *_: None)
    if not is_xdist_worker():
        os.environ[MARK] = uuid.uuid4().hex  # inherited by every process that a test starts
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub
    # Run-time folders of this process only; pytest's own folders stay where they are looked for after a failure.
    folder = tempfile.mkdtemp(prefix="t-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    os.environ["TMPDIR"] = tempfile.tempdir = folder


LONGEST_FIRST = (
    "launch/test_slurm", "backends/test_megatron_steps", "survival/test_kill_matrix", "survival/test_agent_deaths",
    "integration/test_bad_input", "survival", "backends", "integration", "knobs", "gateway", "control", "environments",
    "simulation", "engines", "monitor", "launch",
)  # fmt: skip
"""Files and folders of runs, those that take longest first: no worker has one left when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        names = folder, f"{folder}/{item.path.stem}"
        return next((at for at, name in enumerate(LONGEST_FIRST) if name in names), len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """A test that hung shows where its tasks stand: the stacks of its threads all end in the loop's `select`."""
    outcome = yield
    if (
        call.excinfo is not None
        and call.excinfo.errisinstance(pytest.fail.Exception)
        and "Timeout" in str(call.excinfo)
    ):
        outcome.get_result().sections.append(("pending tasks", pending_tasks()))


def is_xdist_worker() -> bool:
    """One of several processes that share the files of tests among them (`make test`)."""
    return "PYTEST_XDIST_WORKER" in os.environ


def left_threads() -> set[str]:
    return {f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon}


def left_files() -> set[str]:
    segments = {f"segment /dev/shm/{name}" for name in own_segments()}
    return segments | {f"{tempfile.gettempdir()}/{name}" for name in _names(Path(tempfile.gettempdir()))}


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


def leaks() -> set[str]:
    return left_processes() | left_threads() | left_files()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    from myxa.core.files import remove_dead_scratch

    gc.collect()
    gc.freeze()  # what is here stays: each collection by a test would look through thousands of modules' objects again
    gc.enable()  # pytest_collection does without
    before = leaks()
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := leaks() - before) and time.monotonic() < deadline:
        remove_dead_scratch()  # as the next launcher does after one that was killed
        gc.collect()
        time.sleep(0.05)
    assert not left, f"{request.node.name} left behind:\n" + "\n".join(sorted(left))


@pytest.hookimpl(trylast=True)  # after the workers have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    close_servers()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    if is_xdist_worker():
        return
    mark = f"{MARK}={os.environ[MARK]}".encode()
    orphans: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        is_kept = any(name in line for name in KEPT)
        if mark in environ.split(b"\0") and int(folder.name) != os.getpid() and not is_kept:
            orphans.append(f"process {folder.name}: {line[:200]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(folder.name), signal.SIGKILL)
    if orphans:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line("\nprocesses outlived the tests:\n" + "\n".join(orphans), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def null_device() -> None:
    """What is read from it is empty. In a container that was made without it, it is a file of whatever was thrown away."""
    if not stat.S_ISCHR(os.stat(os.devnull).st_mode):
        pytest.skip(f"{os.devnull} of this machine is no device: processes without input read what others threw away")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Modules of the GPU benchmark, which find each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(str(GPU))
    for path in GPU.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return importlib.import_module


@pytest.fixture(scope="session")
def planting() -> Iterator[ModuleType]:
    """`bench/planted_control.py`."""
    sys.path.append(str(BENCH))
    import planted_control  # pyright: ignore[reportMissingImports] - found by the line above

    yield planted_control
    sys.path.remove(str(BENCH))


@pytest.fixture
def seat(planting: ModuleType, tmp_path: Path):
    """A short planted run and the state behind its verbs."""
    return planting.plant_seat(tmp_path, num_steps=12)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says aloud that no page was looked at."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "NO BROWSER" in str(report.longrepr)]
    if skipped:
        words = f"NO BROWSER: {len(skipped)} tests of pages did not run (Debian: apt-get install chromium)"
        terminalreporter.write_line(words, red=True, bold=True)
