"""A process with one owner of knobs, that may die at a planted point of a change; or with the coordinator.

Arguments: rendezvous file, directory for sockets, actor name, file for what it uses or says, where to die ("", "when-judging",
"before-use", "after-use"; "judges-late": its first verdict does not come in time).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.knobs.coordinator_room import make_coordinator
from tests.knobs.knob_maker import Desk, make_desk

from myxa.actors.contracts import CoordinatorContract
from myxa.actors.knobs.owner import OwnsKnobs, catch_up
from myxa.core.actor import PeerEvent
from myxa.core.knobs import KnobValue, KnobVerdict
from myxa.core.messages import EngineStatus
from myxa.core.retry import until_answered
from myxa.transport.node import Node, Rendezvous

COORDINATOR = "coordinator"
KNOBS = {"buffer": ("filter", "eta", "level"), "rollout": ("room", "level")}


class Child(OwnsKnobs):
    """As a buffer or a rollout actor joins, and works: it notes what it uses."""

    def __init__(self, uses: Path, dies: str) -> None:
        self._uses = uses
        self._dies = dies

    async def on_start(self) -> None:
        role = self.ctx.name.partition("/")[0]
        self.desk: Desk = make_desk(self.ctx.name, *KNOBS[role])
        self.knob_owner = self.desk.owner
        if role == "buffer":
            await catch_up(self.ctx, self.knob_owner)
        self._has_reported = False
        self.ctx.watch(COORDINATOR)
        self.ctx.spawn(self._work(), name="work")

    async def _report(self) -> None:
        status = EngineStatus(rollout=self.ctx.name, version=0, running=0, waiting=0)
        coordinator = self.ctx.ref(CoordinatorContract, COORDINATOR)
        send = partial(coordinator.rollout_ready, status, self.ctx.epoch)
        await until_answered(send, who=COORDINATOR, clock=self.ctx.clock, log=self.ctx.log)
        self._has_reported = True

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self._has_reported:
            self.ctx.spawn(self._report(), name="report in again")

    async def _work(self) -> None:
        if self.ctx.name.startswith("rollout/"):
            await self._report()
        while True:  # a piece of work every few milliseconds, under the values in force
            self._note()
            await asyncio.sleep(0.005)

    def _note(self) -> None:
        line = json.dumps({"pid": os.getpid(), **self.desk.values})
        with self._uses.open("a") as file:
            file.write(line + "\n")

    def _die_at(self, point: str) -> None:
        if self._dies == point:
            os.kill(os.getpid(), signal.SIGKILL)

    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        self._die_at("when-judging")
        if self._dies == "judges-late":
            self._dies = ""
            self._uses.with_suffix(".asked").touch()
            await asyncio.sleep(60)
        return await super().judge_knobs(values, at)

    async def knobs_decided(self, epoch: int) -> None:
        if not epoch:
            return  # it has just joined
        self._die_at("before-use")
        await super().knobs_decided(epoch)
        self._die_at("after-use")


async def main(rdzv: str, sockets: str, name: str, uses: str, dies: str) -> None:
    node_name = f"{name.replace('/', '-')}-node"
    node = await Node.attach(name=node_name, rdzv=Rendezvous.load(Path(rdzv)), run_dir=sockets)
    if name == COORDINATOR:
        logging.basicConfig(level=logging.INFO, filename=uses)
        await node.start(make_coordinator(Path(uses).parent), name)
    else:
        await node.start(Child(Path(uses), dies), name)
    raise await node.failed


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
