"""Processes of the end-to-end tests: a memory manager, toy trainers and toy engines on memory of the host that stands for
a device. Each can be told to kill itself at a labelled point."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myxa.actors.contracts.memory import MemoryContract, TenantContract
from myxa.actors.own_thread import in_own_thread
from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager
from myxa.actors.tenancy.tenant import Tenant, TenantOptions
from myxa.core.actor import PeerEvent
from myxa.core.clock import SystemClock
from myxa.core.device_memory import MemoryCommand, MemoryReply, Tag, TagPolicy, TagReport, TenantReport
from myxa.core.handlers import call
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
from myxa.memory.ledger.arbiter import ArbiterOptions
from myxa.memory.ledger.instructions import Answer, Measure, Send
from myxa.memory.ledger.journal import Journal
from myxa.memory.ledger.switch import SwitchOptions
from myxa.memory.ledger.transition import TransitionOptions
from myxa.memory.meters import DeviceMeters
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

F32 = npt.NDArray[np.float32]
die_at: set[str] = set()


def point(label: str) -> None:
    """Here the process may end."""
    if label in die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class ToyContract(TenantContract):
    @call(deadline=30)
    async def work(self, count: int) -> list[float]:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def arm(self, label: str) -> int:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def digests(self) -> dict[str, str]:
        raise NotImplementedError


class Points:
    """An arena whose moves can be died in."""

    def __init__(self, arena: Arena, refill: Callable[[], None]) -> None:
        self._arena = arena
        self._refill = refill

    def report(self) -> tuple[TagReport, ...]:
        return self._arena.report()

    def release(self, tags: Collection[Tag]) -> Any:
        point("before_release")
        moved = self._arena.release(tags)
        point("after_release")
        return moved

    def restore(self, tags: Collection[Tag]) -> Any:
        point("before_restore")
        restoring = self._arena.begin_restore(tags)
        point("in_restore")
        moved = restoring.wait_all()
        if "params" in tags:
            self._refill()
        point("after_restore")
        return moved


class Toy(ToyContract):
    """A tenant whose memory is real. Work on it is a toy, but depends on every byte."""

    def __init__(self, gang: str, device: str, manager: str) -> None:
        self._gang = gang
        self._device = device
        self._manager = manager
        self._turn = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._arrays: dict[Tag, F32] = {}
        self._arena: Arena | None = None
        self._step = 0

    async def on_start(self) -> None:
        planned = TAGS[self._gang]
        self._tenant = Tenant(
            options=TenantOptions(
                name=self.ctx.name, epoch=self.ctx.epoch, gang=self._gang, device=self._device, planned=dict(planned)
            ),
            stores=(),
            gate=self,
            in_thread=lambda work: in_own_thread(work, "memory"),
            clock=SystemClock(),
        )
        self.ctx.watch(self._manager)
        self.ctx.spawn(self._run(), name="toy")

    async def _run(self) -> None:
        await self._tenant.join(self.ctx.ref(MemoryContract, self._manager))
        await self._turn.wait()
        driver = HostVmmDriver(self._device, CAPACITY)
        arena = Arena(
            driver, HostPool(64 * MIB), SystemClock(), chunk_bytes=CHUNK, on_freed=lambda _: point("in_copy_out")
        )
        self._arena = arena
        for tag, (num_bytes, policy) in TAGS[self._gang].items():
            arena.tag(tag, policy)
            address = arena.empty(tag, num_bytes)
            raw = (ctypes.c_float * (num_bytes // 4)).from_address(address)
            self._arrays[tag] = np.ctypeslib.as_array(raw)
            self._arrays[tag][:] = 0.5
            arena.mark_dirty(tag)
        self._tenant.add_store(Points(arena, self._refill))
        await self._tenant.loaded()

    async def on_stop(self, why: str) -> None:
        if self._arena is not None:
            self._arena.close()

    async def on_peer(self, event: PeerEvent) -> None:
        await self._tenant.on_peer(event)

    def _refill(self) -> None:
        """Parameters are half of the optimizer's state."""
        half = self._arrays["optimizer"][: self._arrays["params"].size]
        self._arrays["params"][:] = half
        self.arena.mark_dirty("params")

    @property
    def arena(self) -> Arena:
        assert self._arena is not None
        return self._arena

    # -- the gate

    async def quiesce(self) -> None:
        point("before_drain")
        self._turn.clear()
        await self._idle.wait()
        point("after_drain")

    async def resume(self) -> None:
        point("before_commit")
        self._turn.set()
        point("after_commit")

    # -- work

    async def work(self, count: int) -> list[float]:
        """Losses of `count` steps, or sums of a cache's pages."""
        async with asyncio.timeout(20):
            while not (self._turn.is_set() and self._arrays and not self._tenant.is_planned):
                await asyncio.sleep(0.01)
        self._idle.clear()
        try:
            step = self._train if self._gang == "trainer" else self._generate
            return [await in_own_thread(step, "work") for _ in range(count)]
        finally:
            self._idle.set()

    def _train(self) -> float:
        params, grads, state = self._arrays["params"], self._arrays["grads"], self._arrays["optimizer"]
        master, moment = state[: params.size], state[params.size :]
        self._step += 1
        np.multiply(params, np.float32(0.01 * self._step), out=grads)
        grads += np.float32(0.001)
        moment *= np.float32(0.9)
        moment += grads
        master -= np.float32(0.05) * moment
        params[:] = master
        for tag in ("params", "grads", "optimizer"):
            self.arena.mark_dirty(tag)
        return float(params.astype(np.float64).sum() + moment.astype(np.float64).sum())

    def _generate(self) -> float:
        self._arrays["kv_cache"][:] = self._arrays["weights"][0]
        return float(self._arrays["kv_cache"][-1])

    async def arm(self, label: str) -> int:
        die_at.add(label)
        return os.getpid()

    async def digests(self) -> dict[str, str]:
        return {tag: self.arena.digest(tag) for tag in ("optimizer",) if tag in self._arrays}

    # -- a tenant's duties

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        return await self._tenant.command(command)

    async def memory_report(self) -> TenantReport | None:
        return self._tenant.report()


