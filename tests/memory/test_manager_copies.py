"""C11: what leaves is the least that suffices, what is copied is what the model says, to the byte; and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.memory.manager_toys import CAPACITY, MIB, TAGS, Toy, ToyContract

from myxa.actors.contracts import MemoryContract
from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager
from myxa.core.clock import SystemClock
from myxa.core.device_memory import LeaseReply, LeaseRequest, Tag
from myxa.memory.leases.journal import Journal
from myxa.memory.leases.switch import ArbiterOptions
from myxa.memory.meters import DeviceMeters
from myxa.transport.node import Node

pytestmark = [pytest.mark.timeout(60)]

DEVICE = "host:0"


class Lab:
    """Manager, one trainer, one engine: real memory of this process, real messages."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.manager = node.ref(MemoryContract, "memory/0")
        self.count = 0

    async def lease(
        self, gang: str, *tags: Tag, active: bool = True, quiet: str = "", deadline_s: float = 20.0
    ) -> LeaseReply:
        self.count += 1
        request = LeaseRequest(
            gang=gang,
            tags=tags or tuple(TAGS[gang]),
            is_active=active,
            quiet=(quiet,) if quiet else (),
            deadline_s=deadline_s,
            request_id=f"lease-{self.count}",
        )
        reply = await self.manager.lease(request)
        again = await self.manager.lease(request)
        assert again == reply, "the same id gets the same lease"
        return reply

    async def work(self, name: str) -> None:
        await self.node.ref(ToyContract, name).work(1)

    async def away(self, name: str) -> set[str]:
        report = await self.node.ref(ToyContract, name).memory_report()
        assert report is not None
        return {tag.tag for tag in report.tags if tag.backing in ("host", "discarded")}

    async def state(self, name: str) -> str:
        report = await self.node.ref(ToyContract, name).memory_report()
        assert report is not None
        return report.state


async def open_lab(tmp_path: Path) -> Lab:
    node = await Node.attach(name="launcher/0")
    options = ManagerOptions(arbiter=ArbiterOptions(reserve_bytes=0, margin_bytes=MIB, settle_s=0.2))
    journal = Journal(tmp_path / "memory.jsonl")
    manager = MemoryManager(
        meter=DeviceMeters({DEVICE: CAPACITY}), journal=journal, options=options, clock=SystemClock()
    )
    await node.start(manager, "memory/0")
    await node.start(Toy("trainer", [DEVICE], "memory/0"), "trainer/0")
    await node.start(Toy("rollout", [DEVICE], "memory/0"), "rollout/0")
    lab = Lab(node)
    async with asyncio.timeout(20):
        while sum(len(d.tenants) for d in (await lab.manager.view()).devices) < 2:
            await asyncio.sleep(0.01)
    return lab


@pytest_asyncio.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = await open_lab(tmp_path)
    yield made
    await made.node.close(grace_s=0.5)


async def test_copied_bytes_are_predicted_exactly(lab: Lab) -> None:
    trainer = await lab.lease("trainer")
    assert trainer.granted, trainer.reason
    await lab.work("trainer/0")

    weights = await lab.lease("rollout", "weights", active=False, quiet="trainer")
    # 8 MiB beside the trainer's 32 of 48: nobody leaves, but the trainer is quiet
    assert (weights.granted, weights.copied_bytes, weights.dropped_bytes) == (True, 0, 0), weights.reason
    assert await lab.away("trainer/0") == set()
    assert await lab.state("trainer/0") == "quiesced"

    engine = await lab.lease("rollout", quiet="trainer")
    # 30 more: 23 short. Grads for nothing; then the optimizer, which makes it needless to drop the parameters too.
    assert engine.granted, engine.reason
    assert await lab.away("trainer/0") == {"grads", "optimizer"}
    assert (engine.copied_bytes, engine.dropped_bytes) == (16 * MIB, 8 * MIB)
    await lab.work("rollout/0")

    back = await lab.lease("trainer", quiet="rollout")
    assert back.granted, back.reason
    assert await lab.away("rollout/0") == {"kv_cache"}  # the weights may stay
    assert back.copied_bytes == 16 * MIB  # the optimizer comes

    clean = await lab.lease("rollout", quiet="trainer")  # nothing was trained: its copy is still good
    assert clean.copied_bytes == 0
    assert clean.dropped_bytes == 24 * MIB
    assert await lab.away("trainer/0") == {"grads", "optimizer"}
    await lab.work("rollout/0")

    assert (await lab.lease("trainer", quiet="rollout")).copied_bytes == 16 * MIB
    await lab.work("trainer/0")  # dirty again
    assert (await lab.lease("rollout", quiet="trainer")).copied_bytes == 16 * MIB


async def test_a_lease_that_is_there_already_costs_nothing(lab: Lab) -> None:
    first = await lab.lease("trainer")
    await lab.work("trainer/0")
    again = await lab.lease("trainer", quiet="rollout")
    assert again.granted
    assert again.seconds == {}
    assert again.epoch == first.epoch


async def test_a_refusal_names_who_holds_what(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TAGS, "huge", {"workspace": (60 * MIB, "discard")})
    assert (await lab.lease("trainer")).granted
    await lab.work("trainer/0")
    await lab.node.start(Toy("huge", [DEVICE], "memory/0"), "huge/0")
    async with asyncio.timeout(10):
        while len((await lab.manager.view()).devices[0].tenants) < 3:
            await asyncio.sleep(0.01)
    refused = await lab.lease("huge")
    assert not refused.granted
    assert refused.reason == (
        "refused: 13.0 MiB short on host:0, held by trainer/0 optimizer 16.0 MiB (active), "
        "trainer/0 grads 8.0 MiB (active), trainer/0 params 8.0 MiB (active)"
    )
    assert [(h.tag, h.num_bytes // MIB) for h in refused.holders] == [("optimizer", 16), ("grads", 8), ("params", 8)]
    assert await lab.state("trainer/0") == "active", "nobody was disturbed"
