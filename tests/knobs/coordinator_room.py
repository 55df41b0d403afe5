"""The real coordinator with a trainer that makes a version every few milliseconds, and owners in other processes; the
coordinator may be killed and started again, as a launcher does."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.programs import Program, start_program
from tests.harness.waiting import until
from tests.knobs.knob_maker import Desk, make_desk

from myxa.actors.contracts import CoordinatorContract, TrainerContract
from myxa.actors.coordinator.coordinator import Coordinator
from myxa.actors.coordinator.options import CoordinatorOptions
from myxa.actors.knobs.owner import OwnsKnobs, pull
from myxa.actors.monitor.monitor import Monitor
from myxa.core.actor import PeerEvent
from myxa.core.clock import SystemClock
from myxa.core.config import RunConfig
from myxa.core.config.run import RunSettings
from myxa.core.knobs import ChangeReply, ChangeRequest, KnobValue, LiveKnobs, Operator
from myxa.core.messages import StepReport, WeightManifest
from myxa.core.retry import until_answered
from myxa.transport.node import Node

WHO = Operator(user="tester", via="test")
PATIENCE_S = 40.0
STEP_S = 0.05


class Trainer(OwnsKnobs, TrainerContract):
    """Steps for ever and notes the values of every step. It survives its coordinator, as the real one does: it reports in
    again, and tells each version until it is heard."""

    def __init__(self, live: LiveKnobs | None, version: int, manifest: WeightManifest | None = None) -> None:
        self.steps: dict[int, dict[str, KnobValue]] = {}
        self.num_starts = 0
        self._live, self._manifest = live, manifest
        self._version = version
        self._is_known = False
        """Whether a coordinator has heard of it; until then the first report goes on."""
        self._is_leading = False

    async def on_start(self) -> None:
        self.desk: Desk = make_desk(self.ctx.name, "lr", "clip")
        self.knob_owner = self.desk.owner
        self.ctx.watch("coordinator")
        self.ctx.spawn(self._report_in(), name="report-in")

    async def on_peer(self, event: PeerEvent) -> None:
        if event.kind in ("up", "restarted") and self._is_known:
            self.ctx.spawn(self._report_in(), name="report-again")

    async def _report_in(self) -> None:
        await self.ctx.wait_for("coordinator", timeout_s=20)
        self._coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        state = self._version, self._manifest, {}, self._live, self._is_leading
        await self._until_heard(lambda: self._coordinator.trainer_ready(*state))
        self._is_known = True

    async def _until_heard(self, tell: Callable[[], Awaitable[None]]) -> None:
        await until_answered(tell, who="coordinator", clock=SystemClock(), log=self.ctx.log)

    async def run_leader(self, start_version: int) -> None:
        self.num_starts += 1
        assert start_version == self._version
        if not self._is_leading:
            self._is_leading = True
            self.ctx.spawn(self._lead(start_version), name="lead")

    async def _lead(self, version: int) -> None:
        while True:
            await pull(self.ctx, self.knob_owner, "step", version)
            self.steps[version] = dict(self.desk.values)
            await asyncio.sleep(STEP_S)
            version = self._version = version + 1
            report = StepReport(step=version - 1, version=version, metrics={}, lags=(), group_ids=())
            await self._until_heard(lambda report=report: self._coordinator.version_made(None, report))


@dataclass
class Room:
    """The parent's side: trainer and monitor in this process, owners in others; and the coordinator here, or in one that
    may be killed."""

    folder: Path
    sockets: str
    node: Node
    trainer: Trainer
    coordinator: Coordinator | None = None
    children: dict[str, Program] = field(default_factory=dict[str, Program])
    watchers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    num_coordinators: int = 0

    @property
    def ref(self) -> CoordinatorContract:
        return self.node.ref(CoordinatorContract, "coordinator")

    @property
    def audit(self) -> Path:
        return self.folder / "audit.jsonl"

    async def change(self, **values: Any) -> ChangeReply:
        """Keywords that are fields of a request are taken as such, the others as knobs."""
        fields = {name: values.pop(name) for name in list(values) if name in ChangeRequest.__struct_fields__}
        return await self.ref.change_knobs(ChangeRequest(values=values, who=WHO, **fields))

    async def start(self, name: str, dies: str = "") -> None:
        """A process with that owner, up and ready."""
        count = len(self.uses(name))
        await self._fork(name, self.uses_file(name), dies)
        await until(lambda: len(self.uses(name)) > count and name in self.node.peers(name), f"{name} at work")

    async def _fork(self, name: str, file: Path, dies: str = "") -> None:
        arguments = [str(self.folder / "rdzv.json"), self.sockets, name, str(file), dies]
        child = self.children[name] = await start_program(Path(__file__).with_name("room_child.py"), *arguments)
        self.watchers.append(asyncio.create_task(self._report_end(name, child)))

    async def _report_end(self, name: str, child: Program) -> None:
        """As the launcher of a node does: its peers need not find out."""
        status = await child.wait()
        await self.node.registry.process_exited(f"{name.replace('/', '-')}-node", 0, status, child.pid)

    async def begin(self) -> None:
        """Start the coordinator (again), as another process."""
        self.num_coordinators += 1
        await self._fork("coordinator", self._log)
        await until(lambda: "coordinator" in self.node.peers("coordinator"), "the coordinator is there")

    async def again(self) -> None:
        """The next one, until it is attached."""
        await self.begin()
        await until(lambda: "coordinator-attached" in self.said, "attached again")

    async def kill(self) -> None:
        """The coordinator."""
        self.children["coordinator"].send_signal(signal.SIGKILL)
        await self.ended("coordinator")

    @property
    def _log(self) -> Path:
        return self.folder / f"coordinator.{self.num_coordinators}.log"

    @property
    def said(self) -> str:
        """By the newest incarnation of the coordinator."""
        return self._log.read_text()

    async def everywhere(self, name: str) -> set[object]:
        """The values of a knob, of all who have it."""
        table = await self.ref.knob_table()
        assert not table.silent, table.silent
        return {state.value for sheet in table.sheets for state in sheet.knobs if state.tunable.name == name}

    async def ended(self, name: str) -> None:
        """That process has died, and the coordinator knows."""
        async with asyncio.timeout(PATIENCE_S):
            await self.children[name].wait()
        await until(lambda: name not in self.node.peers(name), f"{name} noticed as gone")

    def uses_file(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '.')}.uses"

    def uses(self, name: str) -> list[dict[str, Any]]:
        """What that owner worked with, in order; "pid" tells the incarnation."""
        path = self.uses_file(name)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def values(self, name: str) -> dict[str, KnobValue]:
        """What that owner says."""
        table = await self.ref.knob_table()
        [sheet] = [sheet for sheet in table.sheets if sheet.owner == name]
        return {state.tunable.name: state.value for state in sheet.knobs}

    async def close(self) -> None:
        """Nothing of it goes on."""
        for watcher in self.watchers:
            watcher.cancel()
        for child in self.children.values():
            if child.returncode is None:
                child.kill()
                await child.wait()
        await self.node.close(grace_s=0.5)
        shutil.rmtree(self.sockets)


def make_coordinator(folder: Path, *, has_engines: bool = False, **more: Any) -> Coordinator:
    """Whose journal and audit log are in `folder`."""
    options = CoordinatorOptions(
        run=RunSettings(name="room", num_steps=0), launch="room", has_engines=has_engines,
        audit_path=folder / "audit.jsonl", journal_path=folder / "coordinator.journal", **more,
    )  # fmt: skip
    return Coordinator(options=options)


@asynccontextmanager
async def open_room(
    folder: Path, live: LiveKnobs | None = None, version: int = 0, *, beside: Mapping[str, Any] | None = None,
    manifest: WeightManifest | None = None, is_apart: bool = False, file: RunConfig | None = None,
) -> AsyncIterator[Room]:  # fmt: skip
    """A coordinator that has let its trainer go. `beside`: actors of this process that are there before the trainer;
    with `manifest` engines are among them. `is_apart`: the coordinator is a process of its own."""
    sockets = tempfile.mkdtemp(prefix="k-")
    node = await Node.attach(name="launcher/0")
    node.rendezvous.save(folder / "rdzv.json")
    room = Room(folder, sockets, node, Trainer(live, version, manifest))
    try:
        await node.start(Monitor(folder, ()), "monitor")
        if is_apart:
            await room.begin()
        else:
            room.coordinator = make_coordinator(folder, has_engines=manifest is not None, file=file)
            await node.start(room.coordinator, "coordinator")
        for name, actor in (beside or {}).items():
            await node.start(actor, name)
        await node.start(room.trainer, "trainer/0")
        await until(lambda: bool(room.trainer.steps), "the first step")
        yield room
    finally:
        await room.close()
