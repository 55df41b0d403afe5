"""A composition root of tiny actors for the launcher's tests: they do nothing but live, and misbehave when told to.

The run directory is the switchboard: a file `finish` ends the run, `fail` makes the coordinator give up, and
`<actor>.<what>` (`rollout.1.crash`) makes an actor misbehave; "crash" and its kin take effect at the start.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path

from myxa.actors.contracts import BufferContract, CoordinatorContract, MonitorContract, RolloutContract, TrainerContract
from myxa.core.actor import Actor, PeerEvent
from myxa.core.config import RunConfig
from myxa.core.errors import DataError, EngineError
from myxa.core.messages import BufferStats, RunStatus, Telemetry
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.nodes.child import ORDERLY_END

GANG_VARIABLES = ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


def build(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    toys = {"coordinator": ToyCoordinator, "buffer": ToyBuffer, "monitor": ToyMonitor,
            "trainer": ToyTrainer, "rollout": ToyRollout}  # fmt: skip
    actor = toys[spec.role]()
    actor.switches = Switches(spec.name, run_dir)
    actor.num_steps = config.run.num_steps
    return actor


class Switches:
    def __init__(self, name: str, run_dir: Path) -> None:
        self._name = name.replace("/", ".")
        self._run_dir = run_dir
        # Switches that must hold from the first moment are given before there is a run directory.
        self._given = os.environ.get("TOY", "").split()

    def has(self, what: str) -> bool:
        name = f"{self._name}.{what}"
        return name in self._given or (self._run_dir / name).exists()

    def global_has(self, what: str) -> bool:
        return (self._run_dir / what).exists()

    def note(self, what: str, text: str) -> None:
        with (self._run_dir / f"{self._name}.{what}").open("a") as file:
            file.write(text + "\n")


class Toy(Actor):
    switches: Switches
    num_steps: int

    async def on_start(self) -> None:
        values = {name: os.environ.get(name, "") for name in GANG_VARIABLES}
        self.ctx.log.info("pid %d epoch %d env %s", os.getpid(), self.ctx.epoch, values)
        if self.switches.has("crash"):
            raise EngineError("this engine is made of glass", remedy="do not drop it")
        if self.switches.has("bad-data"):
            raise DataError("line 7 of the data is rotten")
        self.ctx.spawn(self._misbehave(), name="misbehave")

    async def _misbehave(self) -> None:
        while not self.switches.has("fail-now"):
            await asyncio.sleep(0.02)
            if self.switches.has("segfault"):
                ctypes.string_at(0)
            if self.switches.has("hang"):
                self.switches.note("hangs", "")
                time.sleep(1000)  # noqa: ASYNC251 - the loop gives no sign of life
        raise EngineError("failed when it was told to")

    async def on_stop(self, why: str) -> None:
        self.ctx.log.info("stops: %s", why)
        if self.switches.has("hang-at-stop"):
            time.sleep(1000)  # noqa: ASYNC251 - a hang that no cancellation ends
        self.switches.note("stopped", f"{time.time():.3f}")


class ToyCoordinator(Toy, CoordinatorContract):
    _reason = ""

    async def status(self) -> RunStatus:
        is_failed = self.switches.global_has("fail")
        is_over = self.switches.global_has("finish") or (bool(self._reason) and not self.switches.has("deaf"))
        return RunStatus(
            name="toy", phase="failed" if is_failed else "finished" if is_over else "running", version=3,
            num_steps=self.num_steps, error="rollout/0: it told the coordinator so" if is_failed else "",
            reason=self._reason or ("all steps done" if is_over else ""),
        )  # fmt: skip

    async def stop(self, reason: str) -> None:
        self._reason = reason
        self.switches.note("asked", reason)

    async def rollout_leaving(self, rollout: str, reason: str) -> None:
        self.switches.note("leaving", rollout)


class ToyBuffer(Toy, BufferContract):
    async def stats(self) -> BufferStats:
        return BufferStats(
            states={"READY": 1}, drawn=1, trained=0, dropped={}, slots_total=4, slots_used=1, max_staleness=2,
            policy="pace",
        )  # fmt: skip


class ToyMonitor(Toy, MonitorContract):
    async def telemetry(self, bundle: Telemetry) -> None:
        """The launcher tells of actors that it takes for hung; on a busy machine there are such."""

    async def snapshot(self) -> dict[str, dict[str, float]]:
        return {"metrics": {"reward/mean": 0.5}}


class ToyTrainer(Toy, TrainerContract):
    async def on_start(self) -> None:
        self.ctx.watch("trainer/")
        if self.switches.has("needy"):  # a rank in a collective hears of nothing but the loss of its mate
            asyncio.get_running_loop().add_signal_handler(ORDERLY_END, lambda: None)
        await super().on_start()

    async def on_peer(self, event: PeerEvent) -> None:
        if event.kind == "down" and self.switches.has("needy"):
            raise EngineError(f"lost its mate {event.name}")


class ToyRollout(Toy, RolloutContract):
    async def drain(self) -> int:
        self.switches.note("drained", "")
        return 0
