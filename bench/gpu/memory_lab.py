"""A gang of trainer stand-ins and one of engine stand-ins on one, two or four GPUs, a real memory manager between them,
and this process as launcher and leader: it asks for leases as the leader of a colocated run does, over ZeroMQ.

One `cycle` is a whole round: engines generate, trainers get the devices and make a step, engines get them back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_orders import ENGINE_TAGS, MANAGER, TRAINER_TAGS, StandInContract, WorkDone, WorkKind, WorkOrder
from memory_stages import Stage

from myxa.actors.contracts import MemoryContract
from myxa.actors.tenancy.memory_manager import read_gpu
from myxa.core.device_memory import DeviceView, LeaseReply, LeaseRequest, MemoryView, Tag
from myxa.core.refs import with_deadline
from myxa.memory.leases.lease_ledger import is_mapped
from myxa.transport.node import Node

HERE = Path(__file__).resolve().parent
START_S = 90.0
"""Of a process that imports torch on a bare machine."""
WORK_S = 120.0
SETTLE_S = 1.0
"""What was freed counts as used until the driver has cleared it: some 0.2 s after 110 GiB left."""
ASTRAY = 256 << 20
KNOWN_S = 20.0
"""From being there to being known to the manager."""


class LabError(RuntimeError):
    """A lease was refused or a stand-in failed; the text says who holds what."""


@dataclass
class Cycle:
    """Seconds unless the name says otherwise."""

    exposed_in_s: float = 0.0
    """Neither side computes: from the engines' last product to the trainers' first, and what the update waited."""
    exposed_out_s: float = 0.0
    """From the end of the update to the engines' first product."""
    lease_in_s: float = 0.0
    lease_out_s: float = 0.0
    """Of it waiting for the manager's grants."""
    waited_s: float = 0.0
    compute_s: float = 0.0
    rebuild_s: float = 0.0
    update_s: float = 0.0
    copied_in: int = 0
    copied_out: int = 0
    skew_in_s: float = 0.0
    """Between the first and the last rank's first product."""
    skew_out_s: float = 0.0
    unattributed: int = 0
    """Bytes of the worst device while engines have it. A pass of the trainer works with 0.6 GiB that no tag is for."""
    phases: dict[str, float] = field(default_factory=dict[str, float])


