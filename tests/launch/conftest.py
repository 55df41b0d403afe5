"""Launchers as real processes, for the launcher's tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.harness.commands import Command

HERE = Path(__file__).parent
WAIT_S = 60.0

RUN_TOML = """
[run]
name = "toy"
[model]
path = "model"
[data]
train = "data.jsonl"
"""


class Run:
    family: Sequence[psutil.Process] = ()
    """Its processes, before it was told to end."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], *, toy: str = "", site: Path | None = None, is_plain: bool = False
    ) -> None:
        """`is_plain`: its fork servers are interpreters of their own, as with `site` (a folder on their path)."""
        self.folder = folder
        self.runs = folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.toml"
        if not file.exists():
            file.write_text(RUN_TOML)
        path = os.pathsep.join(map(str, [HERE] if site is None else [HERE, site]))
        env = dict(os.environ) | {"PYTHONPATH": path, "TOY": toy, "COLUMNS": "200"}
        verb, *rest = arguments
        words = [verb, str(file), *rest]
        if "--program" not in rest:
            words += ["--program", "toy_program:build"]
        self._output = (folder / "output").open("w+")
        is_plain = is_plain or site is not None
        self.process = Command(words, folder, env=env, log=self._output, has_stand_by=not is_plain)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def dir(self) -> Path:
        return (self.runs / "latest").resolve()

    def log(self, name: str) -> str:
        path = self.dir / "logs" / name
        return path.read_text() if path.exists() else ""

    def switch(self, name: str) -> None:
        (self.dir / name).touch()

    def until(self, is_so, what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {WAIT_S} s for {what}\n{self.evidence()}")
            if self.process.poll() is not None and not is_so():
                raise AssertionError(f"the launcher ended ({self.process.returncode}) before {what}\n{self.evidence()}")
            time.sleep(0.02)

    def evidence(self) -> str:
        logs = "".join(f"\n== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.dir.glob("logs/*.log")))
        return f"== output\n{self.output}{logs}"

    def until_serving(self, *names: str, attempt: int = 0) -> None:
        for name in names:
            log = f"{name.replace('/', '.')}.{attempt}.log"
            self.until(lambda log=log: "serves as attempt" in self.log(log), f"{name} attempt {attempt} to serve")

    def pid_of(self, name: str, attempt: int = 0) -> int:
        match = re.search(r"pid (\d+) epoch", self.log(f"{name.replace('/', '.')}.{attempt}.log"))
        assert match is not None, self.evidence()
        return int(match[1])

    def epoch_of(self, name: str, attempt: int = 0) -> int:
        match = re.search(r"pid \d+ epoch (\d+)", self.log(f"{name.replace('/', '.')}.{attempt}.log"))
        assert match is not None, self.evidence()
        return int(match[1])

    def children(self) -> list[psutil.Process]:
        return self.process.below()

    def signal(self, sig: signal.Signals) -> None:
        self.process.send_signal(sig)

    @staticmethod
    def until_gone(processes: Sequence[psutil.Process]) -> None:
        deadline = time.monotonic() + WAIT_S
        for process in processes:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"{process} is still there"
                time.sleep(0.02)

    def ended(self) -> int:
        try:
            return self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end within {WAIT_S} s\n{self.evidence()}") from None

    def close(self) -> None:
        left = self.children() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.wait(WAIT_S)
        self._output.close()


@contextlib.contextmanager
def launched(folder: Path, *arguments: str, **how: Any) -> Iterator[Run]:
    one = Run(folder, arguments, **how)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def run():
    """`with run(folder, "up", ...) as one:` starts `myxa up`; killed at the end if it still runs."""
    return launched
