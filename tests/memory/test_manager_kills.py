"""C10: kill -9 at every labelled point of a switch. Within 5 s the ledger is consistent, the memory of the dead is free,
and once the process is back, the device changes hands again. Nothing hangs: every lease is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.memory.manager_site import Site, site_of
from tests.memory.manager_toys import CAPACITY, MIB

from myxa.core.device_memory import MemoryView
from myxa.memory.arenas.host_vmm import device_bytes

pytestmark = [pytest.mark.timeout(110), pytest.mark.asyncio(loop_scope="module")]

MEMBERS = {
    "trainer/0": ("trainer", "host:0"),
    "trainer/1": ("trainer", "host:1"),
    "rollout/0": ("rollout", "host:0,host:1"),
}
STABLE = {"cold", "active", "quiesced", "released", "granted"}
VICTIM, ASKER, MANAGER = "trainer/0", "rollout/0", "memory/0"
POINTS = [
    (VICTIM, "before_drain"),
    (VICTIM, "after_drain"),
    (VICTIM, "before_release"),
    (VICTIM, "in_copy_out"),
    (VICTIM, "after_release"),
    (ASKER, "before_restore"),
    (ASKER, "in_restore"),
    (ASKER, "after_restore"),
    (ASKER, "before_commit"),
    (MANAGER, "before_journal_drain"),
    (MANAGER, "after_journal_release"),
    (MANAGER, "before_measure"),
    (MANAGER, "after_journal_restore"),
    (MANAGER, "before_answer"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site_of(tmp_path_factory.mktemp("site"), MEMBERS) as made:
        yield made


def is_consistent(view: MemoryView) -> bool:
    """Nobody is in the middle of anything, nobody dead is counted, the books are what is measured."""
    return (
        view.switching == ""
        and all(d.tenants and len({t.tenant for t in d.tenants}) == len(d.tenants) for d in view.devices)
        and all(t.state in STABLE for d in view.devices for t in d.tenants)
        and all(d.unattributed_bytes == 0 and d.free_bytes >= 0 for d in view.devices)
    )


@pytest.mark.parametrize(("who", "label"), POINTS, ids=[f"{who}-{label}".replace("/", "") for who, label in POINTS])
async def test_a_process_that_is_killed_there(site: Site, who: str, label: str) -> None:
    for gang, other in (("rollout", "trainer"), ("trainer", "rollout")):  # both have loaded, the trainer has its turn
        reply = await site.lease(gang, other)
        assert reply.granted, reply.reason
        await site.toy(f"{gang}/0").work(1)
    await site.keep_spare()
    epoch = reply.epoch
    pid = await (site.manager if who == MANAGER else site.toy(who)).arm(label)

    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=8.0))
    assert await site.until_gone(who) == -9
    if who == MANAGER:
        await site.start(who)
    reply = await asyncio.wait_for(asked, 25)
    assert reply.granted == (who != ASKER), reply.reason
    await site.until(is_consistent, 5.0, "consistent")
    assert [device_bytes([pid], device) for device in site.devices] == [0, 0]

    if who != MANAGER:
        await site.start(who)
    await site.until_registered()
    for gang, other in (("trainer", "rollout"), ("rollout", "trainer")):
        reply = await site.lease(gang, other)
        assert reply.granted, reply.reason
        assert reply.epoch >= epoch  # the trainer may have its turn already: then there is nothing to do
        epoch = reply.epoch
        await site.toy(f"{gang}/0").work(1)
    view = await site.until(is_consistent, 5.0, "consistent")
    assert all(device_bytes(site.pids(device), device) <= CAPACITY for device in site.devices)
    assert all(device.free_bytes >= CAPACITY - 40 * MIB for device in view.devices)
    if who == MANAGER:
        assert view.epoch > 1000


async def test_an_engine_that_is_killed_while_it_runs(site: Site) -> None:
    assert (await site.lease("rollout", "trainer")).granted
    await site.toy(ASKER).work(1)
    await site.keep_spare()
    site.children[ASKER].kill()
    await site.until_gone(ASKER)
    await site.until(is_consistent, 5.0, "consistent")
    await site.start(ASKER)
    await site.until_registered()
    for gang, other in (("trainer", "rollout"), ("rollout", "trainer")):
        assert (await site.lease(gang, other)).granted
        await site.toy(f"{gang}/0").work(1)
