"""A run with a trainer of two ranks whose processes are disturbed: started, looked at, ended, audited."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from tests.harness.ledger_audit import audit_ledger
from tests.harness.run_job import PATIENT, Job, events, make_job, metrics, worker_pids
from tests.harness.waiting import wait_until

NUM_PROMPTS = 60
BATCH = 4


class GangRun:
    """One pass over some prompts, to the end of the data."""

    def __init__(self, job: Job, launcher: subprocess.Popen[str], num_prompts: int) -> None:
        self.job = job
        self.launcher = launcher
        self.num_prompts = num_prompts

    @property
    def run_dir(self) -> Path:
        return self.job.run_dir()

    def versions(self) -> list[int]:
        """Versions in the order in which they were made, those of an undone lineage too."""
        assert self.launcher.poll() is None or self.launcher.returncode == 0, self.launcher.communicate()[0]
        try:
            return [p["step"] for p in metrics(self.run_dir) if "train/loss" in p["values"]]
        except (OSError, ValueError):
            return []

    def until_version(self, version: int) -> None:
        wait_until(lambda: version in self.versions(), f"version {version}")

    def rank(self, number: int) -> int:
        """Process id of a rank."""
        (pid,) = worker_pids(self.launcher.pid, f"trainer/{number}")
        return pid

    def ranks(self) -> set[int]:
        return set(worker_pids(self.launcher.pid, "trainer"))

    def engines(self) -> list[int]:
        return sorted(worker_pids(self.launcher.pid, "rollout"))

    def recovery_s(self, since_wall_s: float) -> float:
        """From a fault to the first step that was made after it."""

        def made() -> list[float]:
            points = [point for point in metrics(self.run_dir) if "train/loss" in point["values"]]
            return [point["wall_s"] for point in points if point["wall_s"] > since_wall_s]

        wait_until(lambda: bool(made()), "a step after the fault")
        return made()[0] - since_wall_s

    def check_sockets(self) -> None:
        """E04: no process listens beyond loopback."""
        pids = [self.launcher.pid, *(child.pid for child in psutil.Process(self.launcher.pid).children(recursive=True))]
        assert {self.rank(0), self.rank(1)} <= set(pids)
        places = listening(pids)
        assert places, "the store of the gang listens somewhere"
        assert beyond_loopback(pids) == {}, places

    def end(self) -> str:
        """To the end of the data; returns what the launcher said."""
        said, _ = self.launcher.communicate(timeout=150)
        assert self.launcher.returncode == 0, said
        return said

    def prove(self) -> int:
        """Every prompt was trained exactly once in the lineage that the run ended with, and the engines' bound held;
        returns how often training was undone."""
        audit = audit_ledger(self.run_dir / "ledger.sqlite")
        assert (audit.problems, audit.num_waiting) == ((), 0)
        assert audit.trained == Counter(range(self.num_prompts)), "the multiset of an undisturbed run"
        lags = [p["values"]["lag/max"] for p in metrics(self.run_dir) if "lag/max" in p["values"]]
        assert max(lags) <= 2
        assert min(p["values"]["lag/min"] for p in metrics(self.run_dir) if "lag/min" in p["values"]) >= 0
        return audit.num_rewound

    def told(self, kind: str) -> list[str]:
        return [event["text"] for event in events(self.run_dir, kind)]


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


def beyond_loopback(pids: list[int]) -> dict[str, str]:
    there = listening(pids)
    return {place: who for place, who in there.items() if not ipaddress.ip_address(place.split()[0]).is_loopback}


@contextmanager
def gang_run(
    folder: Path, *overrides: str, patience_s: float = 0.3, num_prompts: int = NUM_PROMPTS
) -> Iterator[GangRun]:
    """Nothing of it is left after the block. `patience_s`: how long a reward takes."""
    job = make_job(folder)
    (folder / "patient.py").write_text(PATIENT.format(seconds=patience_s))
    rows = (folder / "data" / "prompts.jsonl").read_text().splitlines()[:num_prompts]
    assert len({json.loads(row)["prompt"] for row in rows}) > 1
    (folder / "data" / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    launcher = job.start(
        "run.num_steps=0", "data.max_passes=1", f"algo.batch_size={BATCH}", 'reward.fn="patient.py:reward"',
        "roles.trainer.count=2", "roles.rollout.count=2", "trainer.export_at_end=false", *overrides,
    )  # fmt: skip
    run = GangRun(job, launcher, num_prompts)
    began_s = time.monotonic()
    try:
        yield run
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGKILL)
            launcher.communicate()
        print(f"{time.monotonic() - began_s:.1f} s in all")
        with suppress(OSError, ValueError):
            print(next((run.run_dir / "logs").glob("launcher*.log")).read_text()[-6000:])
