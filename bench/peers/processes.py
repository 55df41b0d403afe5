"""Processes under measurement: started, asked, ended; and a proof that none of their descendants is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_S = 60.0
MARK = "MYXA_BENCH_MARK"


@dataclass(frozen=True)
class Figures:
    """One measurement of one mode at one depth."""

    rate: float
    """Calls a second."""
    cpu_us: float
    """User and system time of all processes of the mode, per call."""
    p50_us: float
    """Median round trip; only at one in flight."""


class Child:
    """One process that talks in lines."""

    def __init__(self, mark: str, python: str, script: str, *args: str) -> None:
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
        self._label = " ".join([script, *args[:1]])
        self._process = subprocess.Popen(
            [python, str(HERE / script), *args], env=environment, cwd=HERE, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        while self._line(PATIENCE_S) != "ready":
            continue

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def _line(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise SystemExit(f"{self._label}: no answer for {timeout_s:g} s") from None
        if not line and self._process.poll() is not None:
            raise SystemExit(f"{self._label}: ended with {self._process.returncode}")
        return line

    def measure(self, **command: float) -> Figures:
        """Give a command to a client and wait for its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._line(PATIENCE_S + 4 * command.get("seconds", 0.0))
        while not line.startswith("{"):  # what a library prints
            line = self._line(PATIENCE_S)
        return Figures(**json.loads(line))

    def end(self) -> None:
        """Close its input, which is how it is told; then by force."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Herd:
    """All processes of one benchmark; `with` ends them and whatever they started."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._children: list[Child] = []

    def __enter__(self) -> Herd:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            child.end()
        for pid in self._left():  # after an orderly end there are none
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def start(self, python: str, script: str, *args: str) -> Child:
        child = Child(self._mark, python, script, *args)
        self._children.append(child)
        return child

    def end_all(self) -> list[int]:
        """End everything in order; the processes that are still there after 5 s, by number."""
        for child in reversed(self._children):
            child.end()
        self._children.clear()
        give_up_at = time.monotonic() + 5.0
        while (left := self._left()) and time.monotonic() < give_up_at:
            time.sleep(0.1)
        return left

    def _left(self) -> list[int]:
        wanted = f"{MARK}={self._mark}".encode()
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found