class MortalManager(MemoryManager):
    """Dies where it is told to."""

    @call(deadline=10, reentrant=True)
    async def arm(self, label: str) -> int:
        die_at.add(label)
        return os.getpid()

    def _do(self, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                point(f"before_journal_{instruction.command.kind}")
            elif isinstance(instruction, Measure) and instruction.key != "watch":
                point("before_measure")
            elif isinstance(instruction, Answer):
                point("before_answer")
        super()._do(instructions)

    async def _send(self, send: Send) -> None:
        point(f"after_journal_{send.command.kind}")
        await super()._send(send)


def manager_of(run_dir: Path, devices: list[str]) -> MortalManager:
    options = ManagerOptions(
        arbiter=ArbiterOptions(
            reserve_bytes=0,
            margin_bytes=MARGIN,
            switch=SwitchOptions(transition=TransitionOptions(resend_s=1.0, verify_s=3.0), ghost_s=5.0),
        )
    )
    meter = DeviceMeters(dict.fromkeys(devices, CAPACITY))
    return MortalManager(meter=meter, journal=Journal(run_dir / "memory.jsonl"), options=options, clock=SystemClock())


def wait_for_orders() -> list[str]:
    """A process that is started before it is needed, with all imports done, reads on its input what it is to be."""
    return sys.stdin.readline().split()


async def main(rdzv: str, run_dir: str, name: str, gang: str, device: str) -> int:
    node = await Node.attach(name=f"node-{name}", rdzv=Rendezvous.load(Path(rdzv)))
    if gang == "memory":
        await node.start(manager_of(Path(run_dir), device.split(",")), name)
    else:
        await node.start(Toy(gang, device, "memory/0"), name)
    error = await node.failed
    print(f"{name}: {error!r}", file=sys.stderr, flush=True)
    await node.close(grace_s=0.5)
    return 7


if __name__ == "__main__":
    if orders := wait_for_orders():
        sys.exit(asyncio.run(main(*orders)))
