"""A node in virtual time around the real arbiter and the real tenant machines: messages that are lost, doubled, late and
reordered; processes that die or stop in any state; copies that are slow; measurements that lie; strangers that take
memory; a manager that dies. The world knows the truth, byte by byte, and holds the arbiter to it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from myxa.core.device_memory import (
    DeviceReading,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagPolicy,
    TagReport,
    TenantReport,
)
from myxa.memory.leases.arbiter import Arbiter
from myxa.memory.leases.lease_ledger import TenantMachine, resting_state
from myxa.memory.leases.switch import ArbiterOptions, AskReport, Instruction, LeaseAnswer, Measure, Send

MIB = 1 << 20
CAPACITY = 1000 * MIB
RESERVE = 10 * MIB
MARGIN = 5 * MIB
RESIDUE = 5 * MIB
"""Of every process on a device, in no tag: the measurement has it, the books do not."""
OPTIONS = ArbiterOptions(reserve_bytes=RESERVE, margin_bytes=MARGIN, phase_s=20, resend_s=2, death_s=8)
TAGS: dict[str, dict[Tag, tuple[int, TagPolicy]]] = {
    "trainer": {
        "params": (120 * MIB, "rematerialise"),
        "grads": (200 * MIB, "discard"),
        "optimizer": (240 * MIB, "backup"),
        "nccl": (30 * MIB, "rematerialise"),
        "context": (20 * MIB, "keep"),
    },
    "rollout": {"weights": (120 * MIB, "backup"), "kv_cache": (420 * MIB, "discard"), "cuda_graph": (40 * MIB, "keep")},
    "other": {"frozen": (60 * MIB, "backup"), "workspace": (100 * MIB, "discard")},
}
ALL: dict[str, tuple[Tag, ...]] = {gang: tuple(tags) for gang, tags in TAGS.items()}
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


@dataclass
class Process:
    """One incarnation of a tenant."""

    name: str
    gang: str
    devices: tuple[str, ...]
    epoch: int
    assets: dict[Tag, Asset]
    machine: TenantMachine
    is_alive: bool = True
    is_stopped: bool = False
    freed: set[str] = field(default_factory=set)
    sequence: int = 0
    inbox: list[MemoryCommand] = field(default_factory=list)
    waiting: list[MemoryCommand] = field(default_factory=list)
    executed: list[tuple[str, int]] = field(default_factory=list)
    comm_epoch: int = 0

    def used(self, device: str) -> int:
        """Of that device, truly."""
        if device not in self.devices or device in self.freed:
            return 0
        return RESIDUE + sum(a.num_bytes for a in self.assets.values() if a.on_device)

    def report(self) -> TenantReport:
        self.sequence += 1
        return TenantReport(
            tenant=self.name, epoch=self.epoch, gang=self.gang, devices=self.devices, pids=(self.epoch,),
            started_at=(1,), state=self.machine.state, tags=tuple(a.report(tag) for tag, a in self.assets.items()),
            comm_epoch=self.comm_epoch,
            sequence=self.sequence,
        )  # fmt: skip


class World:
    """See the module's head."""

    def __init__(self, seed: int, members: Members = MEMBERS) -> None:
        self.members = members
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = Weather()
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count(1)
        self.epochs = itertools.count(1)
        self.arbiter = Arbiter(OPTIONS)
        self.generation = 0
        self.processes: list[Process] = []
        self.live: dict[str, Process] = {}
        self.strangers: dict[str, int] = dict.fromkeys(DEVICES, 0)
        self.has_cheated = False
        self.readings: dict[str, list[tuple[float, int]]] = {device: [] for device in DEVICES}
        self.sent: set[str] = set()
        self.leases: dict[str, tuple[LeaseRequest, float]] = {}
        self.answers: dict[str, LeaseReply] = {}
        self.last_epoch: dict[str, int] = {}
        self.num_granted = self.num_refused = 0
        for name in members:
            self.spawn(name)

    # -- time

    def at(self, delay: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + max(delay, 0.0), next(self.count), work))

    def advance(self, seconds: float) -> None:
        """Everything that happens until then, the arbiter's ticks included."""
        until = self.now + seconds
        for _ in range(200_000):
            wake = max(self.arbiter.wakes_at(), self.now)
            due = min(self.heap[0][0] if self.heap else until, wake)
            if due >= until:
                break
            self.now = max(self.now, due)
            if self.heap and self.heap[0][0] <= wake:
                heapq.heappop(self.heap)[2]()
            else:
                self.now += 0.001
                self.do(self.arbiter.tick(self.now))
            self.check()
        else:
            raise AssertionError("the arbiter spins")
        self.now = until

    # -- the manager's side

    def do(self, instructions: list[Instruction]) -> None:
        restores: dict[str, int] = {}
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.note_send(instruction, restores)
                self.call(instruction)
            elif isinstance(instruction, Measure):
                self.later(instruction.after_s + 0.001, lambda m=instruction: self.measure(m))
            elif isinstance(instruction, AskReport):
                self.later(self.lag(), lambda a=instruction: self.ask(a))
            elif isinstance(instruction, LeaseAnswer):
                self.answered(instruction)
        for device, asked in restores.items():
            self.check_proof(device, asked)

    def later(self, delay: float, work: Callable[[], None]) -> None:
        """Nothing happens if another manager is there by then."""
        generation = self.generation
        self.at(delay, lambda: work() if generation == self.generation else None)

    def tell_gone(self, process: Process) -> None:
        """The manager finds no such process."""
        self.later(0.01, lambda: self.do(self.arbiter.died(process.name, process.epoch, "gone", self.now)))

    def note_send(self, send: Send, restores: dict[str, int]) -> None:
        command = send.command
        if command.command_id in self.sent:
            return
        self.sent.add(command.command_id)
        assert command.epoch >= self.last_epoch.get(send.tenant, 0), "I4: epochs do not go back"
        self.last_epoch[send.tenant] = command.epoch
        if command.kind == "restore":
            report = self.arbiter.ledger.tenants[send.tenant].report
            asked = sum(
                t.num_bytes for t in report.tags if t.tag in command.tags and not t.backing.startswith("mapped")
            )
            for device in report.devices if asked else ():
                restores[device] = restores.get(device, 0) + asked

    def check_proof(self, device: str, asked: int) -> None:
        """I2: a grant follows a reading with room for it."""
        _, free = self.readings[device][-1]
        assert free >= asked + MARGIN, f"I2: {device}: {asked} granted after {self.readings[device][-4:]}"
        held = self.arbiter.ledger.held(device)
        assert held <= CAPACITY - RESERVE or self.has_cheated, f"I1: {held} promised on {device}"

    def measure(self, measure: Measure) -> None:
        readings: dict[str, DeviceReading] = {}
        for device in measure.devices:
            free = CAPACITY - self.used(device)
            if self.random.random() < self.weather.lie:
                free += self.random.randrange(-200, 400) * MIB
                self.has_cheated = True
            self.readings[device].append((self.now, free))
            readings[device] = DeviceReading(CAPACITY, free)
        self.do(self.arbiter.measured(measure.key, readings, self.now))

    def ask(self, ask: AskReport) -> None:
        process = self.live.get(ask.tenant)
        if process is None or process.is_stopped or self.random.random() < self.weather.drop:
            return
        report = process.report()
        self.later(self.lag(), lambda: self.hear(report, self.arbiter.reported))

    def hear(self, report: TenantReport, event: Callable[[TenantReport, float], list[Instruction]]) -> None:
        self.do(event(report, self.now))
        process = next(p for p in self.processes if p.epoch == report.epoch)
        if not process.is_alive:  # it has ended meanwhile
            self.tell_gone(process)

    def call(self, send: Send) -> None:
        process = self.live.get(send.tenant)
        command = send.command
        silent = command.deadline_s + 1
        self.later(silent, lambda: self.do(self.arbiter.unanswered(command.command_id, self.now)))
        if process is None or process.epoch != send.tenant_epoch:
            return
        for _ in range(self.copies()):
            self.at(self.lag(), lambda: self.deliver(process, command))

    def restart_manager(self) -> None:
        self.generation += 1
        self.arbiter = Arbiter(OPTIONS, incarnation=self.generation + 1)
        for process in self.processes:
            if process.is_alive:
                self.register(process, self.random.random())
        for request, _ in list(self.leases.values()):
            self.later(0.2, lambda r=request: self.do(self.arbiter.leased(r, self.now)))
            self.leases[request.request_id] = (request, self.now + 0.2 + request.deadline_s)

    # -- the tenants' side

    def spawn(self, name: str) -> None:
        gang, devices = self.members[name]
        assets: dict[Tag, Asset] = {tag: Asset(num_bytes, policy) for tag, (num_bytes, policy) in TAGS[gang].items()}
        process = Process(name, gang, devices, next(self.epochs), assets, TenantMachine(name))
        self.processes.append(process)
        self.live[name] = process
        self.register(process, 0.01)

    def register(self, process: Process, delay: float) -> None:
        def go() -> None:
            if process.is_alive and not process.is_stopped:
                self.hear(process.report(), self.arbiter.registered)
            elif process.is_alive:
                self.register(process, 0.3)

        self.later(delay, go)

    def kill(self, name: str) -> None:
        process = self.live.pop(name, None)
        if process is None:
            return
        process.is_alive = False
        self.at(self.random.random() * 0.1, lambda: self.do(self.arbiter.died(name, process.epoch, "killed", self.now)))
        for device in process.devices:
            self.at(self.random.random() * 2.0, lambda d=device: process.freed.add(d))

    def stop(self, name: str) -> None:
        if name in self.live:
            self.live[name].is_stopped = True

    def cont(self, name: str) -> None:
        process = self.live.get(name)
        if process is not None and process.is_stopped:
            process.is_stopped = False
            inbox, process.inbox = process.inbox, []
            for command in inbox:
                self.deliver(process, command)

    def deliver(self, process: Process, command: MemoryCommand) -> None:
        if not process.is_alive:
            return
        if process.is_stopped:
            process.inbox.append(command)
            return
        verdict = process.machine.decide(command)
        if verdict.do == "again" and verdict.reply is not None:
            self.reply(verdict.reply)
        elif verdict.do == "refuse":
            reply = MemoryReply(
                command_id=command.command_id, report=process.report(), accepted=False, reason=verdict.reason
            )
            self.reply(reply)
        elif verdict.do in ("wait", "join"):
            process.waiting.append(command)
        else:
            ids = [done[0] for done in process.executed]
            assert command.command_id not in ids, "I5: carried out twice"
            assert not process.executed or command.epoch >= process.executed[-1][1], "I4: an older epoch obeyed"
            process.executed.append((command.command_id, command.epoch))
            if command.kind in ("release", "restore"):
                assert process.machine.state in ("releasing", "restoring"), "I6"
            self.at(self.random.random() * self.weather.slow_s, lambda: self.finish(process, command))

    def finish(self, process: Process, command: MemoryCommand) -> None:
        if not process.is_alive:
            return
        if process.is_stopped:
            self.at(0.2, lambda: self.finish(process, command))
            return
        reason = self.apply(process, command)
        reply = MemoryReply(command_id=command.command_id, report=process.report(), accepted=not reason, reason=reason)
        process.machine.finished(reply)
        self.reply(reply)
        waiting, process.waiting = process.waiting, []
        for each in waiting:
            self.deliver(process, each)

    def apply(self, process: Process, command: MemoryCommand) -> str:
        machine, reason = process.machine, ""
        if command.kind == "drain":
            if machine.state == "draining":
                machine.rest("quiesced")
            return ""
        if command.kind == "commit":
            machine.rest("active")
            return ""
        if command.kind == "release":
            for tag in command.tags:
                self.leave(process.assets[tag])
        else:
            reason = self.come(process, command)
        machine.rest(resting_state(tuple(a.report(tag) for tag, a in process.assets.items())))
        return reason

    def leave(self, asset: Asset) -> None:
        assert asset.policy != "keep", "a kept tag was told to leave"
        if not asset.on_device:
            return
        if asset.policy == "backup" and asset.dirty:
            asset.host_version = asset.device_version
        asset.on_device = False

    def come(self, process: Process, command: MemoryCommand) -> str:
        assets = [process.assets[tag] for tag in command.tags if not process.assets[tag].on_device]
        if max(map(self.used, process.devices)) + sum(a.num_bytes for a in assets) > CAPACITY:
            assert self.has_cheated, f"out of memory at {process.name}: {command}"
            return "out of device memory"
        for asset in assets:
            asset.on_device = True
            if asset.policy == "backup":
                assert asset.version == 0 or asset.host_version == asset.version, "I3: the contents are lost"
            asset.device_version = asset.version
            asset.dirty = asset.host_version < 0
        if "nccl" in command.tags:
            process.comm_epoch = command.epoch
        return ""

    def work(self, name: str) -> None:
        """An active tenant writes to what it holds."""
        process = self.live.get(name)
        if process is None or process.machine.state != "active" or process.machine.running is not None:
            return
        for asset in process.assets.values():
            if asset.on_device and asset.policy == "backup":
                asset.version += 1
                asset.device_version = asset.version
                asset.dirty = True
        report = process.report()
        self.later(self.lag(), lambda: self.hear(report, self.arbiter.reported))

    def reply(self, reply: MemoryReply) -> None:
        for _ in range(self.copies()):
            self.later(self.lag(), lambda: self.hear(reply.report, lambda _, now: self.arbiter.replied(reply, now)))

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
        self.leases[request.request_id] = (request, self.now + deadline_s)
        self.do(self.arbiter.leased(request, self.now))
        return request.request_id

    def answered(self, answer: LeaseAnswer) -> None:
        request, _ = self.leases.pop(answer.request_id, (None, 0.0))
        self.answers[answer.request_id] = answer.reply
        if request is None:
            return
        if not answer.reply.granted:
            self.num_refused += 1
            assert answer.reply.reason.startswith("refused"), answer.reply.reason
            return
        self.num_granted += 1
        for process in self.live.values():
            if not self.is_usable(process):
                continue
            if process.gang == request.gang:
                missing = [t for t in request.tags if t in process.assets and not process.assets[t].on_device]
                assert not missing, f"granted without {missing} at {process.name}"
                assert (process.machine.state == "active") or not request.is_active, process.machine.state
            elif process.gang in request.quiet:
                assert process.machine.state != "active", f"{process.name} was to be quiet"
        self.check_comms(request)

    def check_comms(self, request: LeaseRequest) -> None:
        """I7: a gang whose communicators are there has all of them from one epoch."""
        members = [p for p in self.live.values() if p.gang == request.gang and "nccl" in p.assets]
        if "nccl" in request.tags and all(map(self.is_usable, members)):
            assert len({p.comm_epoch for p in members}) <= 1, "I7: communicators of different epochs"

    def is_usable(self, process: Process) -> bool:
        known = self.arbiter.ledger.tenants.get(process.name)
        return known is not None and known.is_usable and known.report.epoch == process.epoch

    # -- the truth

    def used(self, device: str) -> int:
        return self.strangers[device] + sum(p.used(device) for p in self.processes)

    def check(self) -> None:
        for device in self.readings:
            if not self.has_cheated:
                assert self.used(device) <= CAPACITY, f"I1: {device} is overfull"
        for process in self.live.values():
            known = self.arbiter.ledger.tenants.get(process.name)
            if known is not None and known.report.epoch == process.epoch:
                assert known.held_bytes + RESIDUE >= max(map(process.used, process.devices)), (
                    f"the ledger has less of {process.name} than it holds"
                )
        for process in self.processes:
            for tag, asset in process.assets.items():
                if process.is_alive and asset.policy == "backup" and asset.version:
                    has_copy = (asset.on_device and asset.device_version == asset.version) or (
                        asset.host_version == asset.version
                    )
                    assert has_copy, f"I3: {process.name} {tag} has no copy"
        for name, (request, until) in self.leases.items():
            assert self.now <= until + 1.5, f"I10: {name} ({request.gang}) is not answered at its deadline"
