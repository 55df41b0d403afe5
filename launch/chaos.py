"""Faults of a run on purpose: at once, or in a series that a seed determines; and what was done so far.

`FaultInjector` acts as `myxa kill` does: by signals that the agents of the nodes send. Every act is an event of the
run and a line of its audit log. `RandomFaults` draws which actor fails next, and how; it is pure. `DiskFill` takes up
space in the run directory for a while.

`cut_apart` makes a network partition between some actors and others: each side gets the order to cut the other off.
Actors of one host announce by messages what they pass through shared memory, so that stops as well. The launchers see
the ends of their own processes without a network, so they still see them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..actors.contracts import CoordinatorContract, MonitorContract
from ..actors.coordinator.audit import AUDIT_FILE, AuditLog
from ..core.config import RunConfig
from ..core.config.run import FaultName
from ..core.errors import CallError, ConfigError, LaunchError, MyxaError, NoSuchActor
from ..core.knobs import AuditRecord, Operator
from ..core.messages import Event, Record, Telemetry
from ..core.refs import with_deadline
from ..transport.node import Node
from ..transport.registry.registry import REGISTRY
from .contracts import ProcessContract, process_name
from .run_dir import RunDir
from .supervisor.run_actors import ActorStatus

if TYPE_CHECKING:
    from .supervisor.run_supervisor import RunSupervisor


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """What was drawn."""

    fault: FaultName
    actor: str


class RandomFaults:
    """One series of draws. The same seed and the same actors give the same series."""

    def __init__(self, seed: int, faults: Sequence[FaultName], targets: Sequence[str]) -> None:
        """`targets`: shell patterns. Raises ConfigError if there is nothing to draw from."""
        if not faults or not targets:
            raise ConfigError("random faults need faults and targets", remedy='such as "kill" and "rollout/*"')
        self._random = random.Random(seed)
        self._faults = tuple(faults)
        self._targets = tuple(targets)

    def draw(self, roster: Sequence[ActorStatus]) -> DrawnFault | None:
        """The next fault; None if no target is up. It draws the same count of random numbers either way."""
        up = [r.name for r in roster if r.state == "up" and r.pid and not r.is_leaving and self._is_meant(r.name)]
        chance, fault = self._random.random(), self._random.choice(self._faults)
        return DrawnFault(fault, sorted(up)[int(chance * len(up))]) if up else None

    def _is_meant(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._targets)


BALLAST = "chaos-ballast"
NUM_TRIES = 5
"""To take all that is left, of a disk that others write to."""


class DiskFill:
    """Of one run."""

    def __init__(self, folder: Path, spared: Path = Path("/")) -> None:
        """`spared`: on whose file system nothing is taken."""
        self._spared = spared
        self._path = folder / BALLAST

    def fill(self, size_bytes: int) -> int:
        """Take so many bytes, or what is left if that is less; returns how many. Blocks.

        Raises ConfigError where the folder is on the file system that is spared, LaunchError if the disk refuses.
        """
        folder = self._path.parent
        if folder.stat().st_dev == self._spared.stat().st_dev:
            raise ConfigError(
                f"{folder} is on the machine's own file system, which is not filled up",
                remedy="put run.dir on a file system of its own, such as a small tmpfs",
            )
        self.empty()
        return self._fill(size_bytes, NUM_TRIES)

    def _fill(self, size_bytes: int, num_tries: int) -> int:
        wanted = min(size_bytes, shutil.disk_usage(self._path.parent).free)
        try:
            return self._take(wanted)
        except LaunchError:
            if wanted == size_bytes or num_tries == 1:
                raise
        return self._fill(size_bytes, num_tries - 1)  # others have written meanwhile: less is left

    def _take(self, num_bytes: int) -> int:
        try:
            with self._path.open("wb") as file:
                if num_bytes:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            self.empty()
            raise LaunchError(f"{self._path} cannot be written: {error.strerror}", remedy="ask for less") from error
        return num_bytes

    def empty(self) -> None:
        """Give it all back."""
        self._path.unlink(missing_ok=True)


TELL_S = 5.0
LAUNCHER = "launcher"
"""Name of node 0's launcher, with the registry, in lists of actors to cut off from."""

_log = logging.getLogger("myxa.chaos")


