"""A run in one life after another: killed as a whole, or rank by rank, and gone on with; and what its ledger says then.

The data is gone through once, so that the prompts that are trained on are known beforehand: each of them, once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.harness.commands import COMMANDS, MEGATRON, Command
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import Job, events, make_job, metrics, worker_pids
from tests.harness.waiting import wait_until

NUM_PROMPTS, BATCH = 64, 4
FLAGS = (
    "data.max_passes=1", "run.num_steps=0", "trainer.checkpoint_every=2", "trainer.export_at_end=false",
)  # fmt: skip


def check_each_once(run_dir: Path, num_prompts: int = NUM_PROMPTS) -> int:
    """Every prompt was trained exactly once in the lineage that the run ended with; how often training was undone."""
    found = audit_ledger(run_dir / "ledger.sqlite")
    assert (found.problems, found.num_waiting) == ((), 0)
    assert found.trained == Counter(range(num_prompts)), "the multiset of an undisturbed run"
    return found.num_rewound


@dataclass
class Lives:
    """One run through its lives, of which `begin` makes the first."""

    job: Job
    num_prompts: int = NUM_PROMPTS
    overrides: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its commands, beside ours."""
    server: str = COMMANDS
    """What its commands are forked from."""
    said: list[str] = field(default_factory=list)
    """What each life printed."""
    _launcher: Command | None = None
    _run_dir: Path | None = None

    @property
    def launcher(self) -> Command:
        assert self._launcher is not None
        return self._launcher

    @property
    def run_dir(self) -> Path:
        assert self._run_dir is not None
        return self._run_dir

    def begin(self) -> None:
        """The first life; returns once its directory is there."""
        data = f'data.train="data/prompts.jsonl@[0:{self.num_prompts}]"'
        self._launcher = self._command(*self.job.words(data, *FLAGS, *self.overrides))
        wait_until(lambda: self._has_begun(), "the run's directory")
        self._run_dir = self.job.run_dir()

    def _has_begun(self) -> bool:
        assert self.launcher.poll() is None, self.launcher.communicate()[0]
        return self.job.has("config.toml")

    def resume(self, *arguments: str) -> None:
        self._launcher = self._command("resume", str(self.run_dir), "--quiet", *arguments)

    def _command(self, *words: str) -> Command:
        return Command(words, self.job.folder, env={**os.environ, **self.env}, server=self.server)

    def wait(self, timeout_s: float = 120) -> int:
        output, _ = self.launcher.communicate(timeout=timeout_s)
        self.said.append(output)
        return self.launcher.returncode

    def kill(self, *, launcher_only: bool = False) -> None:
        """kill -9 of everything, or of the launcher, with which all else ends; returns when all are gone."""
        everyone = self.launcher.family()
        for process in everyone[: 1 if launcher_only else None]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        output, _ = self.launcher.communicate(timeout=60)
        self.said.append(output)
        _, alive = psutil.wait_procs(everyone, timeout=20)
        assert not alive, f"outlive their launcher: {alive}"

    def steps(self) -> list[dict[str, Any]]:
        """What the metrics tell of each step, in the order in which they were made: those of an undone lineage too."""
        with contextlib.suppress(OSError, ValueError):  # a line that is being written
            return [point for point in metrics(self.run_dir) if "train/loss" in point["values"]]
        return []

    def version(self) -> int:
        return max((point["step"] for point in self.steps()), default=0)

    def until_version(self, version: int) -> None:
        """Wait for it; a life that ends before is an error."""

        def is_there() -> bool:
            return self.version() >= version or self.launcher.poll() is not None

        wait_until(is_there, f"version {version}", timeout_s=120)

    def after(self, seconds: float) -> bool:
        """Wait so long; False if the life ended meanwhile."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.launcher.poll() is not None:
                return False
            time.sleep(0.02)
        return self.launcher.poll() is None

    def told(self, kind: str) -> list[str]:
        return [event["text"] for event in events(self.run_dir, kind)]

    def end(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self.kill(launcher_only=True)
        print("".join(self.said)[-4000:])

    # -- ranks and engines

    def rank(self, number: int) -> int:
        (pid,) = worker_pids(self.launcher.pid, f"trainer/{number}")
        return pid

    def ranks(self) -> set[int]:
        return set(worker_pids(self.launcher.pid, "trainer"))

    def engines(self) -> list[int]:
        return sorted(worker_pids(self.launcher.pid, "rollout"))

    def recovery_s(self, since_wall_s: float) -> float:
        def made() -> list[float]:
            return [point["wall_s"] for point in self.steps() if point["wall_s"] > since_wall_s]

        wait_until(lambda: bool(made()), "a step after the fault")
        return made()[0] - since_wall_s

    def check_sockets(self) -> None:
        """E04: no process listens beyond loopback."""
        pids = [process.pid for process in self.launcher.family()]
        assert {self.rank(0), self.rank(1)} <= set(pids)
        places = listening(pids)
        assert places, "the store of the gang listens somewhere"
        assert all(ipaddress.ip_address(place.split()[0]).is_loopback for place in places), places

    def prove(self) -> None:
        """As `check_each_once`; and the engines' bound held."""
        check_each_once(self.run_dir, self.num_prompts)
        points = [point["values"] for point in metrics(self.run_dir)]
        assert max(values["lag/max"] for values in points if "lag/max" in values) <= 2
        assert min(values["lag/min"] for values in points if "lag/min" in values) >= 0


def make_lives(folder: Path, *overrides: str, patience_s: float = 0.2, num_prompts: int = NUM_PROMPTS) -> Lives:
    """A job in `folder`, not started; its reward takes that long."""
    job = make_job(folder)
    job.be_patient(patience_s)
    return Lives(job, num_prompts, overrides)


@contextmanager
def gang_run(folder: Path, *overrides: str, patience_s: float = 0.3, num_prompts: int = 60) -> Iterator[Lives]:
    """A run with two ranks and two engines; nothing of it is left after the block."""
    counts = ("roles.trainer.count=2", "roles.rollout.count=2")
    run = make_lives(folder, *counts, *overrides, patience_s=patience_s, num_prompts=num_prompts)
    run.server = MEGATRON if 'roles.trainer.kind="megatron"' in overrides else COMMANDS
    try:
        run.begin()
        yield run
    finally:
        run.end()
        with contextlib.suppress(OSError, ValueError, AssertionError):
            print(next((run.run_dir / "logs").glob("launcher*.log")).read_text()[-6000:])


def listening(pids: list[int]) -> dict[str, str]:
    """Address and port of each listening TCP socket of these processes, and whose it is: read from the kernel."""
    inodes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    name = os.readlink(fd)
                    if name.startswith("socket:["):
                        inodes[name[8:-1]] = pid
    found: dict[str, str] = {}
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] != "0A" or words[9] not in inodes:
                continue
            host, port = words[1].split(":")
            packed = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
            pid = inodes[words[9]]
            found[f"{socket.inet_ntop(family, packed)} {int(port, 16)}"] = f"{pid} {psutil.Process(pid).name()}"
    return found
