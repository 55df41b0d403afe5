"""Processes of the end-to-end tests: a memory manager, toy trainers and toy engines on memory of the host that stands for
a device. Each can be told to kill itself at a labelled point."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from myxa.actors.contracts import TenantContract
from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager, NodeAgent
from myxa.actors.tenancy.tenant import Tenant, TenantOptions
from myxa.core.clock import SystemClock
from myxa.core.daemon_thread import in_daemon_thread
from myxa.core.device_memory import (
    DeviceReading,
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagPolicy,
    TenantReport,
)
from myxa.core.handlers import call
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
from myxa.memory.leases.switch import LeaseOptions
from myxa.transport.node import Node, Rendezvous

MIB = 1 << 20
CAPACITY = 48 * MIB
MARGIN = MIB
CHUNK = 2 * MIB
TRAINER: dict[Tag, tuple[int, TagPolicy]] = {
    "params": (8 * MIB, "rematerialise"),
    "grads": (8 * MIB, "discard"),
    "optimizer": (16 * MIB, "backup"),
}
ENGINE: dict[Tag, tuple[int, TagPolicy]] = {"weights": (8 * MIB, "backup"), "kv_cache": (30 * MIB, "discard")}
TAGS = {"trainer": TRAINER, "rollout": ENGINE}

die_at: set[str] = set()


def point(label: str) -> None:
    """Here the process may end."""
    if label in die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal:
    """Dies where it is told to."""

    @call(deadline=10, reentrant=True)
    async def arm(self, label: str) -> int:
        die_at.add(label)
        return os.getpid()


class MortalDriver(HostVmmDriver):
    """Memory of a tag that leaves can be died in."""

    def release(self, handle: int, num_bytes: int) -> None:
        super().release(handle, num_bytes)
        point("in_copy_out")


class Points:
    """An arena whose moves can be died in."""

    def __init__(self, arena: Arena) -> None:
        self.report = arena.report
        self._arena = arena

    def release(self, tags: Collection[Tag]) -> int:
        copied_bytes = self._arena.release(tags)
        point("after_release")
        return copied_bytes

    def restore(self, tags: Collection[Tag]) -> int:
        restoring = self._arena.begin_restore(tags)
        point("in_restore")
        copied_bytes = restoring.wait_all()
        self._arena.mark_dirty(self._arena.report()[0].tag)
        return copied_bytes


class Toy(Mortal, TenantContract):
    """A tenant whose memory is real; its work is a toy."""

    def __init__(self, gang: str, device: str) -> None:
        self._gang, self._device = gang, device
        self._turn = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._arena: Arena | None = None

    async def on_start(self) -> None:
        self._tenant = Tenant(
            options=TenantOptions(
                name=self.ctx.name, epoch=self.ctx.epoch, gang=self._gang, devices=(self._device,),
                node=node_of(self._device), planned=dict(TAGS[self._gang]),
            ),
            gate=self,
            in_thread=lambda work: in_daemon_thread(work, "memory"),
            clock=SystemClock(),
        )  # fmt: skip
        self.ctx.spawn(self._load(), name="toy")

    async def _load(self) -> None:
        await self._turn.wait()
        self._arena = arena = Arena(MortalDriver(self._device, CAPACITY), HostPool(64 * MIB), chunk_bytes=CHUNK)
        for tag, (num_bytes, policy) in TAGS[self._gang].items():
            arena.tag(tag, policy)
            ctypes.memset(arena.empty(tag, num_bytes), 1, num_bytes)
            arena.mark_dirty(tag)
        self._tenant.loaded((Points(arena),))

    async def on_stop(self, why: str) -> None:
        if self._arena is not None:
            self._arena.close()

    # -- the gate

    async def quiesce(self) -> None:
        point("before_drain")
        self._turn.clear()
        await self._idle.wait()
        point("after_drain")

    async def resume(self) -> None:
        point("before_commit")
        self._turn.set()

    @call(deadline=30)
    async def work(self) -> None:
        """In its turn, on all that it holds."""
        async with asyncio.timeout(20):
            while not (self._turn.is_set() and self._arena is not None and self._arena.report()):
                await asyncio.sleep(0.01)
        self._idle.clear()
        for report in self._arena.report():
            self._arena.mark_dirty(report.tag)
        self._idle.set()

    # -- a tenant's duties

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        return await self._tenant.command(command)

    async def memory_report(self) -> TenantReport | None:
        return self._tenant.report()


class MortalManager(Mortal, MemoryManager):
    async def command(self, tenant: str, command: MemoryCommand, within_s: float) -> MemoryReply:
        point(f"sends_{command.kind}")
        return await super().command(tenant, command, within_s)

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        reply = await super().lease(request)
        point("before_answer")
        return reply


class MortalAgent(Mortal, NodeAgent):
    async def measure(self, uses: tuple[DeviceUse, ...]) -> dict[str, DeviceReading]:
        point("before_measure")
        return await super().measure(uses)


def node_of(device: str) -> int:
    """ "host:0@1" is on node 1."""
    return int(device.partition("@")[2] or 0)


def agent_of(devices: list[str], node: int) -> MortalAgent:
    return MortalAgent({device: CAPACITY for device in devices if node_of(device) == node})


def manager_of(devices: list[str], gangs: dict[str, list[str]]) -> MortalManager:
    options = ManagerOptions(
        gangs=gangs,
        agents={node: f"memory/{node}" for node in map(node_of, devices) if node},
        measure_s=3.0,
        limits=LeaseOptions(reserve_bytes=0, margin_bytes=MARGIN, resend_s=1.0, settle_s=5.0),
    )
    return MortalManager(agent=agent_of(devices, 0), options=options)


def wait_for_orders() -> list[str]:
    """A process that is started before it is needed, with all imports done, reads on its input what it is to be."""
    return sys.stdin.readline().split()


async def main(rdzv: str, name: str, gang: str, device: str, gangs: str) -> int:
    node = await Node.attach(name=f"node-{name}", rdzv=Rendezvous.load(Path(rdzv)))
    if gang == "memory":
        number, devices = int(name.rpartition("/")[2]), device.split(",")
        await node.start(agent_of(devices, number) if number else manager_of(devices, json.loads(gangs)), name)
    else:
        await node.start(Toy(gang, device), name)
    error = await node.failed
    print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    await node.close(grace_s=0.5)
    return 7


if __name__ == "__main__":
    if orders := wait_for_orders():
        sys.exit(asyncio.run(main(*orders)))