async def cut_apart(node: Node, some: Sequence[str], others: Sequence[str], for_s: float) -> tuple[str, ...]:
    """Between each actor of `some` and each of `others` (actors' names, or `LAUNCHER`) nothing passes, either way, for
    `for_s`. Returns those of `some` that were told; `node` is the launcher's own, which is cut off last."""
    far = [name for name in others if name != LAUNCHER and name not in some]
    beyond = (*far, REGISTRY) if LAUNCHER in others else tuple(far)
    await asyncio.gather(*(_tell(node, name, tuple(some), for_s) for name in far))
    told = await asyncio.gather(*(_tell(node, name, beyond, for_s) for name in some))
    met = tuple(name for name, heard in zip(some, told, strict=True) if heard)
    if LAUNCHER in others:
        for name in met:
            try:
                node.cut_off(name, for_s)
            except NoSuchActor as error:  # it has ended meanwhile
                _log.info("the launcher did not cut it off: %s", error)
    return met


async def _tell(node: Node, name: str, others: tuple[str, ...], for_s: float) -> bool:
    if not others:
        return False
    try:
        await with_deadline(node.ref(ProcessContract, process_name(name)), TELL_S).cut_off(others, for_s)
    except CallError as error:
        _log.info("%s was not told to cut %s off: %s", name, ", ".join(others), error)
        return False
    return True


MAX_ACTS = 10_000
"""So many are remembered."""
LOOK_S = 0.5
WHO = Operator(user="chaos", via="auto")
FAULT = "a fault on purpose (`myxa chaos`)"

T = TypeVar("T")


class ChaosAct(Record, frozen=True):
    """One fault that was brought about."""

    wall_s: float
    fault: str
    actors: tuple[str, ...]
    detail: str = ""


class FaultContext(Protocol):
    """The run that is to fail, as its node 0 knows it; the context of the control verbs is one."""

    @property
    def node(self) -> Node: ...
    @property
    def run_dir(self) -> RunDir: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def supervisor(self) -> RunSupervisor: ...


