"""`pytest --workers N`: collect once, then fork N workers that take one file of tests after the other.

Importing all test modules takes longer than most files of tests run, and each process of pytest-xdist does it anew. A
worker here has them when it begins. It runs the tests of one file and asks for the next; its reports go to the first
process, which prints them. A worker that dies fails the test that it was in; the rest of its file goes to a new one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.harness import commands

from myxa.core.process import die_with_parent

WORKER = "PYTEST_XDIST_WORKER"
"""Variable with the name of a worker; pytest-xdist sets it too."""


@dataclass(eq=False)
class Worker:
    """What the first process knows of one. Its reports carry it under the names that pytest's reporters know."""

    name: str
    pid: int
    link: Connection
    todo: deque[int] = field(default_factory=deque)
    """Tests of its file that have not ended, as places in the session's list."""

    @property
    def gateway(self) -> SimpleNamespace:
        return SimpleNamespace(id=self.name)

    @property
    def workerinfo(self) -> dict[str, Any]:
        return {
            "id": self.name, "sysplatform": sys.platform, "version_info": sys.version_info, "executable": sys.executable
        }  # fmt: skip


class WorkerLink:
    """In a worker: tells the first process what its own reporter would print, and what is wanted of it."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link
        self._lock = threading.Lock()

    def tell(self, *words: object) -> None:
        with self._lock:
            self._link.send(words)

    def next_file(self) -> list[int]:
        """Places of its tests; empty: no file is left."""
        self.tell("next")
        return self._link.recv()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.tell("finish", nodeid, location)


class ForkedWorkers:
    """In the first process: the workers and what is left to do. `begin` and `end` are called in each worker."""

    def __init__(self, session: pytest.Session, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._session = session
        self._hook = session.config.hook
        self._begin, self._end = begin, end
        files: dict[Path, deque[int]] = {}
        for place, item in enumerate(session.items):
            files.setdefault(item.path, deque()).append(place)
        self._files = deque(files.values())
        self._workers: dict[Connection, Worker] = {}

    def run(self, count: int) -> None:
        gc.collect()
        gc.freeze()  # workers share what is here
        try:
            for number in range(min(count, len(self._files))):
                self._start(f"gw{number}")
            while self._workers:
                for link in wait(list(self._workers)):
                    assert isinstance(link, Connection)
                    self._hear(self._workers[link])
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGTERM)
                os.waitpid(worker.pid, 0)

    def _start(self, name: str) -> None:
        link, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            link.close()
            for other in self._workers:
                other.close()
            self._be_worker(name, theirs, parent)
        theirs.close()
        self._workers[link] = Worker(name, pid, link)

    def _be_worker(self, name: str, connection: Connection, parent: int) -> NoReturn:
        status = 1
        try:
            die_with_parent(parent)
            os.environ[WORKER] = name
            random.seed()
            np.random.seed()
            config = self._session.config
            _have_own_output_and_folder(config, name)
            link = WorkerLink(config, connection)
            config.pluginmanager.register(link)
            commands.ask_for_server = partial(link.tell, "server")
            self._begin()
            _work(self._session, link)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            self._end()
            os._exit(status)

    def _hear(self, worker: Worker) -> None:
        try:
            kind, *rest = worker.link.recv()
        except EOFError:
            self._ended(worker)
            return
        if kind == "next":
            worker.todo = self._files.popleft() if self._files else deque()
            worker.link.send(list(worker.todo))
        elif kind == "server":
            commands.begin_server(*rest)
        elif kind == "report":
            self._tell(self._hook.pytest_report_from_serializable(config=self._session.config, data=rest[0]), worker)
        else:
            nodeid, location = rest
            worker.todo.popleft()
            self._hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _tell(self, report: Any, worker: Worker) -> None:
        report.node = worker
        self._hook.pytest_runtest_logreport(report=report)

    def _ended(self, worker: Worker) -> None:
        del self._workers[worker.link]
        worker.link.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if status == 0 and not worker.todo:
            return
        item = self._session.items[worker.todo.popleft() if worker.todo else -1]
        said = f"worker {worker.name} ended with {status} in this test, or at the end of all"
        self._tell(pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call"), worker)
        if worker.todo:
            self._files.appendleft(worker.todo)
        if self._files:
            self._start(worker.name)


def _have_own_output_and_folder(config: pytest.Config, name: str) -> None:
    plugins = config.pluginmanager
    for plugin in ("terminalreporter", "terminalprogress"):
        plugins.unregister(name=plugin) if plugins.has_plugin(plugin) else None
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are shared with the other workers
    capture.start_global_capturing()
    folders: Any = config._tmp_path_factory  # pyright: ignore[reportAttributeAccessIssue] - all have one base
    folders._basetemp = folders.getbasetemp() / name
    folders._basetemp.mkdir(exist_ok=True)


def _work(session: pytest.Session, link: WorkerLink) -> None:
    while places := link.next_file():
        items = [session.items[place] for place in places]
        elsewhere = next((item for item in session.items if item.path != items[0].path), None)
        for item, following in zip(items, [*items[1:], elsewhere], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    session._setupstate.teardown_exact(None)
