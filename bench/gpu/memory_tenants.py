"""The processes of the switching benchmark: a manager, trainer ranks, engines; each a real actor on a node of its own.

Started by memory_lab.py, which is the launcher and the leader. The trainers' and engines' memory is an arena of ours
under leases of the manager, or, with `--way saver`, regions of torch-memory-saver that are paused and resumed blindly.
Everything that touches a device happens in one thread of the process, and no device is touched before `setup`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TypeVar

import torch
from memory_device import device_bytes, device_name, open_arena, seconds_of, settled_used
from memory_figures import MIB
from memory_orders import COPIED, POLICIES, TRAINER_TAGS, StandInContract, WorkDone, WorkOrder
from memory_process import run
from memory_raw import PlainCopies, synchronise
from memory_saver import make_saver
from memory_standins import EngineStandIn, Shape, TrainerStandIn, finish

from myxa.actors.tenancy.tenant import Tenant, TenantOptions
from myxa.core.device_memory import (
    OPTIMIZER_PARTS,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagReport,
    TenantReport,
)
from myxa.memory.arenas.arena import Arena, Restoring

T = TypeVar("T")


# -- memory ------------------------------------------------------------------------------------------------------------


class StreamedStore:
    """An arena whose moments may still be on their way in when the others are there."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.is_streaming = False
        self.streamed_bytes = 0
        """That came in after the last restore was answered."""
        self._coming: Restoring | None = None

    def report(self) -> tuple[TagReport, ...]:
        return self.arena.report()

    def release(self, tags: Collection[Tag]) -> int:
        own = self._own(tags)
        self.arrive()
        return self.arena.release(own)

    def restore(self, tags: Collection[Tag]) -> int:
        own = self._own(tags)
        if not self.is_streaming or not own & COPIED:
            return self.arena.restore(own)
        awaited = own - frozenset(OPTIMIZER_PARTS)
        self._coming = self.arena.begin_restore(own, awaited=awaited)
        for tag in awaited:
            self._coming.wait(tag)
        return 0

    def arrive(self) -> None:
        """Until all moments are there."""
        if self._coming is not None:
            self.streamed_bytes = self._coming.wait_all()
            self._coming = None

    def _own(self, tags: Collection[Tag]) -> frozenset[Tag]:
        return frozenset(tags) & {report.tag for report in self.arena.report()}


