"""A depot in a process of its own per process fault, and a registry in another where joining is tried.

This process plays the launcher: it reports the exits of its children to the registry and starts them again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from tests.faults.depot import DepotContract, crates_of, effects
from tests.faults.fault_lab import NOTED, FaultLab, begun
from tests.faults.fault_table import Fault
from tests.faults.operations import CALLING, Plan, Result, begin, crate, judged
from tests.harness.programs import Program, start_program

from myxa.core.errors import CallError
from myxa.core.refs import with_deadline
from myxa.transport.node import Node, Rendezvous

CHILD = Path(__file__).with_name("depot_child.py")
STRIKE_S = 0.3
MEMORY_BYTES = 24 << 20
SENT_BYTES = 64 << 20
START_S = 30.0


class Child:
    """One process, and the next one of the same name when it has ended."""

    def __init__(self, lab: ProcessLab, name: str, limits: dict[str, int], founds: bool) -> None:
        self.lab = lab
        self.name = name
        self.limits = limits
        self.found = lab.folder / f"{name}.rdzv" if founds else None
        self.stock = lab.folder / f"{name}.stock"
        self.process: Program

    async def start(self) -> None:
        order = {
            "name": f"{self.name}-node", "key": str(self.lab.key_file), "sockets": self.lab.sockets,
            "rdzv": "" if self.found else str(self.lab.rdzv_file), "found": str(self.found or ""),
            "stock": str(self.stock), "limits": self.limits,
        }  # fmt: skip
        self.process = await start_program(CHILD, json.dumps(order))
        self.lab.children.append(self.process)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def report_exit(self) -> int:
        """As a launcher does."""
        status = await self.process.wait()
        await self.lab.near.registry.process_exited(f"{self.name}-node", 0, status, pid=self.pid)
        return status

    async def rendezvous(self) -> Rendezvous:
        """Of the registry that this child hosts."""
        assert self.found is not None
        async with asyncio.timeout(START_S):
            while not self.found.exists():
                await asyncio.sleep(0.05)
        return Rendezvous.load(self.found)


class ProcessLab(FaultLab):
    """Children that are killed, stopped or starved."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.sockets = tempfile.mkdtemp(prefix="s-")
        self.key_file = self.folder / "job.key"
        self.rdzv_file = self.folder / "rdzv.json"
        self.children: list[Program] = []
        self.fars: dict[str, Child] = {}
        self.registries: dict[str, Child] = {}
        self.strangers: dict[str, Node] = {}
        self.hurting: list[asyncio.Future[None]] = []
        """Nodes of ours that have joined the registries of children."""

    async def _open(self) -> None:
        self.key.save(self.key_file)
        await super()._open()
        self.host.rendezvous.save(self.rdzv_file)
        self.near = await Node.attach(name="near", rdzv=self.host.rendezvous, key=self.key, tcp="127.0.0.1:0")
        self.nodes.append(self.near)
        for name in self.names:
            await self.add(name)
        await self.near.wait_for(*(child.name for child in self.fars.values()), timeout_s=START_S)

    async def add(self, name: str) -> None:
        number = len(self.fars)
        limits = {"descriptors": {"descriptors": 256}, "memory": {"memory": MEMORY_BYTES}}.get(name, {})
        child = self.fars[name] = Child(self, f"depot-{number}", limits, founds=False)
        if name == "disk":
            crates_of(child.stock).symlink_to("/dev/full")
        await child.start()
        if name in ("SIGKILL", "SIGSTOP", "interpreter lock", "descriptors", "long SIGSTOP"):
            registry = self.registries[name] = Child(self, f"registry-{number}", limits, founds=True)
            await registry.start()

    async def _close(self) -> None:
        for process in self.children:
            if process.returncode is None:
                process.kill()
            await process.wait()
        self.nodes += self.strangers.values()
        await super()._close()
        shutil.rmtree(self.sockets)

    def depot(self, name: str, deadline_s: float = 30.0) -> DepotContract:
        return with_deadline(self.near.ref(DepotContract, self.fars[name].name), deadline_s)

    # -- one fault

    async def run(self, name: str, fault: Fault) -> dict[str, Result]:
        far = self.fars[name]
        await begin("bulk", self.near, far.name, "probe", Plan())
        registry = self.registries.get(name)
        rdzv = await registry.rendezvous() if registry else None
        if not fault.strikes:
            await self._apply(name, far, registry)
        tasks = {
            kind: begin(kind, self.near, far.name, f"{kind}-{far.name}", fault.plan)
            for kind in CALLING
            if kind in fault.cells and not (name == "memory" and kind == "bulk")
        }
        if name == "memory":
            await asyncio.wait(tasks.values())
            work = self.depot(name, fault.plan.bulk_s).weigh("bulk-memory", np.zeros(SENT_BYTES, np.uint8), 0.0)
            tasks["bulk"] = _task(judged("bulk-memory", work))
        if fault.strikes:
            await asyncio.sleep(STRIKE_S)
            await begun(far.stock, {kind: f"{kind}-{far.name}" for kind in tasks}, (*NOTED, "bulk"))
            await self._apply(name, far, registry)
        if rdzv is not None:
            tasks["join"] = _task(judged("join", self._join(f"joiner-{far.name}", rdzv, fault.plan.join_s)))
        if fault.lasts_s:
            await asyncio.sleep(fault.lasts_s)
        if name in ("SIGKILL", "exit"):
            await far.report_exit()
            await far.start()
        elif "SIGSTOP" in name:
            self._send(signal.SIGCONT, far, registry)
        results = {kind: await task for kind, task in tasks.items()}
        await self._aftermath(name, far, rdzv)
        return results

    async def _join(self, name: str, rdzv: Rendezvous, timeout_s: float) -> None:
        node = await Node.attach(
            name=name, rdzv=rdzv, key=self.key, node_rank=7, tcp="127.0.0.1:0", timeout_s=timeout_s
        )
        await node.close(grace_s=0.2)

    async def _apply(self, name: str, far: Child, registry: Child | None) -> None:
        if name == "SIGKILL":
            self._send(signal.SIGKILL, far, registry)
        elif name == "exit":
            self._hurt(self.depot(name), "exit", 3)
            await asyncio.sleep(0.05)
        elif "SIGSTOP" in name:
            self._send(signal.SIGSTOP, far, registry)
        elif name in ("interpreter lock", "long interpreter lock"):
            amount = 5.0 if name == "interpreter lock" else 30.0
            for depot in await self._depots(name, registry):
                self._hurt(depot, "hold the interpreter lock", amount)
            await asyncio.sleep(0.2)
        elif name == "descriptors":
            for depot in await self._depots(name, registry):
                await depot.hurt("eat descriptors", 0)
                await depot.whoami()

    def _hurt(self, depot: DepotContract, how: str, amount: float) -> None:
        """Nobody waits for the answer."""

        async def hurt() -> None:
            with suppress(CallError):
                await depot.hurt(how, amount)

        self.hurting.append(asyncio.ensure_future(hurt()))

    async def _depots(self, name: str, registry: Child | None) -> list[DepotContract]:
        """The far depot, and the one in the registry's process, which another node of ours has joined."""
        found = [self.depot(name)]
        if registry is not None:
            if registry.name not in self.strangers:
                self.strangers[registry.name] = await Node.attach(
                    name=f"friend-{registry.name}", rdzv=await registry.rendezvous(), key=self.key, node_rank=7,
                    tcp="127.0.0.1:0",
                )  # fmt: skip
            node = self.strangers[registry.name]
            await node.wait_for(registry.name, timeout_s=START_S)
            found.append(node.ref(DepotContract, registry.name))
        return found

    @staticmethod
    def _send(sig: signal.Signals, *children: Child | None) -> None:
        for child in filter(None, children):
            child.process.send_signal(sig)

    async def _aftermath(self, name: str, far: Child, rdzv: Rendezvous | None) -> None:
        """Whatever it was, work goes on afterwards."""
        if name == "disk":
            crates_of(far.stock).unlink()
        if name == "descriptors":
            for depot in await self._depots(name, self.registries[name]):
                await depot.hurt("give descriptors back", 0)
            assert rdzv is not None
            await self._join(f"late-{far.name}", rdzv, 15.0)
        if name in ("disk", "descriptors"):
            assert effects(far.stock)["put", f"put-{far.name}"] == 0
            assert await self.depot(name).store(crate(f"put-{far.name}"), 0.0)  # the very same put
        if name == "memory":
            await self._check_memory(far)
        async with asyncio.timeout(START_S):
            while True:
                result = await judged("probe", self.depot(name, 5.0).whoami())
                if result.outcome == "done":
                    return
                await asyncio.sleep(0.1)

    async def _check_memory(self, far: Child) -> None:
        """Refused by us, or libzmq itself ran out of memory: then it ends the process."""
        await asyncio.sleep(0.3)
        if far.process.returncode is not None:
            assert await far.report_exit() == -signal.SIGABRT
            await far.start()


def _task(work) -> asyncio.Task[Result]:
    return asyncio.get_running_loop().create_task(work)
