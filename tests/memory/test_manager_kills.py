"""Kill -9 at labelled points of a switch, of a gang on two nodes: the ledger is consistent within 5 s, the memory of the
dead is free, and once the process is back, the devices change hands again. Every lease is answered. Real processes, real
memory, real sockets; what a node is, is a name here: both are this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from tests.memory.manager_site import Site, site_of
from tests.memory.manager_toys import CAPACITY, MIB

from myxa.core.device_memory import MemoryView
from myxa.memory.arenas.host_vmm import device_bytes

pytestmark = [pytest.mark.timeout(110), pytest.mark.asyncio(loop_scope="module")]

HERE, THERE = "host:0", "host:0@1"
MEMBERS = {
    "trainer/0": ("trainer", HERE),
    "trainer/1": ("trainer", THERE),
    "rollout/0": ("rollout", HERE),
    "rollout/1": ("rollout", THERE),
}
STABLE = {"active", "quiet"}
VICTIM, FAR_VICTIM, ASKER, MANAGER, AGENT = "trainer/0", "trainer/1", "rollout/0", "memory/0", "memory/1"
POINTS = [
    (VICTIM, "in_copy_out"),
    (FAR_VICTIM, "after_release"),
    (ASKER, "in_restore"),
    (ASKER, "before_commit"),
    (MANAGER, "sends_drain"),
    (MANAGER, "before_answer"),
    (AGENT, "before_measure"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site_of(tmp_path_factory.mktemp("site"), MEMBERS) as made:
        yield made


def is_consistent(view: MemoryView) -> bool:
    """Nobody is in the middle of anything, nobody dead is counted, the books are what is measured on both nodes."""
    return (
        view.switching == ""
        and [device.node for device in view.devices] == [0, 1]
        and all(d.tenants and len({t.tenant for t in d.tenants}) == len(d.tenants) for d in view.devices)
        and all(t.state in STABLE for d in view.devices for t in d.tenants)
        and all(d.unattributed_bytes == 0 and d.free_bytes >= 0 for d in view.devices)
    )


def without(tenant: str) -> Callable[[MemoryView], bool]:
    """Consistent, and that one is not counted any more."""
    return lambda view: is_consistent(view) and tenant not in {t.tenant for d in view.devices for t in d.tenants}


async def both_have_loaded(site: Site) -> int:
    """And the trainer has its turn; the epoch of its lease."""
    for gang, other in (("rollout", "trainer"), ("trainer", "rollout")):
        reply = await site.lease(gang, other)
        assert reply.granted, reply.reason
        await asyncio.gather(*(site.toy(f"{gang}/{number}").work() for number in range(2)))
    return reply.epoch


@pytest.mark.parametrize(("who", "label"), POINTS, ids=[f"{who}-{label}".replace("/", "") for who, label in POINTS])
async def test_a_process_that_is_killed_there(site: Site, who: str, label: str) -> None:
    epoch = await both_have_loaded(site)
    await site.keep_spare()
    place = {MANAGER: site.manager, AGENT: site.agent}.get(who) or site.toy(who)
    pid = await place.arm(label)
    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=8.0))
    assert await site.until_gone(who) == -9
    if who in (MANAGER, AGENT):
        await site.start(who)
    reply = await asyncio.wait_for(asked, 25)
    assert reply.granted == (who != ASKER), reply.reason
    is_tenant = who in MEMBERS
    await site.until(without(who) if is_tenant else is_consistent, 5.0, "consistent")
    assert [device_bytes([pid], device) for device in site.devices] == [0, 0]
    if is_tenant:
        await site.start(who)
    await site.until_registered()
    assert await both_have_loaded(site) >= epoch
    view = await site.until(is_consistent, 5.0, "consistent")
    assert all(device_bytes(site.pids(device), device) <= CAPACITY for device in site.devices)
    assert all(device.free_bytes >= CAPACITY - 40 * MIB for device in view.devices)


async def test_a_tenant_that_dies_while_the_manager_is_away_is_known_once_it_is_back(site: Site) -> None:
    await both_have_loaded(site)
    await site.keep_spare()
    await site.manager.arm("sends_release")
    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=10.0))
    assert await site.until_gone(MANAGER) == -9
    site.children[FAR_VICTIM].kill()  # the agent has nobody to tell
    await site.until_gone(FAR_VICTIM)
    await site.start(MANAGER)
    reply = await asyncio.wait_for(asked, 40)
    assert reply.granted, reply.reason
    await site.until(without(FAR_VICTIM), 10.0, f"without {FAR_VICTIM}")
    await site.start(FAR_VICTIM)
    await site.until_registered()
    await both_have_loaded(site)


async def test_an_agent_that_stands_still_is_named_in_the_refusal(site: Site) -> None:
    await both_have_loaded(site)
    before = await site.view()
    assert all(0 < device.free_bytes < device.capacity_bytes for device in before.devices), "measured for the view"
    os.kill(site.children[AGENT].pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        looked = await site.view()
        assert time.monotonic() - started < 4.0 and looked.devices == before.devices, "as it was measured last"
        refused = await site.lease("rollout", "trainer", deadline_s=5.0)
    finally:
        os.kill(site.children[AGENT].pid, signal.SIGCONT)
    assert time.monotonic() - started < 15.0
    assert not refused.granted
    assert THERE in refused.reason
    assert AGENT in refused.reason
    view = await site.view()
    assert {t.state for d in view.devices for t in d.tenants if t.gang == "trainer"} == {"active"}
    await both_have_loaded(site)