class Regions:
    """torch-memory-saver's: what it is told to, it copies away as a whole."""

    def __init__(self, device: str, *, is_backed_up: bool) -> None:
        self._saver = make_saver()
        self._saver.retain_cpu_backup = False
        self._device = device
        self._is_backed_up = is_backed_up
        self._held: list[torch.Tensor] = []
        self._tags: list[str] = []

    def empty(self, tag: str, num_bytes: int) -> int:
        if tag not in self._tags:
            self._tags.append(tag)
        with self._saver.region(tag=tag, enable_cpu_backup=self._is_backed_up):
            self._held.append(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        return self._held[-1].data_ptr()

    def pause(self) -> None:
        synchronise(self._device)
        for tag in self._tags:
            self._saver.pause(tag)

    def resume(self) -> None:
        for tag in self._tags:
            self._saver.resume(tag)
        synchronise(self._device)


# -- the actors --------------------------------------------------------------------------------------------------------


class StandIn(StandInContract):
    """Base of both: a tenant of the manager, one thread for the device, orders."""

    gang = ""
    tags: tuple[Tag, ...] = ()

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device: str = options.device
        self._index = options.first_device + int(options.name.rpartition("/")[2])
        self._shape = Shape.scaled(options.scale, options.matrix, options.tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._residue = 0
        self._used_at_start = 0
        self._store: StreamedStore | None = None
        self._regions: Regions | None = None
        self._tenant: Tenant | None = None

    def planned(self) -> dict[Tag, int]:
        """Bytes of every tag."""
        raise NotImplementedError

    def make(self, allocate: Callable[[str, int], int]) -> None:
        """All of its memory; in the thread."""
        raise NotImplementedError

    def drain(self) -> None:
        """Nothing runs; in the thread."""
        raise NotImplementedError

    async def on_start(self) -> None:
        if self._options.way != "ours":
            return
        self._tenant = Tenant(
            options=TenantOptions(
                name=self.ctx.name, epoch=self.ctx.epoch, gang=self.gang,
                devices=(device_name(self._device, self._index),),
                planned={tag: (num, POLICIES[tag]) for tag, num in self.planned().items()},
            ),
            gate=self, in_thread=self._in_thread, clock=self.ctx.clock,
        )  # fmt: skip

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        assert self._tenant is not None
        return await self._tenant.command(command)

    async def memory_report(self) -> TenantReport | None:
        return self._tenant.report() if self._tenant is not None else None

    async def quiesce(self) -> None:
        """The tenant's gate: nothing runs, what was only worked with is given back."""
        await self._in_thread(self._quiet)

    async def resume(self) -> None:
        """The gate opens; orders come when the leader sends them."""

    async def work(self, order: WorkOrder) -> WorkDone:
        done = await self._in_thread(lambda: self._work(order))
        if self._tenant is not None and order.kind == "setup":
            assert self._store is not None
            self._tenant.loaded((self._store,))
        return done

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- in the thread

    def _work(self, order: WorkOrder) -> WorkDone:
        return getattr(self, f"do_{order.kind}")(order)

    def do_setup(self, order: WorkOrder) -> WorkDone:
        """Context, pool, memory; the residue is what the device lost beyond the memory that was asked for."""
        options = self._options
        if self._device == "cuda":
            self._used_at_start = settled_used(self._index)
            torch.cuda.set_device(self._index)
        pool_s = 0.0
        if options.way == "ours":
            planned = self.planned()
            opened = open_arena(
                self._device, capacity_bytes=options.capacity_mib * MIB, ordinal=self._index,
                pool_bytes=sum(num for tag, num in planned.items() if POLICIES[tag] == "backup") + 64 * MIB,
                chunk_bytes=256 * MIB if self._device == "cuda" else 2 * MIB,
            )  # fmt: skip
            for tag in planned:
                opened.arena.tag(tag, POLICIES[tag])
            self._store, pool_s = StreamedStore(opened.arena), opened.pool_s
            self.make(lambda tag, num: opened.arena.empty(tag, num))  # pyright: ignore[reportArgumentType]
        else:
            self._regions = Regions(self._device, is_backed_up=self.gang == "trainer")
            self.make(self._regions.empty)
        synchronise(self._device)
        return WorkDone(values={"pool_s": pool_s, **self.do_residue(order).values})

    def do_residue(self, order: WorkOrder) -> WorkDone:
        """What stays on the device without the tags: context, modules, workspaces. Nobody else starts meanwhile."""
        del order
        gc.collect()
        self._quiet()
        if self._device == "cuda":
            mapped = sum(self.planned().values())
            if self._store is not None:
                mapped = sum(r.num_bytes for r in self._store.report() if r.backing.startswith("mapped"))
            self._residue = max(settled_used(self._index) - self._used_at_start - mapped, 0)
        return WorkDone(values={"residue": float(self._residue)})

    def do_mode(self, order: WorkOrder) -> WorkDone:
        if self._store is not None:
            self._store.is_streaming = order.overlap
        return WorkDone()

    def do_pause(self, order: WorkOrder) -> WorkDone:
        del order
        assert self._regions is not None
        self._quiet()
        return WorkDone(values={"pause_s": seconds_of(self._regions.pause)})

    def do_resume(self, order: WorkOrder) -> WorkDone:
        del order
        assert self._regions is not None
        return WorkDone(values={"resume_s": seconds_of(self._regions.resume)})

    def _quiet(self) -> None:
        """Copies that were begun go on; nothing that is freed here waits for them, for nothing is cached between."""
        self.drain()
        if self._device == "cuda" and torch.cuda.is_initialized():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


class TrainerActor(StandIn):
    """See memory_standins.py."""

    gang = "trainer"

    def planned(self) -> dict[Tag, int]:
        shape = self._shape
        return {
            tag: shape.bytes_of(tag) for tag in TRAINER_TAGS
        }  # fmt: skip

    def make(self, allocate: Callable[[str, int], int]) -> None:
        self._trainer = TrainerStandIn(self._shape, self._device, allocate)
        self._trainer.rebuild()
        self._trainer.grads.zero_()

    def drain(self) -> None:
        self._trainer.drain()

    def do_rates(self, order: WorkOrder) -> WorkDone:
        """GB/s of plain pinned copies in this process."""
        del order
        num_bytes = self._options.plain_mib * MIB
        plain = PlainCopies(self._device, num_bytes)
        rates = {name: plain.rate(num_bytes, is_out=name == "out") for name in ("out", "in")}
        del plain
        self._quiet()
        return WorkDone(values=rates)

    def do_baseline(self, order: WorkOrder) -> WorkDone:
        """Steps that nothing disturbs; the second counts."""
        steps = [self._trainer.step(int(order.amount), lambda: None) for _ in range(2)]
        self._written()
        return WorkDone(values=asdict(steps[-1]))

    def do_step(self, order: WorkOrder) -> WorkDone:
        store, trainer = self._store, self._trainer
        streamed = 0
        if store is None:
            step = trainer.step(int(order.amount), lambda: None)
        else:
            store.streamed_bytes = 0
            step = trainer.step(int(order.amount), store.arrive)
            streamed = store.streamed_bytes
        self._written()
        self._quiet()
        return WorkDone(values={**asdict(step), "streamed_bytes": float(streamed)})

    def do_digest(self, order: WorkOrder) -> WorkDone:
        del order
        if self._store is not None:
            self._store.arrive()
        digest = tuple(self._trainer.digest())
        self._quiet()
        return WorkDone(digest=digest)

    def _written(self) -> None:
        if self._store is not None:
            for tag in TRAINER_TAGS:
                self._store.arena.mark_dirty(tag)


class EngineActor(StandIn):
    """See memory_standins.py."""

    gang = "rollout"

    def planned(self) -> dict[Tag, int]:
        capacity = self._options.capacity_mib * MIB
        if self._device == "cuda":
            capacity = device_bytes(self._index)[1]
        weights = self._shape.bytes_of("weights")
        cache = (int(self._options.mem_fraction * capacity) - weights) // (2 * MIB) * 2 * MIB
        return {"weights": weights, "kv_cache": cache}

    def make(self, allocate: Callable[[str, int], int]) -> None:
        self._engine = EngineStandIn(self._shape, self._device, self.planned()["kv_cache"], allocate)
        self._engine.load(0)
        self._engine.generate(0.0)  # its modules belong to the residue

    def drain(self) -> None:
        finish(self._device)

    def do_load(self, order: WorkOrder) -> WorkDone:
        took_s = seconds_of(lambda: (self._engine.load(int(order.amount)), finish(self._device)))
        return WorkDone(values={"load_s": took_s})

    def do_generate(self, order: WorkOrder) -> WorkDone:
        first_at, end_at, passes = self._engine.generate(order.amount)
        return WorkDone(values={"first_kernel_at": first_at, "end_at": end_at, "passes": float(passes)})


# -- the process -------------------------------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> StandIn:
    return TrainerActor(options) if options.name.startswith("trainer/") else EngineActor(options)


if __name__ == "__main__":
    run(__doc__, build)