class Lab:
    """Start with `async with`; everything it started ends with it."""

    def __init__(
        self, options: argparse.Namespace, *, num_devices: int, work: Path, way: str = "ours", first_device: int = 0
    ) -> None:
        self._options, self.num_devices, self._work, self._way = options, num_devices, work, way
        self._first_device = first_device
        self.stages: dict[str, Stage] = {}
        self._node: Node | None = None
        self._numbers = itertools.count(1)
        self.rates: dict[str, float] = {}
        """Of plain pinned copies in the first trainer, GB/s, and what its pool took."""
        self.baseline_s = 0.0
        """Forward and backward with nothing beside them."""
        self.num_switches = 0
        """Changes of hands that were granted."""
        self.residues: dict[str, float] = {}
        """Gang -> bytes that stay of its worst member."""
        self.trainers = [f"trainer/{index}" for index in range(num_devices)]
        self.engines = [f"rollout/{index}" for index in range(num_devices)]

    # -- life

    async def __aenter__(self) -> Lab:
        self._work.mkdir(parents=True, exist_ok=True)
        self._node = await Node.attach(name="launcher/0")
        self._node.rendezvous.save(self._work / "rdzv.json")
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(asyncio.to_thread(stage.stop) for stage in self.stages.values()))
        if self._node is not None:
            with contextlib.suppress(Exception):
                await self._node.close(grace_s=0.5)

    @property
    def is_cuda(self) -> bool:
        return self._options.device == "cuda"

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    async def _open(self) -> None:
        if self._way == "ours":
            self.spawn(MANAGER)
        for name in (*self.trainers, *self.engines):
            self.spawn(name)
        await self.node.wait_for(*self.stages, timeout_s=START_S)
        if self._way == "ours":
            await self._until_known({*self.trainers, *self.engines})
            await self.lease("trainer", TRAINER_TAGS, quiet=("rollout",))
        made = await self.work("trainer", "setup")
        self.rates = (await self.work("trainer", "rates"))[0].values | {"pool_s": made[0].values["pool_s"]}
        baseline = await self.work("trainer", "baseline", amount=self._options.micro_batches)
        self.baseline_s = max(done.values["compute_s"] for done in baseline)
        left = await self.work("trainer", "residue")
        self.residues = {"trainer": max(done.values["residue"] for done in left)}
        await self._first_turn_of_engines()

    async def _until_known(self, names: set[str]) -> None:
        """They have all told the manager who they are. Raises LabError naming who did not."""
        give_up_at = time.monotonic() + KNOWN_S
        missing = names
        while missing and time.monotonic() < give_up_at:
            known = {tenant.tenant for device in (await self.view()).devices for tenant in device.tenants}
            missing = names - known
            await asyncio.sleep(0.05)
        if missing:
            logs = "\n".join(self.stages[name].last_words() for name in sorted(missing))
            raise LabError(f"{', '.join(sorted(missing))} did not register with {MANAGER} within {KNOWN_S:g} s\n{logs}")

    async def _first_turn_of_engines(self) -> None:
        """They take what they need once the trainers have left."""
        if self._way == "ours":
            await self.lease("rollout", ENGINE_TAGS, quiet=("trainer",))
        else:
            await self.work("trainer", "pause")
        made = await self.work("rollout", "setup")
        self.residues["engine"] = max(done.values["residue"] for done in made)
        await self.work("rollout", "generate")

    def spawn(self, name: str) -> Stage:
        """Start, or start again, one process."""
        options = self._options
        arguments = [
            name, "--rdzv", str(self._work / "rdzv.json"), "--device", options.device, "--way", self._way,
            "--gpus", str(self.num_devices),
            "--first-device", str(self._first_device), "--scale", str(options.scale), "--matrix", str(options.matrix),
            "--tokens", str(options.tokens), "--mem-fraction", str(options.mem_fraction),
            "--capacity-mib", str(options.capacity_mib), "--plain-mib", str(options.plain_mib),
        ]  # fmt: skip
        log = self._work / f"{name.replace('/', '_')}.log"
        script = "memory_lab_manager.py" if name == MANAGER else "memory_tenants.py"
        stage = Stage(name, str(HERE / script), arguments, log=log)
        self.stages[name] = stage
        return stage

    # -- what a leader does

    async def work(self, gang: str, kind: WorkKind, *, amount: float = 0.0, overlap: bool = False) -> list[WorkDone]:
        """Every member of the gang does it; their figures by rank. Raises LabError."""
        order = WorkOrder(kind=kind, amount=amount, overlap=overlap)
        names = self.trainers if gang == "trainer" else self.engines
        calls = [with_deadline(self.node.ref(StandInContract, name), WORK_S).work(order) for name in names]
        done = await asyncio.gather(*calls, return_exceptions=True)
        for name, result in zip(names, done, strict=True):
            if isinstance(result, BaseException):
                raise LabError(f"{name} failed at {kind!r}: {result}\n{self.stages[name].last_words()}") from result
        return [result for result in done if isinstance(result, WorkDone)]

    async def lease(
        self,
        gang: str,
        tags: Sequence[Tag],
        *,
        is_active: bool = True,
        quiet: Sequence[str] = (),
        limit_s: float = 60.0,
    ) -> LeaseReply:
        """Granted, or LabError with the reason."""
        request = LeaseRequest(
            gang=gang, tags=tuple(tags), is_active=is_active, quiet=tuple(quiet), deadline_s=limit_s,
            request_id=f"lab-{next(self._numbers)}",
        )  # fmt: skip
        reply = await with_deadline(self.node.ref(MemoryContract, MANAGER), limit_s + 10).lease(request)
        if not reply.granted:
            raise LabError(f"lease of {tags} for {gang} refused: {reply.reason}")
        return reply

    async def view(self) -> MemoryView:
        return await with_deadline(self.node.ref(MemoryContract, MANAGER), 10).view()

    async def unattributed(self) -> int:
        """Bytes of the worst device that nobody accounts for, measured here and now; 0 where nobody keeps accounts."""
        if self._way == "saver":
            return 0
        give_up_at = time.monotonic() + SETTLE_S
        while True:
            devices = (await self.view()).devices
            worst = max([await asyncio.to_thread(self._astray, device) for device in devices])
            if worst <= ASTRAY or time.monotonic() > give_up_at:
                return worst
            await asyncio.sleep(0.05)

    def _astray(self, device: DeviceView) -> int:
        if device.device.startswith("host:"):  # only its manager knows which processes make it up
            return device.unattributed_bytes
        reading = read_gpu(device.device)
        stays = {"trainer": self.residues.get("trainer", 0.0), "rollout": self.residues.get("engine", 0.0)}
        held = sum(
            sum(tag.num_bytes for tag in tenant.tags if is_mapped(tag)) - tenant.reserved_bytes + stays[tenant.gang]
            for tenant in device.tenants
        )
        return max(0, reading.capacity_bytes - reading.free_bytes - reading.driver_bytes - int(held))

    # -- one round

    async def to_trainers(self) -> list[LeaseReply]:
        """All devices to the trainers; what the manager said, in order."""
        self.num_switches += 1
        if self._way == "saver":
            await self.work("rollout", "pause")
            await self.work("trainer", "resume")
            return []
        return [await self.lease("trainer", TRAINER_TAGS, quiet=("rollout",))]

    async def to_engines(self, version: int) -> list[LeaseReply]:
        """Weights first, which are handed over while the trainers still hold what they have, then all."""
        self.num_switches += 1
        if self._way == "saver":
            await self.work("trainer", "pause")
            await self.work("rollout", "resume")
            await self.work("rollout", "load", amount=version)
            return []
        first = await self.lease("rollout", ("weights",), is_active=False, quiet=("trainer",))
        await self.work("rollout", "load", amount=version)
        return [first, await self.lease("rollout", ENGINE_TAGS, quiet=("trainer",))]

    async def cycle(self, version: int, *, overlap: bool) -> Cycle:
        """See the module's head."""
        found = Cycle()
        await self.work("trainer", "mode", overlap=overlap)
        generated = await self.work("rollout", "generate", amount=self._options.generate_s)
        last = max(done.values["end_at"] for done in generated)
        asked = time.monotonic()
        replies = await self.to_trainers()
        found.lease_in_s = time.monotonic() - asked
        _count(found, replies, "in")
        steps = await self.work("trainer", "step", amount=self._options.micro_batches, overlap=overlap)
        firsts = [done.values["first_kernel_at"] for done in steps]
        for name in ("waited_s", "compute_s", "rebuild_s", "update_s"):
            setattr(found, name, max(done.values[name] for done in steps))
        found.copied_in += int(sum(done.values["streamed_bytes"] for done in steps))
        found.skew_in_s = max(firsts) - min(firsts)
        found.exposed_in_s = max(firsts) - last + found.waited_s
        ended = max(done.values["end_at"] for done in steps)
        asked = time.monotonic()
        replies = await self.to_engines(version)
        found.lease_out_s = time.monotonic() - asked
        _count(found, replies, "out")
        again = await self.work("rollout", "generate", amount=0.0)
        firsts = [done.values["first_kernel_at"] for done in again]
        found.skew_out_s = max(firsts) - min(firsts)
        found.exposed_out_s = max(firsts) - ended
        found.unattributed = await self.unattributed()
        return found


