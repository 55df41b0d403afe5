"""A node of real processes around a memory manager, for tests: started, killed, started again, watched."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.harness.programs import Program, start_program
from tests.memory.manager_toys import TAGS, MortalAgent, MortalManager, Toy, node_of

from myxa.actors.contracts import MemoryContract
from myxa.core.device_memory import LeaseReply, LeaseRequest, MemoryView
from myxa.core.errors import CallError
from myxa.core.refs import with_deadline
from myxa.transport.node import Node

TOYS = Path(__file__).parent / "manager_toys.py"


class Site:
    """See the module's head."""

    def __init__(self, folder: Path, node: Node, members: dict[str, tuple[str, str]]) -> None:
        self.folder = folder
        self.node = node
        self.members = members
        """Actor name -> (gang, device)."""
        self.children: dict[str, Program] = {}
        self.devices = sorted({device for _, device in members.values()})
        self.managers = [f"memory/{node}" for node in sorted({0, *map(node_of, self.devices)})]
        """The manager, and its agents."""
        self.count = itertools.count(1)
        self._spare: Program | None = None

    async def start(self, name: str) -> None:
        """As a process that was waiting for it; the next one begins to wait."""
        gang, device = self.members.get(name, ("memory", ",".join(self.devices)))
        child = self._spare or await self._spawn()
        self._spare = None
        gangs: dict[str, list[str]] = {}
        for member, (its_gang, _) in self.members.items():
            gangs.setdefault(its_gang, []).append(member)
        words = json.dumps(gangs, separators=(",", ":"))
        orders = (str(self.folder / "rdzv.json"), name, gang, device, words)
        child.stdin.write(" ".join(orders).encode() + b"\n")
        await child.stdin.drain()
        self.children[name] = child

    async def keep_spare(self) -> None:
        """Have one process wait."""
        self._spare = self._spare or await self._spawn()

    async def _spawn(self) -> Program:
        return await start_program(TOYS)

    async def until_gone(self, name: str, timeout_s: float = 20.0) -> int:
        """The child has ended; tells the registry, as a launcher would."""
        child = self.children.pop(name)
        async with asyncio.timeout(timeout_s):
            status = await child.wait()
        await self.node.registry.process_exited(f"node-{name}", 0, status, pid=child.pid)
        return status

    async def close(self) -> None:
        if self._spare is not None:
            self.children["spare"] = self._spare
        for child in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                child.kill()
        for child in self.children.values():
            await child.wait()
        await self.node.close(grace_s=0.5)

    @property
    def manager(self) -> MortalManager:
        return self.node.ref(MortalManager, "memory/0")

    @property
    def agent(self) -> MortalAgent:
        return self.node.ref(MortalAgent, "memory/1")

    def toy(self, name: str) -> Toy:
        return self.node.ref(Toy, name)

    async def lease(self, gang: str, quiet: str = "", deadline_s: float = 10.0, tags: Any = None) -> LeaseReply:
        """Asked until the manager answers, whoever that is by then."""
        request = LeaseRequest(
            gang=gang, tags=tags or tuple(TAGS[gang]), quiet=(quiet,) if quiet else (), deadline_s=deadline_s,
            request_id=f"lease-{next(self.count)}",
        )  # fmt: skip
        manager = with_deadline(self.node.ref(MemoryContract, "memory/0"), deadline_s + 2.0)
        until = time.monotonic() + 3 * deadline_s
        while True:
            try:
                return await manager.lease(request)
            except CallError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.05)

    async def view(self) -> MemoryView:
        return await self.node.ref(MemoryContract, "memory/0").view()

    async def until(self, holds: Any, timeout_s: float, what: str) -> MemoryView:
        """Until the manager's view is as wanted; the last one is told when it never is."""
        until = time.monotonic() + timeout_s
        last: Any = None
        while time.monotonic() < until:
            with contextlib.suppress(CallError):
                last = await with_deadline(self.node.ref(MemoryContract, "memory/0"), 1.0).view()
                if holds(last):
                    return last
            await asyncio.sleep(0.03)
        raise AssertionError(f"not {what} within {timeout_s} s: {last}")

    async def until_registered(self) -> MemoryView:
        def all_there(view: MemoryView) -> bool:
            live = {t.tenant: t.epoch for d in view.devices for t in d.tenants}
            return set(live) == set(self.members) and all(
                len({t.tenant for t in d.tenants}) == len(d.tenants) for d in view.devices
            )

        return await self.until(all_there, 20.0, "all registered")

    def pids(self, device: str) -> list[int]:
        there = [name for name, (_, own) in self.members.items() if device == own]
        return [child.pid for name, child in list(self.children.items()) if name in there]


@contextlib.asynccontextmanager
async def site_of(folder: Path, members: dict[str, tuple[str, str]]) -> AsyncIterator[Site]:
    node = await Node.attach(name="launcher/0")
    site = Site(folder, node, members)
    try:
        node.rendezvous.save(folder / "rdzv.json")
        for name in (*site.managers, *members):
            await site.start(name)
        await site.until_registered()
        yield site
    finally:
        await site.close()
