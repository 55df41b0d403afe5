"""How soon the end, the absence and the standstill of a process are known: `python bench/detection.py [--quick]`.

Real processes over ipc. From the signal to the moment at which who waits for the process is told:

    exit            SIGKILL; its pidfd shows it, the registry tells everybody: the pending call fails
    unreachable     SIGKILL that nobody reports: the pending call fails
    suspect, hung   SIGSTOP: the events of `ctx.watch`; and "recovered" after SIGCONT
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from myxa.core.actor import Actor, PeerEvent
from myxa.core.errors import PeerDied
from myxa.core.handlers import call
from myxa.core.refs import with_deadline
from myxa.transport.node import Node, Rendezvous

GOALS_S = {"exit": 0.05, "unreachable": 8.0, "suspect": 15.0, "hung": 15.0, "recovered": 15.0}


class Patient(Actor):
    """Waits to be hurt."""

    @call(deadline=60, reentrant=True)
    async def rest(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return os.getpid()


class Nurse(Actor):
    """Notes when it hears what of whom."""

    def __init__(self) -> None:
        self.heard: dict[tuple[str, str], float] = {}

    async def on_start(self) -> None:
        self.ctx.watch("patient/")

    async def on_peer(self, event: PeerEvent) -> None:
        self.heard[event.name, event.kind] = time.monotonic()

    async def until(self, name: str, kind: str) -> float:
        async with asyncio.timeout(60):
            while (name, kind) not in self.heard:
                await asyncio.sleep(0.005)
        return self.heard[name, kind]


class Ward:
    """The registry, who watches, and the processes that are hurt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nurse = Nurse()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.report: asyncio.Future[bool] | None = None
        """Of the last exit, under way."""

    async def open(self, names: list[str]) -> None:
        self.host = await Node.attach(name="launcher/0", run_dir=self.folder)
        rdzv = self.folder / "rdzv.json"
        self.host.rendezvous.save(rdzv)
        self.near = await Node.attach(name="near", rdzv=self.host.rendezvous, run_dir=self.folder)
        await self.near.start(self.nurse, "nurse")
        for name in names:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--patient", name, str(rdzv), str(self.folder)
            )
        await self.near.wait_for(*names, timeout_s=60)

    async def close(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self.near.close(grace_s=0.5)
        await self.host.close(grace_s=0.5)

    async def killed(self, name: str, *, is_reported: bool) -> float:
        """Seconds from SIGKILL to the failure of a call that is under way."""
        pid = self.processes[name].pid
        ref = with_deadline(self.near.ref(Patient, name), 60)
        await ref.rest(0)
        pending = asyncio.ensure_future(ref.rest(50))
        await asyncio.sleep(1.5)
        if is_reported:
            self._report_by_pidfd(name, pid)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        try:
            await pending
        except PeerDied:
            return time.monotonic() - began
        raise AssertionError(f"{name} answered")

    def _report_by_pidfd(self, name: str, pid: int) -> None:
        loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(pid)

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self.report = asyncio.ensure_future(self.host.registry.process_exited(name, 0, -signal.SIGKILL, pid))

        loop.add_reader(pidfd, ended)

    async def stopped(self, name: str) -> dict[str, float]:
        """Seconds from SIGSTOP to each verdict, and from SIGCONT to the recovery."""
        pid = self.processes[name].pid
        pending = asyncio.ensure_future(with_deadline(self.near.ref(Patient, name), 60).rest(3.0))
        await asyncio.sleep(2.0)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        found = {kind: await self.nurse.until(name, kind) - began for kind in ("suspect", "hung")}
        began = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        found["recovered"] = await self.nurse.until(name, "recovered") - began
        await pending
        return found


async def measure(num: int) -> dict[str, list[float]]:
    names = {what: [f"patient/{what}-{i}" for i in range(num)] for what in ("exit", "unreachable", "stop")}
    with tempfile.TemporaryDirectory(prefix="ward-") as folder:
        ward = Ward(Path(folder))
        await ward.open([name for group in names.values() for name in group])
        try:
            found = {"exit": [await ward.killed(name, is_reported=True) for name in names["exit"]]}
            silent = asyncio.gather(*(ward.killed(name, is_reported=False) for name in names["unreachable"]))
            stops = await asyncio.gather(*(ward.stopped(name) for name in names["stop"]))
            found["unreachable"] = await silent
        finally:
            await ward.close()
    return found | {kind: [stop[kind] for stop in stops] for kind in ("suspect", "hung", "recovered")}


async def patient(name: str, rdzv: str, folder: str) -> None:
    node = await Node.attach(name=name, rdzv=Rendezvous.load(Path(rdzv)), run_dir=folder)
    await node.start(Patient(), name)
    await node.failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two processes of each kind instead of six")
    parser.add_argument("--patient", nargs=3, metavar=("NAME", "RDZV", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.patient:
        asyncio.run(patient(*arguments.patient))
        return 0
    found = asyncio.run(measure(2 if arguments.quick else 6))
    print("| signal | median s | worst s | goal s | met |\n|---|---:|---:|---:|---|")
    for what, values in found.items():
        worst = max(values)
        is_met = "yes" if worst <= GOALS_S[what] else "no"
        print(f"| {what} | {statistics.median(values):.3f} | {worst:.3f} | {GOALS_S[what]:g} | {is_met} |")
    return 0 if all(max(values) <= GOALS_S[what] for what, values in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