def _count(cycle: Cycle, replies: Sequence[LeaseReply], way: str) -> None:
    for index, reply in enumerate(replies):
        setattr(cycle, f"copied_{way}", getattr(cycle, f"copied_{way}") + reply.copied_bytes)
        name = "in" if way == "in" else ("out, weights", "out, all")[index]
        for phase, seconds in reply.seconds.items():
            cycle.phases[f"{name}: {phase}"] = seconds


def add_lab_options(args: argparse.ArgumentParser) -> None:
    """What stand-ins are like."""
    args.add_argument("--scale", type=float, default=1.0, help="of the worked example: 8.2 thousand million parameters")
    args.add_argument("--matrix", type=int, default=8192, help="rows and columns of a parameter matrix")
    args.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    args.add_argument("--micro-batches", type=int, default=2)
    args.add_argument("--generate-s", type=float, default=0.05)
    args.add_argument("--mem-fraction", type=float, default=0.90, help="of the device, for the engine")
    args.add_argument("--capacity-mib", type=int, default=0, help="of the stand-in device of a dry run")
    args.add_argument("--plain-mib", type=int, default=4096, help="of plain pinned copies")


DRY = {
    "scale": 0.0004,
    "matrix": 128,
    "tokens": 16,
    "micro_batches": 1,
    "generate_s": 0.0,
    "capacity_mib": 48,
    "plain_mib": 4,
}


def shrink(options: argparse.Namespace) -> None:
    """Dry runs are tiny whatever was asked for."""
    if options.device == "cpu":
        for name, value in DRY.items():
            setattr(options, name, value)


def phase_rows(cycles: Sequence[Cycle]) -> list[tuple[str, ...]]:
    """Medians and largest of the manager's phases, ms."""
    names = {name: None for cycle in cycles for name in cycle.phases}
    rows: list[tuple[str, ...]] = []
    for name in names:
        values = [1e3 * cycle.phases[name] for cycle in cycles if name in cycle.phases]
        rows.append((name, f"{statistics.median(values):.1f}", f"{max(values):.1f}"))
    return rows


def column(cycles: Sequence[Cycle], name: str) -> list[float]:
    """One figure of all cycles."""
    found: list[Any] = [getattr(cycle, name) for cycle in cycles]
    return [float(value) for value in found]
