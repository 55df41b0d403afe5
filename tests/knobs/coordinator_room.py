"""The real coordinator with a trainer that makes a version every few milliseconds, and owners in other processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
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
from myxa.core.clock import SystemClock
from myxa.core.knobs import ChangeReply, ChangeRequest, KnobValue, LiveKnobs, Operator
from myxa.core.messages import StepReport, WeightManifest
from myxa.transport.node import Node

WHO = Operator(user="tester", via="test")
PATIENCE_S = 40.0
STEP_S = 0.02


class Trainer(OwnsKnobs, TrainerContract):
    """Steps for ever; notes the values of every step."""

    def __init__(self, live: LiveKnobs | None, version: int, manifest: WeightManifest | None = None) -> None:
        self.steps: dict[int, dict[str, KnobValue]] = {}
        self._live = live
        self._version = version
        self._manifest = manifest
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def on_start(self) -> None:
        self.desk: Desk = make_desk(self.ctx.name, "lr", "clip")
        self.knob_owner = self.desk.owner
        self.ctx.spawn(self._report_in(), name="report-in")

    async def _report_in(self) -> None:
        await self.ctx.wait_for("coordinator", timeout_s=20)
        self._coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        await self._coordinator.trainer_ready(self._version, self._manifest, {}, self._live)

    async def run_leader(self, start_version: int) -> None:
        self.ctx.spawn(self._lead(start_version), name="lead")

    async def _lead(self, version: int) -> None:
        while True:
            await self.may_step.wait()
            await pull(self.ctx, self.knob_owner, "step", version)
            self.steps[version] = dict(self.desk.values)
            await asyncio.sleep(STEP_S)
            version += 1
            report = StepReport(step=version - 1, version=version, metrics={}, lags=(), group_ids=())
            await self._coordinator.version_made(None, report)


@dataclass
class Room:
    """The parent's side: coordinator and trainer in this process, owners in others."""

    folder: Path
    sockets: str
    node: Node
    coordinator: Coordinator
    trainer: Trainer
    children: dict[str, Program] = field(default_factory=dict[str, Program])

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
        words = [str(self.folder / "rdzv.json"), self.sockets, name, str(self.uses_file(name)), dies]
        self.children[name] = await start_program(Path(__file__).with_name("owner_child.py"), *words)
        count = len(self.uses(name))
        await until(lambda: len(self.uses(name)) > count and name in self.node.peers(name), f"{name} at work")

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
        for child in self.children.values():
            if child.returncode is None:
                child.kill()
                await child.wait()
        await self.node.close(grace_s=0.5)
        shutil.rmtree(self.sockets)


@asynccontextmanager
async def open_room(
    folder: Path, live: LiveKnobs | None = None, version: int = 0, *, beside: Mapping[str, Any] | None = None,
    manifest: WeightManifest | None = None,
) -> AsyncIterator[Room]:  # fmt: skip
    """A coordinator that has let its trainer go. `beside`: actors of this process that are there before the trainer;
    with `manifest` engines are among them."""
    sockets = tempfile.mkdtemp(prefix="k-")
    node = await Node.attach(name="launcher/0")
    node.rendezvous.save(folder / "rdzv.json")
    options = CoordinatorOptions(
        name="room", launch="room", num_steps=0, has_engines=manifest is not None, eval_at_start=False,
        audit_path=folder / "audit.jsonl", journal_path=folder / "coordinator.journal",
    )  # fmt: skip
    coordinator, trainer = Coordinator(options=options, clock=SystemClock()), Trainer(live, version, manifest)
    room = Room(folder, sockets, node, coordinator, trainer)
    try:
        await node.start(Monitor(folder, ()), "monitor")
        await node.start(coordinator, "coordinator")
        for name, actor in (beside or {}).items():
            await node.start(actor, name)
        await node.start(trainer, "trainer/0")
        await until(lambda: bool(trainer.steps), "the first step")
        yield room
    finally:
        await room.close()
