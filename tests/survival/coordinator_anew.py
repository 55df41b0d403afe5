"""A trainer that makes a version every few milliseconds and owners of knobs in other processes, with a coordinator that
is killed and started again, as a launcher does."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tests.harness.commands import Command
from tests.knobs.coordinator_room import Room, Trainer, until

from myxa.actors.contracts import CoordinatorContract
from myxa.actors.knobs.owner import pull
from myxa.actors.monitor.monitor import Monitor
from myxa.core.actor import PeerEvent
from myxa.core.clock import SystemClock
from myxa.core.messages import StepReport
from myxa.core.retry import until_answered
from myxa.transport.node import Node

__all__ = ["Anew", "open_anew", "until"]

HERE = Path(__file__).parent
STEP_S = 0.05
OWNERS = ("buffer", "rollout/0", "rollout/1")


class SteadyTrainer(Trainer):
    """Survives its coordinator, as the real one does: reports in again, and tells each version until it is heard."""

    is_known = False
    """Whether a coordinator has heard of it; until then the first report goes on."""
    is_leading = False
    num_starts = 0
    version = 0

    async def on_start(self) -> None:
        self.ctx.watch("coordinator")
        await super().on_start()

    async def on_peer(self, event: PeerEvent) -> None:
        if event.kind in ("up", "restarted") and self.is_known:
            self.ctx.spawn(self._report_in(), name="report-again")

    async def _report_in(self) -> None:
        await self.ctx.wait_for("coordinator", timeout_s=20)
        self._coordinator = self.ctx.ref(CoordinatorContract, "coordinator")
        await until_answered(
            lambda: self._coordinator.trainer_ready(self.version, None, {}, None, self.is_leading),
            who="coordinator", clock=SystemClock(), log=self.ctx.log,
        )  # fmt: skip
        self.is_known = True

    async def run_leader(self, start_version: int) -> None:
        self.num_starts += 1
        assert start_version == self.version
        if not self.is_leading:
            self.is_leading = True
            await super().run_leader(start_version)

    async def _lead(self, version: int) -> None:
        while True:
            await pull(self.ctx, self.knob_owner, "step", version)
            self.steps[version] = dict(self.desk.values)
            await asyncio.sleep(STEP_S)
            version = self.version = version + 1
            report = StepReport(step=version - 1, version=version, metrics={}, lags=(), group_ids=())
            await until_answered(
                lambda report=report: self._coordinator.version_made(None, report),
                who="coordinator", clock=SystemClock(), log=self.ctx.log,
            )  # fmt: skip


class Child:
    """A forked command, as the room knows its processes."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.send_signal, self.kill = command.send_signal, command.kill

    @property
    def returncode(self) -> int | None:
        return self._command.poll()

    async def wait(self) -> None:
        while self._command.poll() is None:
            await asyncio.sleep(0.01)


@dataclass
class Anew(Room):
    """See the module's head."""

    trainer: SteadyTrainer  # pyright: ignore[reportIncompatibleVariableOverride]
    num: int = 0

    async def begin(self) -> None:
        """Start the coordinator (again), as another process."""
        self.num += 1
        self._fork("coordinator", HERE / "coordinator_child.py", self.log(self.num), str(self.folder))
        await until(lambda: "coordinator" in self.node.peers("coordinator"), "the coordinator is there")

    async def start(self, name: str, dies: str = "") -> None:
        script = HERE.parent / "knobs" / "owner_child.py"
        self._fork(name, script, self.uses_file(name).with_suffix(".log"), name, str(self.uses_file(name)), dies)
        await until(lambda: bool(self.uses(name)) and name in self.node.peers(name), f"{name} at work")

    def _fork(self, name: str, script: Path, log: Path, *words: str) -> None:
        """From the process that has the imports (tests/harness/commands.py)."""
        with log.open("w") as file:
            words = (str(self.folder / "rdzv.json"), self.sockets, *words)
            self.children[name] = cast(Any, Child(Command(words, self.folder, log=file, program=script)))

    def log(self, number: int) -> Path:
        return self.folder / f"coordinator.{number}.log"

    @property
    def said(self) -> str:
        """By the newest incarnation."""
        return self.log(self.num).read_text()

    async def kill(self) -> None:
        self.children["coordinator"].send_signal(signal.SIGKILL)
        await self.dead()

    async def dead(self) -> None:
        await self.ended("coordinator")

    async def again(self) -> None:
        """The next one, until it is attached."""
        await self.begin()
        await until(lambda: "coordinator-attached" in self.said, "attached again")

    async def everywhere(self, name: str) -> set[object]:
        """The values of a knob, of all who have it."""
        table = await self.ref.knob_table()
        assert not table.silent, table.silent
        return {state.value for sheet in table.sheets for state in sheet.knobs if state.tunable.name == name}


@asynccontextmanager
async def open_anew(folder: Path) -> AsyncIterator[Anew]:
    """With a buffer and two rollout actors that are at work, and a trainer that steps."""
    sockets = tempfile.mkdtemp(prefix="k-")
    node = await Node.attach(name="launcher/0")
    node.rendezvous.save(folder / "rdzv.json")
    trainer = SteadyTrainer(None, 0)
    room = Anew(folder, sockets, node, cast(Any, None), trainer)
    try:
        await node.start(Monitor(folder, ()), "monitor")
        await node.start(trainer, "trainer/0")
        await room.begin()
        await until(lambda: bool(trainer.steps), "the first step")
        for name in OWNERS:
            await room.start(name)
        yield room
    finally:
        await room.close()
