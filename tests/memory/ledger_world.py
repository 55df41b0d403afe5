"""A node in virtual time around the real leases and the real tenants: messages that are lost, doubled, late and
reordered; processes that die or stop in any state; copies that are slow; measurements that lie; strangers that take
memory; a manager that dies. The world knows the truth, byte by byte, and holds the leases to it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.simulation.sim_loop import SimClock, SimLoop

from myxa.actors.tenancy.tenant import Tenant, TenantOptions
from myxa.core.device_memory import (
    DeviceReading,
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagPolicy,
    TagReport,
)
from myxa.core.errors import DeadlineExceeded, MemoryFault
from myxa.memory.leases.switch import LeaseOptions, Leases

MIB = 1 << 20
CAPACITY = 1000 * MIB
RESERVE = 10 * MIB
MARGIN = 5 * MIB
RESIDUE = 5 * MIB
"""Of every process on a device, in no tag: the measurement has it, the books do not."""
OPTIONS = LeaseOptions(reserve_bytes=RESERVE, margin_bytes=MARGIN, survey_s=2, resend_s=2, settle_s=8)
TAGS: dict[str, dict[Tag, tuple[int, TagPolicy]]] = {
    "trainer": {
        "params": (120 * MIB, "rematerialise"),
        "grads": (200 * MIB, "discard"),
        "optimizer": (240 * MIB, "backup"),
        "context": (20 * MIB, "keep"),
    },
    "rollout": {"weights": (120 * MIB, "backup"), "kv_cache": (420 * MIB, "discard"), "cuda_graph": (40 * MIB, "keep")},
    "other": {"frozen": (60 * MIB, "backup"), "workspace": (100 * MIB, "discard")},
}
ALL: dict[str, tuple[Tag, ...]] = {gang: tuple(tags) for gang, tags in TAGS.items()}
ALL["trainer"] += ("nccl",)
DEVICES = ("gpu-a", "gpu-b", "gpu-c")
Members = dict[str, tuple[str, tuple[str, ...]]]
"""Tenant -> (gang, devices)."""
MEMBERS: Members = {
    "trainer/0": ("trainer", ("gpu-a",)),
    "trainer/1": ("trainer", ("gpu-b",)),
    "rollout/0": ("rollout", ("gpu-a",)),
    "rollout/1": ("rollout", ("gpu-b",)),
    "other/0": ("other", ("gpu-b",)),
}
SPANNING: Members = {
    "trainer/0": ("trainer", ("gpu-a",)),
    "trainer/1": ("trainer", ("gpu-b",)),
    "trainer/2": ("trainer", ("gpu-c",)),
    "rollout/0": ("rollout", ("gpu-a", "gpu-b")),
    "other/0": ("other", ("gpu-b", "gpu-c")),
}
"""An engine over several devices, and a gang on more of them than it."""


@dataclass
class Weather:
    """How bad it is."""

    drop: float = 0.0
    double: float = 0.0
    delay_s: float = 0.001
    slow_s: float = 0.05
    lie: float = 0.0


@dataclass
class Asset:
    """One tag of one process: where its contents are."""

    num_bytes: int
    policy: TagPolicy
    on_device: bool = False
    dirty: bool = True
    version: int = 0
    device_version: int = -1
    host_version: int = -1

    def report(self, tag: Tag) -> TagReport:
        backing = "discarded"
        if self.on_device:
            backing = "mapped_dirty" if self.dirty else "mapped_clean"
        elif self.host_version >= 0:
            backing = "host"
        held = self.num_bytes if self.host_version >= 0 else 0
        return TagReport(tag, self.num_bytes, self.policy, backing, held)


class Process:
    """One incarnation of a tenant: its gate, its memory, its communicators, and what it was told."""

    def __init__(self, world: World, name: str, epoch: int) -> None:
        self.world, self.name, self.epoch = world, name, epoch
        self.gang, self.devices = world.members[name]
        self.assets: dict[Tag, Asset] = {
            tag: Asset(num_bytes, policy) for tag, (num_bytes, policy) in TAGS[self.gang].items()
        }
        self.is_alive, self.is_stopped, self.is_open = True, False, False
        self.freed: set[str] = set()
        self.executed: list[tuple[str, int]] = []
        self.tenant = Tenant(
            options=TenantOptions(name=name, epoch=epoch, gang=self.gang, devices=self.devices),
            gate=self,
            in_thread=self.in_thread,
            clock=world.clock,
            telemetry=self,  # pyright: ignore[reportArgumentType]
        )
        self.tenant.loaded((self,), Comms() if self.gang == "trainer" else None)

    def used(self, device: str) -> int:
        """Of that device, truly."""
        if device not in self.devices or device in self.freed:
            return 0
        return RESIDUE + sum(a.num_bytes for a in self.assets.values() if a.on_device)

    async def lives(self) -> None:
        """Returns when it is not stopped; never once it is dead."""
        while self.is_stopped or not self.is_alive:
            await asyncio.sleep(0.2)

    async def in_thread(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.world.random.random() * self.world.weather.slow_s)
        await self.lives()
        return work()

    async def quiesce(self) -> None:
        await self.in_thread(lambda: None)
        self.is_open = False

    async def resume(self) -> None:
        await self.lives()
        self.is_open = True

    def span(self, kind: str, *_: object, epoch: int, **__: object) -> None:
        """A command was carried out."""
        self.world.expect((kind, epoch) not in self.executed, f"I5: {kind} of {epoch} carried out twice")
        last = self.executed[-1][1] if self.executed else 0
        self.world.expect(epoch >= last, f"I4: epoch {epoch} obeyed after {last}")
        self.executed.append((kind, epoch))

    def report(self) -> tuple[TagReport, ...]:
        return tuple(asset.report(tag) for tag, asset in self.assets.items())

    def release(self, tags: Collection[Tag]) -> int:
        self.world.expect(not self.is_open, "I6: memory of what runs is taken")
        for tag in tags:
            self.world.leave(self.assets[tag])
        return 0

    def restore(self, tags: Collection[Tag]) -> int:
        self.world.expect(not self.is_open, "I6: memory of what runs is given")
        self.world.come(self, tags)
        return 0


class Comms:
    """Communicators that always come."""

    def release(self, epoch: int, timeout_s: float) -> None: ...
    def restore(self, epoch: int, timeout_s: float) -> None: ...
    def abort(self) -> None: ...


class World:
    """See the module's head. It is the leases' site."""

    def __init__(self, seed: int, members: Members = MEMBERS) -> None:
        self.members = members
        self.random = random.Random(seed)
        self.loop = SimLoop(seed, limit_s=1e9)
        self.clock = SimClock(self.loop)
        self.weather = Weather()
        self.count = itertools.count(1)
        self.epochs = itertools.count(1)
        self.generation = 0
        self.errors: list[BaseException] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.manager_tasks: list[asyncio.Task[Any]] = []
        self.processes: list[Process] = []
        self.live: dict[str, Process] = {}
        self.there: dict[str, Process] = {}
        """As the registry has it."""
        self.strangers: dict[str, int] = dict.fromkeys(DEVICES, 0)
        self.has_cheated = False
        self.readings: dict[str, int] = {}
        self.granting: dict[tuple[int, str], int] = {}
        """(epoch, device) -> bytes that are being restored."""
        self.sent: set[str] = set()
        self.requests: dict[str, tuple[LeaseRequest, float]] = {}
        self.answers: dict[str, LeaseReply] = {}
        self.last_epoch: dict[str, int] = {}
        self.num_granted = self.num_refused = 0
        self.before: Callable[[str, MemoryCommand], None] = lambda _, __: None
        """Called for each command that is sent, before it goes."""
        gangs: dict[str, list[str]] = {}
        for name, (gang, _) in members.items():
            gangs.setdefault(gang, []).append(name)
        self.gangs = gangs
        self.leases = Leases(self, gangs, OPTIONS, self.clock)
        for name in members:
            self.spawn_tenant(name)

    def expect(self, holds: bool, words: str) -> None:
        if not holds:
            self.errors.append(AssertionError(words))

    # -- time

    @property
    def now(self) -> float:
        return self.clock.monotonic()

    def go(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.errors.append(error)

        task = self.loop.create_task(guarded())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def at(self, delay: float, work: Callable[[], None]) -> None:
        self.loop.call_later(max(delay, 0.0), work)

    def advance(self, seconds: float) -> None:
        """Everything that happens until then."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.check()

    def close(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()

    # -- the site

    def is_there(self, tenant: str) -> bool:
        return tenant in self.there

    async def command(self, tenant: str, command: MemoryCommand, within_s: float) -> MemoryReply:
        self.note_send(tenant, command)
        process = self.there.get(tenant)
        reply: asyncio.Future[MemoryReply] = self.loop.create_future()
        for _ in range(self.copies() if process is not None else 0):
            assert process is not None
            self.go(self.deliver(process, command, reply))
        try:
            async with asyncio.timeout(within_s):
                return await reply
        except TimeoutError:
            raise DeadlineExceeded(f"{tenant} did not answer") from None

    async def deliver(self, process: Process, command: MemoryCommand, reply: asyncio.Future[MemoryReply]) -> None:
        await asyncio.sleep(self.lag())
        await process.lives()
        answer = await process.tenant.command(command)
        for _ in range(self.copies()):
            await asyncio.sleep(self.lag())
            if not reply.done():
                reply.set_result(answer)

    def note_send(self, tenant: str, command: MemoryCommand) -> None:
        self.before(tenant, command)
        if command.command_id in self.sent:
            return
        self.sent.add(command.command_id)
        self.expect(command.epoch >= self.last_epoch.get(tenant, 0), "I4: epochs do not go back")
        self.last_epoch[tenant] = command.epoch
        if command.kind == "restore" and tenant in self.there:
            process = self.there[tenant]
            coming = [self.assets_of(process, tag) for tag in command.tags]
            asked = sum(asset.num_bytes for asset in coming if asset is not None and not asset.on_device)
            for device in process.devices if asked else ():
                key = (command.epoch, device)
                self.granting[key] = self.granting.get(key, 0) + asked
                room = self.readings[device] - MARGIN
                self.expect(self.granting[key] <= room, f"I2: {self.granting[key]} granted of {room} on {device}")

    def assets_of(self, process: Process, tag: Tag) -> Asset | None:
        return process.assets.get(tag)

    async def measure(self, uses: Mapping[int, Iterable[DeviceUse]]) -> dict[str, DeviceReading]:
        await asyncio.sleep(0.001)
        readings: dict[str, DeviceReading] = {}
        for device in (use.device for some in uses.values() for use in some):
            free = CAPACITY - self.used(device)
            if self.random.random() < self.weather.lie:
                free += self.random.randrange(-200, 400) * MIB
                self.has_cheated = True
            self.readings[device] = free
            readings[device] = DeviceReading(CAPACITY, free)
        return readings

    def note(self, device: str, tenant: str, kind: str, text: str) -> None:
        pass

    def spent(self, switch: str, phase: str, started_s: float, ended_s: float, devices: Iterable[str]) -> None:
        self.expect(ended_s >= started_s, phase)

    def spawn(self, work: Coroutine[Any, Any, LeaseReply], name: str) -> asyncio.Task[LeaseReply]:
        task = self.loop.create_task(work)
        self.manager_tasks.append(task)
        return task

    def restart_manager(self) -> None:
        self.generation += 1
        for task in self.manager_tasks:
            task.cancel()
        self.manager_tasks.clear()
        self.leases = Leases(self, self.gangs, OPTIONS, self.clock, incarnation=self.generation + 1)
        for request, _ in list(self.requests.values()):
            self.requests[request.request_id] = (request, self.now + 0.2 + request.deadline_s)
            self.go(self.ask(request, 0.2))

    # -- the tenants

    def spawn_tenant(self, name: str) -> None:
        process = Process(self, name, next(self.epochs))
        self.processes.append(process)
        self.live[name] = process
        self.at(0.01, lambda: self.registered(process))

    def registered(self, process: Process) -> None:
        if process.is_alive:
            self.there[process.name] = process
            self.leases.reports.pop(process.name, None)

    def kill(self, name: str, *, frees: bool = True) -> Process | None:
        process = self.live.pop(name, None)
        if process is None:
            return None
        process.is_alive = False
        self.at(self.random.random() * 0.1, lambda: self.gone(process))
        for device in process.devices if frees else ():
            self.at(self.random.random() * 2.0, lambda d=device: process.freed.add(d))
        return process

    def gone(self, process: Process) -> None:
        if self.there.get(process.name) is process:
            del self.there[process.name]
            self.leases.reports.pop(process.name, None)

    def stop(self, name: str) -> None:
        if name in self.live:
            self.live[name].is_stopped = True

    def cont(self, name: str) -> None:
        if name in self.live:
            self.live[name].is_stopped = False

    def leave(self, asset: Asset) -> None:
        self.expect(asset.policy != "keep", "a kept tag was told to leave")
        if not asset.on_device:
            return
        if asset.policy == "backup" and asset.dirty:
            asset.host_version = asset.device_version
        asset.on_device = False

    def come(self, process: Process, tags: Collection[Tag]) -> None:
        assets = [process.assets[tag] for tag in tags if not process.assets[tag].on_device]
        if max(map(self.used, process.devices)) + sum(a.num_bytes for a in assets) > CAPACITY:
            self.expect(self.has_cheated, f"out of memory at {process.name}: {tags}")
            raise MemoryFault("out of device memory")
        for asset in assets:
            asset.on_device = True
            if asset.policy == "backup":
                self.expect(asset.version in (0, asset.host_version), "I3: the contents are lost")
            asset.device_version = asset.version
            asset.dirty = asset.host_version < 0

    def work(self, name: str) -> None:
        """An active tenant writes to what it holds."""
        process = self.live.get(name)
        if process is None or not process.is_open:
            return
        for asset in process.assets.values():
            if asset.on_device and asset.policy == "backup":
                asset.version += 1
                asset.device_version = asset.version
                asset.dirty = True

    # -- the network

    def copies(self) -> int:
        if self.random.random() < self.weather.drop:
            return 0
        return 2 if self.random.random() < self.weather.double else 1

    def lag(self) -> float:
        return self.random.random() * self.weather.delay_s

    # -- leases

    def lease(self, gang: str, tags: tuple[Tag, ...], quiet: tuple[str, ...], active: bool, deadline_s: float) -> str:
        request = LeaseRequest(
            gang=gang, tags=tags, is_active=active, quiet=quiet, deadline_s=deadline_s,
            request_id=f"lease{next(self.count)}",
        )  # fmt: skip
        self.requests[request.request_id] = (request, self.now + deadline_s)
        self.go(self.ask(request))
        return request.request_id

    async def ask(self, request: LeaseRequest, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        generation = self.generation
        try:
            reply = await self.leases.lease(request)
        except asyncio.CancelledError:
            if generation == self.generation:
                raise
            return
        if self.requests.pop(request.request_id, None) is None:
            return
        self.answers[request.request_id] = reply
        if not reply.granted:
            self.num_refused += 1
            self.expect(reply.reason.startswith("refused"), reply.reason)
            return
        self.num_granted += 1
        self.check_granted(request)

    def check_granted(self, request: LeaseRequest) -> None:
        for process in self.live.values():
            known = self.leases.reports.get(process.name)
            if known is None or known.epoch != process.epoch:
                continue
            if process.gang == request.gang:
                missing = [t for t in request.tags if t in process.assets and not process.assets[t].on_device]
                self.expect(not missing, f"granted without {missing} at {process.name}")
                self.expect(process.is_open or not request.is_active, process.tenant.state)
            elif process.gang in request.quiet and self.weather == Weather() and not process.is_stopped:
                self.expect(not process.is_open, f"{process.name} was to be quiet")

    # -- the truth

    def used(self, device: str) -> int:
        return self.strangers[device] + sum(p.used(device) for p in self.processes)

    def check(self) -> None:
        for device in DEVICES:
            if not self.has_cheated:
                self.expect(self.used(device) <= CAPACITY, f"I1: {device} is overfull")
        for process in self.processes:
            for tag, asset in process.assets.items():
                if process.is_alive and asset.policy == "backup" and asset.version:
                    has_copy = (asset.on_device and asset.device_version == asset.version) or (
                        asset.host_version == asset.version
                    )
                    self.expect(has_copy, f"I3: {process.name} {tag} has no copy")
        for name, (request, until) in self.requests.items():
            self.expect(self.now <= until + 1.5, f"I10: {name} ({request.gang}) is not answered at its deadline")
        if self.errors:
            raise self.errors[0]
