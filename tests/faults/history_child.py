"""A process of its own for the history check: the buffer over its ledger, or a producer that draws and puts for ever."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "buffer"))

import msgspec
from tests.faults.put_history import Journal

from myxa.actors.contracts import BufferContract
from myxa.core.actor import Actor
from myxa.core.errors import CallError
from myxa.core.messages import Assignment, DrawRequest, GroupFinished
from myxa.core.process import die_with_parent
from myxa.core.refs import with_deadline
from myxa.transport.address import Rendezvous
from myxa.transport.node import Node

NUM_AT_ONCE = 3
BUFFER_TESTS: Any = importlib.import_module("tests.buffer.conftest")
"""tests/buffer/conftest.py: a real buffer over numbered rows, and groups for it."""


class EndingRows(BUFFER_TESTS.NumberedRows):
    """Rows until a file says which draw is the last."""

    def __init__(self, ending: Path) -> None:
        super().__init__(1_000_000)
        self.ending = ending

    def row_of(self, draw: int) -> int | None:
        is_over = self.ending.exists() and draw > int(self.ending.read_text() or 1 << 60)
        return None if is_over else super().row_of(draw)


class Producer(Actor):
    """Draws, and puts several groups at the same time; each content names the attempt that made it."""

    def __init__(self, journal: Journal, version_file: Path, seed: int) -> None:
        self._journal = journal
        self._version_file = version_file
        self._rng = random.Random(seed)
        self._holding: set[int] = set()

    async def on_start(self) -> None:
        self.ctx.spawn(self._produce(), name="produce")

    async def _produce(self) -> None:
        buffer = with_deadline(self.ctx.ref(BufferContract, "buffer"), 60.0)
        while True:
            version = int(self._version_file.read_text() or 0)
            request = DrawRequest(
                rollout=self.ctx.name, epoch=self.ctx.epoch, version=version, max_groups=NUM_AT_ONCE, wait_s=0.1,
                holding=tuple(self._holding),
            )  # fmt: skip
            try:
                reply = await with_deadline(buffer, 3.0).draw(request)
            except CallError:
                await asyncio.sleep(0.05)
                continue
            await asyncio.gather(*(self._put(buffer, assignment, version) for assignment in reply.assignments))
            if not reply.assignments:
                await asyncio.sleep(0.02)

    async def _put(self, buffer: BufferContract, assignment: Assignment, version: int) -> None:
        group_id = assignment.prompt.group_id
        content = f"{self.ctx.name}@{self.ctx.epoch}, attempt {assignment.attempt}"
        group = BUFFER_TESTS.make_group(assignment, versions=(version,))
        samples = tuple(msgspec.structs.replace(sample, text=content) for sample in group.samples)
        self._holding.add(group_id)
        await asyncio.sleep(self._rng.random() * 0.03)
        self._journal.note("put", group_id, content)
        try:
            whole = msgspec.structs.replace(group, samples=samples)
            finished = GroupFinished(group=whole, attempt=assignment.attempt)
            (result,) = await buffer.put_groups((finished,), self.ctx.name)
        except CallError:
            return  # not acknowledged: whatever became of it is right
        finally:
            self._holding.discard(group_id)
        self._journal.note("answer", group_id, content, result.outcome)


async def main(order: dict) -> int:
    folder = Path(order["folder"])
    node = await Node.attach(
        name=f"{order['name']}-node", rdzv=Rendezvous.load(folder / "rdzv.json"), run_dir=order["sockets"]
    )  # fmt: skip
    actor: Actor
    if order["name"] == "buffer":
        rows = EndingRows(folder / "last_draw")
        actor = BUFFER_TESTS.make_buffer(folder / "ledger.sqlite", rows=rows, max_staleness=3, batch_size=4)
    else:
        journal = folder / f"{order['name'].replace('/', '.')}.{node.epoch}.journal"
        actor = Producer(Journal(journal), folder / "version", order["seed"] + node.epoch)
    await node.start(actor, order["name"])
    raise await node.failed


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    die_with_parent(os.getppid())
    sys.exit(asyncio.run(main(told)))
