"""`pytest --workers N`: one process collects the tests, then N forks of it take one file of tests after the other.

Workers of pytest-xdist would each import and collect everything, which takes half a minute of the processor apiece. A
worker says which test it begins, what came of it, and that it wants another file; all as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from tests.harness import commands
from tests.harness.own_segments import WORKER

from myxa.core.process import die_with_parent

NO_FILE = -1
STOP_S = 60.0
"""For interrupted tests to end what they have started."""
LAZY = ("openai.resources.responses", "sympy.physics.units", "math_verify", "transformers.modeling_utils")
"""Modules that libraries import when they are first used, up to two seconds each."""
TESTS = Path(__file__).resolve().parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that share the files of tests")


class Worker:
    """In the fork: runs files of tests until there are none left."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]], link: Connection) -> None:
        self._session, self._files, self._link = session, files, link
        self._config = session.config

    def _say(self, kind: str, *words: object) -> None:
        self._link.send_bytes(json.dumps([kind, *words]).encode())

    def run(self, name: str) -> None:
        os.environ[WORKER] = name
        folder = os.path.join(tempfile.gettempdir(), name)  # removed with the first process's
        os.mkdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        manager = self._config.pluginmanager
        capture: Any = manager.getplugin("capturemanager")
        capture.stop_global_capturing()  # into a file that all forks share
        capture.start_global_capturing()
        capture.suspend_global_capture()
        reporter: Any = manager.getplugin("terminalreporter")
        with open(os.devnull, "w") as nothing:
            reporter._tw._file = nothing
            manager.register(self)
            commands.begin = lambda server: self._say("begin", server)
            try:
                self._run_files()
            finally:  # what an interrupted test has started
                self._session._setupstate.teardown_exact(None)

    def _run_files(self) -> None:
        while (number := self._ask()) != NO_FILE:
            items = self._files[number]
            for item, after in zip(items, [*items[1:], self._session], strict=True):  # its fixtures stay
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    def _ask(self) -> int:
        """The next file's number."""
        self._say("next")
        return int(self._link.recv_bytes())

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._say("start", nodeid, location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._say("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class Crew:
    """In the process that collected: its workers, and what they say."""

    def __init__(self, session: pytest.Session, num_workers: int) -> None:
        self._session, self._hook = session, session.config.hook
        self._files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
        self._todo = deque(range(len(self._files)))
        self._pids: dict[Connection, int] = {}
        self._begun: dict[Connection, tuple[str, Any]] = {}
        """The test that a worker is at, and its place."""
        self._from_end: set[Connection] = set()
        self._num_started = 0
        for _ in range(min(num_workers, len(self._files))):
            self._start()

    def _start(self) -> None:
        name = f"w{self._num_started}"
        self._num_started += 1
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setpgid(0, 0)  # Ctrl-C is for the parent, which interrupts each once
                die_with_parent(parent, signal.SIGINT)
                for link in (ours, *self._pids):
                    link.close()
                Worker(self._session, self._files, theirs).run(name)
                status = 0
            except (KeyboardInterrupt, EOFError, BrokenPipeError):
                pass  # the others are told, too; the process that collected is gone
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        theirs.close()
        self._pids[ours] = pid
        if self._num_started % 2 == 0:
            self._from_end.add(ours)

    def run(self) -> None:
        """Until all have ended, or one test too many has failed."""
        try:
            while self._pids:
                for link in wait(list(self._pids)):
                    assert isinstance(link, Connection)
                    self._hear(link)
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._stop()

    def _stop(self) -> None:
        """Interrupt the tests that run: they end what they have started."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + STOP_S
        while self._pids and (heard := wait(list(self._pids), max(0.0, deadline - time.monotonic()))):
            for link in heard:
                assert isinstance(link, Connection)
                try:
                    kind, *_ = json.loads(link.recv_bytes())
                    if kind == "next":
                        link.send_bytes(str(NO_FILE).encode())
                    elif kind == "start":  # the test before it took the interrupt for its own
                        os.kill(self._pids[link], signal.SIGINT)
                except (EOFError, OSError):
                    self._end(link)
        for link, pid in list(self._pids.items()):
            os.kill(pid, signal.SIGKILL)
            self._end(link)

    def _hear(self, link: Connection) -> None:
        try:
            kind, *words = json.loads(link.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._on_end(link)
            return
        if kind == "next":
            link.send_bytes(str(self._next(link)).encode())
        elif kind == "start":
            self._begun[link] = (words[0], words[1])
        elif kind == "begin":
            commands.begin(*words)
        else:
            self._report(words[0])

    def _next(self, link: Connection) -> int:
        """Every second worker begins at the end: beside runs, which wait most of the time, tests compute that do not."""
        if not self._todo:
            return NO_FILE
        return self._todo.pop() if link in self._from_end else self._todo.popleft()

    def _report(self, data: dict[str, Any]) -> None:
        if isinstance(data["longrepr"], list):  # why it was skipped
            data["longrepr"] = tuple(data["longrepr"])
        report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
        self._hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            self._hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)

    def _on_end(self, link: Connection) -> None:
        status = self._end(link)
        if not status:
            return
        nodeid, location = self._begun.get(link, ("", ("", 0, "")))
        longrepr = f"its worker ended with status {status}; the rest of the file was not run"
        report = pytest.TestReport(nodeid, tuple(location), {}, "failed", longrepr, "call")
        self._hook.pytest_runtest_logreport(report=report)
        if self._todo:
            self._start()

    def _end(self, link: Connection) -> int:
        """Its exit status."""
        link.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pids.pop(link), 0)[1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Servers that the whole suite needs import while this process does; and what most workers would import."""
    gc.disable()  # each collection would look through all that is imported
    if session.config.getoption("workers") and TESTS in (Path(path).resolve() for path in session.config.args):
        for server in (commands.COMMANDS, commands.MEGATRON):
            commands.begin(server)
        with warnings.catch_warnings(action="ignore"):
            for name in LAZY:
                importlib.import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    num_workers = session.config.getoption("workers")
    if not num_workers or session.testsfailed or session.config.option.collectonly:
        return None
    gc.collect()
    gc.freeze()  # a collection by a worker would write to every page that it shares
    Crew(session, num_workers).run()
    return True