class FaultInjector:
    """One per run, in its context."""

    def __init__(self) -> None:
        self.acts: deque[ChaosAct] = deque(maxlen=MAX_ACTS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._series: asyncio.Task[None] | None = None

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raises ConfigError unless the run may be made to fail."""
        if not config.run.chaos:
            raise ConfigError("this run is not to be made to fail", remedy="start one with run.chaos = true")

    @property
    def has_series(self) -> bool:
        """Whether random faults are being injected."""
        return self._series is not None and not self._series.done()

    async def strike(
        self, context: FaultContext, fault: str, meant: Sequence[ActorStatus], for_s: float, others: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Bring one about now: "kill", "stop", "cont", "delay" for `for_s`, or "partition" for as long, of `others` as
        `_part` has it. Returns whom it met."""
        if fault == "partition":
            return await self._part(context, meant, others, for_s)
        name = {"kill": "KILL", "cont": "CONT"}.get(fault, "STOP")
        sending = self._begin(context.supervisor.send_signal(meant, name, FAULT))
        if fault == "delay":
            self._begin(_go_on_later(context, meant, sending, for_s))
        sent = await asyncio.shield(sending)  # the caller may go before the answer; what has begun is finished here
        await self._note(context, ChaosAct(wall_s=context.node.clock.wall(), fault=fault, actors=tuple(sent)))
        return tuple(sent)

    async def _part(
        self, context: FaultContext, meant: Sequence[ActorStatus], others: Sequence[str], for_s: float
    ) -> tuple[str, ...]:
        """Cut these off from the others for so long; no others named: from all, and from the launcher of node 0.
        Returns the actors that were cut off."""
        names = [record.name for record in meant]
        apart = others or [LAUNCHER, *(r.name for r in context.supervisor.statuses() if r.pid and r.name not in names)]
        # Shielded: a cut on one side only would be a fault that no network has.
        met = await asyncio.shield(self._begin(cut_apart(context.node, names, apart, for_s)))
        detail = f"from {', '.join(apart)}, for {for_s:g} s"
        await self._note(
            context, ChaosAct(wall_s=context.node.clock.wall(), fault="partition", actors=met, detail=detail)
        )
        return met

    async def fill_disk(self, context: FaultContext, size_bytes: int, for_s: float) -> int:
        """Take space of the run directory's file system, on node 0, and give it back later. Returns how much."""
        ballast = DiskFill(context.run_dir.path)
        filling = asyncio.get_running_loop().run_in_executor(None, ballast.fill, size_bytes)
        self._begin(_empty_later(ballast, filling, for_s))  # from the first byte on, even if the caller goes
        taken = await asyncio.shield(filling)
        detail = f"{taken} bytes of {context.run_dir.path}"
        await self._note(
            context, ChaosAct(wall_s=context.node.clock.wall(), fault="fill-disk", actors=(), detail=detail)
        )
        return taken

    def begin_series(self, context: FaultContext, every_s: float, random_faults: RandomFaults, delay_s: float) -> None:
        """Begin random faults, instead of those before."""
        self.end_series()
        self._series = self._begin(self._go_through(context, every_s, random_faults, delay_s))

    def end_series(self) -> bool:
        """No more of them; False if there were none."""
        series, self._series = self._series, None
        return series is not None and series.cancel()

    async def _go_through(
        self, context: FaultContext, every_s: float, random_faults: RandomFaults, delay_s: float
    ) -> None:
        await self._until_it_runs(context)
        while True:
            await asyncio.sleep(every_s)
            drawn = random_faults.draw(context.supervisor.statuses())
            if drawn is None:
                continue
            meant = [record for record in context.supervisor.statuses() if record.name == drawn.actor]
            try:
                await self.strike(context, drawn.fault, meant, delay_s)
            except MyxaError as error:
                _log.info("%s of %s did not come about: %s", drawn.fault, drawn.actor, error)

    async def _until_it_runs(self, context: FaultContext) -> None:
        coordinator = with_deadline(context.node.ref(CoordinatorContract, "coordinator"), TELL_S)
        while True:
            with contextlib.suppress(CallError):
                if (await coordinator.status()).phase == "running":
                    return
            await asyncio.sleep(LOOK_S)

    async def _note(self, context: FaultContext, act: ChaosAct) -> None:
        """In memory, in the events, in the audit log; none of them may hold up the next act."""
        self.acts.append(act)
        text = f"{act.fault}: {', '.join(act.actors) or act.detail}"
        _log.warning("chaos: %s", text)
        self._begin(_tell_monitor(context, Event(source="chaos", wall_s=act.wall_s, kind="chaos", text=text)))
        record = AuditRecord(
            number=0, wall_s=act.wall_s, verb="chaos", who=WHO, result="done", detail=text,
            arguments={"fault": act.fault, "actors": list(act.actors)},
        )  # fmt: skip
        try:
            await asyncio.to_thread(AuditLog(context.run_dir.path / AUDIT_FILE).append, record)
        except MyxaError as error:
            _log.error("the audit log did not take it: %s", error)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Kept and ended here: the launcher has no actor context of its own to spawn it in.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, context: FaultContext) -> None:
        """The run is over."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        DiskFill(context.run_dir.path).empty()


async def _tell_monitor(context: FaultContext, event: Event) -> None:
    """Lossy, as all telemetry."""
    try:
        await with_deadline(context.node.ref(MonitorContract, "monitor"), TELL_S).telemetry(Telemetry(events=(event,)))
    except CallError as error:
        _log.info("the monitor was not told: %s", error)


async def _go_on_later(
    context: FaultContext, meant: Sequence[ActorStatus], stopping: asyncio.Future[list[str]], for_s: float
) -> None:
    """Also where only some of them could be stopped, and when the run ends before the time is over."""
    try:
        if await _ended_well(stopping):
            await asyncio.sleep(for_s)
    finally:
        try:
            async with asyncio.timeout(TELL_S):
                await context.supervisor.send_signal(meant, "CONT", FAULT)
        except (MyxaError, TimeoutError) as error:
            _log.info("what was held up is not there any more: %s", error)


async def _empty_later(ballast: DiskFill, filling: asyncio.Future[int], for_s: float) -> None:
    try:
        if await _ended_well(filling):
            await asyncio.sleep(for_s)
    finally:
        await asyncio.wait({filling})  # a thread cannot be called back: what it takes is given back when it has it
        ballast.empty()


async def _ended_well(work: asyncio.Future[Any]) -> bool:
    """Wait for it; its error is for its caller, who may be gone."""
    await asyncio.wait({work})
    return not work.cancelled() and work.exception() is None


@contextlib.asynccontextmanager
async def chaos_of(dispatcher: FaultInjector, context: FaultContext) -> AsyncGenerator[None]:
    """While this lasts, what the table [chaos] says of random faults comes about."""
    settings = context.config.chaos
    faults: tuple[FaultName, ...] = settings.faults_named
    if context.config.run.chaos and settings.every_s:
        dispatcher.begin_series(
            context, settings.every_s, RandomFaults(settings.seed, faults, settings.targets), settings.delay_s
        )
    try:
        yield
    finally:
        await dispatcher.close(context)
