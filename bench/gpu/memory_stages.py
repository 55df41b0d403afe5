"""Stages of the memory benchmark: child processes that measure and answer in lines of JSON.

Every stage is a process of its own, so that what it leaves on a device is known to leave with it, and so that a library
that ends its process on an error (torch-memory-saver does) ends a stage and not the report. A stage may be told to go
on (`await_go`), which lets several of them begin at the same moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

MARK = "STAGE "
READY = "ready"
LAST_CHARACTERS = 1500
END_S = 2.0


class StageFailedError(RuntimeError):
    """A stage did not answer; the text holds the end of its log."""


# -- the child's side --------------------------------------------------------------------------------------------------


def answer(kind: str, **values: Any) -> None:
    """One line for the parent."""
    print(f"{MARK}{json.dumps({'kind': kind, **values})}", flush=True)


def await_go() -> str:
    """Tell that everything is set up and wait for the parent; what it said. Ends the process when the parent did."""
    answer(READY)
    line = sys.stdin.readline()
    if not line:
        os._exit(1)
    return line.strip()


def leave(**values: Any) -> NoReturn:
    """The stage's figures; then out at once: destructors of libraries that hold device memory have ended processes in
    worse ways."""
    answer("result", **values)
    sys.stdout.flush()
    os._exit(0)


# -- the parent's side -------------------------------------------------------------------------------------------------


class Stage:
    """One child process."""

    def __init__(
        self, name: str, script: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.started_s = time.monotonic()
        variables = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **(env or {})}
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-u", script, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=variables,
            )  # fmt: skip
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self.process.pid

    def next(self, limit_s: float) -> dict[str, Any]:
        """Its next answer. Raises StageFailedError after `limit_s` or when it ended."""
        give_up_at = time.monotonic() + limit_s
        while True:
            line = self._line()
            if line is not None:
                if line.startswith(MARK):
                    return json.loads(line[len(MARK) :])
                continue
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise StageFailedError(f"{self.name}: no answer within {limit_s:.0f} s\n{self.last_words()}")
            if not self._selector.select(left_s):
                continue
            assert self.process.stdout is not None
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                status = self.process.wait()
                raise StageFailedError(f"{self.name}: ended with {status} before it answered\n{self.last_words()}")
            self._buffer += data

    def expect(self, kind: str, limit_s: float) -> dict[str, Any]:
        """The next answer of this kind; others before it are dropped."""
        give_up_at = time.monotonic() + limit_s
        while True:
            found = self.next(max(give_up_at - time.monotonic(), 0.0))
            if found["kind"] == kind:
                return found

    def go(self, text: str = "go") -> None:
        """What `await_go` returns."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def stop(self) -> None:
        """End it, if it has not ended; never raises."""
        self._selector.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        for end in (lambda: None, self.process.terminate, self.process.kill):
            with contextlib.suppress(OSError):
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
                return

    def last_words(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace")[-LAST_CHARACTERS:]
        return "(no log)"

    def _line(self) -> str | None:
        head, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        return head.decode(errors="replace")


def run_stage(name: str, script: str, arguments: Sequence[str], *, log: Path, limit_s: float) -> dict[str, Any]:
    """One stage from begin to end; its result. Raises StageFailedError."""
    stage = Stage(name, script, arguments, log=log)
    try:
        return stage.expect("result", limit_s)
    finally:
        stage.stop()


def together(
    stages: Sequence[Stage], limit_s: float, *, begun: Callable[[], object] | None = None
) -> list[dict[str, Any]]:
    """Let stages that wait in `await_go` begin at the same moment; their results. They are not stopped here."""
    give_up_at = time.monotonic() + limit_s
    for stage in stages:
        stage.expect(READY, max(give_up_at - time.monotonic(), 0.0))
    for stage in stages:
        stage.go()
    if begun is not None:
        begun()
    return [stage.expect("result", max(give_up_at - time.monotonic(), 0.0)) for stage in stages]
