"""Where faults of a run are brought about: one at a time, in series by a seed, and what was done so far.

Works through what `myxa kill` works through: signals, sent by the agents of the nodes. Every act is an event of the run
and a line of its audit log. Knows a run as the verbs know it; must not know sockets or the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...actors.audit import AUDIT_FILE, AuditLog
from ...actors.contracts.roles import CoordinatorContract, MonitorContract
from ...core.actor import with_deadline
from ...core.config import RunConfig
from ...core.config.chaos import FaultName
from ...core.errors import CallError, ConfigError, MyxaError
from ...core.knobs import AuditRecord, Operator
from ...core.messages import Event, Record, Telemetry
from ...transport.node import Node
from ..run_dir import RunDir
from ..supervisor.roster import ActorRecord
from ..supervisor.signalling import send_signal
from .ballast import Ballast
from .lots import Lots
from .partition import LAUNCHER, cut_apart

if TYPE_CHECKING:
    from ..supervisor.run_supervisor import RunSupervisor

MAX_ACTS = 10_000
"""So many are remembered."""
LOOK_S = 0.5
TELL_S = 5.0
WHO = Operator(user="chaos", via="auto")
FAULT = "a fault on purpose (`myxa chaos`)"
_log = logging.getLogger("myxa.chaos")

T = TypeVar("T")


class ChaosAct(Record, frozen=True):
    """One fault that was brought about."""

    wall_s: float
    fault: str
    actors: tuple[str, ...]
    detail: str = ""


class ChaosRun(Protocol):
    """The run that is to fail, as its node 0 knows it; the room of the control verbs is one."""

    @property
    def node(self) -> Node: ...
    @property
    def run_dir(self) -> RunDir: ...
    @property
    def config(self) -> RunConfig: ...
    @property
    def supervisor(self) -> RunSupervisor: ...


class ChaosDesk:
    """One per run, in its room."""

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
        """Whether random faults go on."""
        return self._series is not None and not self._series.done()

    async def strike(
        self, room: ChaosRun, fault: str, meant: Sequence[ActorRecord], for_s: float, others: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Bring one about now: "kill", "stop", "cont", "delay" for `for_s`, or "partition" for as long, of `others` as
        `_part` has it. Returns whom it met."""
        if fault == "partition":
            return await self._part(room, meant, others, for_s)
        name = {"kill": "KILL", "cont": "CONT"}.get(fault, "STOP")
        sending = self._begin(send_signal(room.supervisor, meant, name, FAULT))
        if fault == "delay":
            self._begin(_go_on_later(room, meant, sending, for_s))
        sent = await asyncio.shield(sending)  # whoever asked may go before the answer; what has begun is ended here
        await self._note(room, ChaosAct(wall_s=room.node.clock.wall(), fault=fault, actors=tuple(sent)))
        return tuple(sent)

    async def _part(
        self, room: ChaosRun, meant: Sequence[ActorRecord], others: Sequence[str], for_s: float
    ) -> tuple[str, ...]:
        """Nothing passes between these and the others for so long; nobody named: all others, and the launcher of node
        0. Returns whom it met."""
        names = [record.name for record in meant]
        apart = others or [LAUNCHER, *(r.name for r in room.supervisor.roster() if r.pid and r.name not in names)]
        # Shielded: one side that is told and one that is not would be a fault that no network has.
        met = await asyncio.shield(self._begin(cut_apart(room.node, names, apart, for_s)))
        detail = f"from {', '.join(apart)}, for {for_s:g} s"
        await self._note(room, ChaosAct(wall_s=room.node.clock.wall(), fault="partition", actors=met, detail=detail))
        return met

    async def fill_disk(self, room: ChaosRun, size_bytes: int, for_s: float) -> int:
        """Take space of the run directory's file system, on node 0, and give it back later. Returns how much."""
        ballast = Ballast(room.run_dir.path)
        filling = asyncio.get_running_loop().run_in_executor(None, ballast.fill, size_bytes)
        self._begin(_empty_later(ballast, filling, for_s))  # from the first byte on, whatever becomes of whoever asked
        taken = await asyncio.shield(filling)
        detail = f"{taken} bytes of {room.run_dir.path}"
        await self._note(room, ChaosAct(wall_s=room.node.clock.wall(), fault="fill-disk", actors=(), detail=detail))
        return taken

    def begin_series(self, room: ChaosRun, every_s: float, lots: Lots, delay_s: float) -> None:
        """Random faults from now on, instead of those that went on."""
        self.end_series()
        self._series = self._begin(self._go_through(room, every_s, lots, delay_s))

    def end_series(self) -> bool:
        """No more of them; False if there were none."""
        series, self._series = self._series, None
        return series is not None and series.cancel()

    async def _go_through(self, room: ChaosRun, every_s: float, lots: Lots, delay_s: float) -> None:
        await self._until_it_runs(room)
        while True:
            await asyncio.sleep(every_s)
            lot = lots.draw(room.supervisor.roster())
            if lot is None:
                continue
            meant = [record for record in room.supervisor.roster() if record.name == lot.actor]
            try:
                await self.strike(room, lot.fault, meant, delay_s)
            except MyxaError as error:
                _log.info("%s of %s did not come about: %s", lot.fault, lot.actor, error)

    async def _until_it_runs(self, room: ChaosRun) -> None:
        coordinator = with_deadline(room.node.ref(CoordinatorContract, "coordinator"), TELL_S)
        while True:
            with contextlib.suppress(CallError):
                if (await coordinator.status()).phase == "running":
                    return
            await asyncio.sleep(LOOK_S)

    async def _note(self, room: ChaosRun, act: ChaosAct) -> None:
        """In memory, in the events, in the audit log; none of them may hold up the next act."""
        self.acts.append(act)
        text = f"{act.fault}: {', '.join(act.actors) or act.detail}"
        _log.warning("chaos: %s", text)
        self._begin(_tell(room, Event(source="chaos", wall_s=act.wall_s, kind="chaos", text=text)))
        record = AuditRecord(
            number=0, wall_s=act.wall_s, verb="chaos", who=WHO, result="done", detail=text,
            arguments={"fault": act.fault, "actors": list(act.actors)},
        )  # fmt: skip
        try:
            await asyncio.to_thread(AuditLog(room.run_dir.path / AUDIT_FILE).append, record)
        except MyxaError as error:
            _log.error("the audit log did not take it: %s", error)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Kept and ended here: the launcher has no actor context of its own to spawn it in.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, room: ChaosRun) -> None:
        """The run is over."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        Ballast(room.run_dir.path).empty()


async def _tell(room: ChaosRun, event: Event) -> None:
    """Lossy, as all telemetry."""
    try:
        await with_deadline(room.node.ref(MonitorContract, "monitor"), TELL_S).telemetry(Telemetry(events=(event,)))
    except CallError as error:
        _log.info("the monitor was not told: %s", error)


async def _go_on_later(
    room: ChaosRun, meant: Sequence[ActorRecord], stopping: asyncio.Future[list[str]], for_s: float
) -> None:
    """Also where only some of them could be stopped, and when the run ends before the time is over."""
    try:
        if await _ended_well(stopping):
            await asyncio.sleep(for_s)
    finally:
        try:
            async with asyncio.timeout(TELL_S):
                await send_signal(room.supervisor, meant, "CONT", FAULT)
        except (MyxaError, TimeoutError) as error:
            _log.info("what was held up is not there any more: %s", error)


async def _empty_later(ballast: Ballast, filling: asyncio.Future[int], for_s: float) -> None:
    try:
        if await _ended_well(filling):
            await asyncio.sleep(for_s)
    finally:
        await asyncio.wait({filling})  # a thread cannot be called back: what it takes is given back when it has it
        ballast.empty()


async def _ended_well(work: asyncio.Future[Any]) -> bool:
    """Waits for it; its error is for whoever asked for it, who may be gone."""
    await asyncio.wait({work})
    return not work.cancelled() and work.exception() is None


@contextlib.asynccontextmanager
async def chaos_of(desk: ChaosDesk, room: ChaosRun) -> AsyncGenerator[None]:
    """While this lasts, what the table [chaos] says of random faults comes about."""
    settings = room.config.chaos
    faults: tuple[FaultName, ...] = settings.faults_named
    if room.config.run.chaos and settings.every_s:
        desk.begin_series(room, settings.every_s, Lots(settings.seed, faults, settings.targets), settings.delay_s)
    try:
        yield
    finally:
        await desk.close(room)
