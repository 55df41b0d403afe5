"""One manager, devices on two nodes: its agent measures and watches on the other one. Real processes, real memory, real
sockets; what a node is, is a name here: both are this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

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
STABLE = {"cold", "active", "quiesced", "released", "granted"}


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


async def both_have_loaded(site: Site) -> None:
    for gang, other in (("rollout", "trainer"), ("trainer", "rollout")):
        reply = await site.lease(gang, other)
        assert reply.granted, reply.reason
        await asyncio.gather(*(site.toy(f"{gang}/{number}").work(1) for number in range(2)))


async def test_a_gang_on_two_nodes_changes_hands_as_one(site: Site) -> None:
    sampling = site.sample()
    for _ in range(5):
        await both_have_loaded(site)
    site.stop_sampling()
    sampling.join(10)
    for device in site.devices:
        assert 32 * MIB <= site.peak[device] <= CAPACITY, f"{device}: {site.peak[device]:,} bytes of the device"
    view = await site.until(is_consistent, 5.0, "consistent")
    assert [{t.tenant for t in d.tenants} for d in view.devices] == [
        {"trainer/0", "rollout/0"},
        {"trainer/1", "rollout/1"},
    ]


@pytest.mark.parametrize("label", ["after_drain", "in_copy_out", "after_release"])
async def test_a_rank_that_is_killed_on_the_other_node(site: Site, label: str) -> None:
    await both_have_loaded(site)
    await site.keep_spare()
    pid = await site.toy("trainer/1").arm(label)
    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=8.0))
    assert await site.until_gone("trainer/1") == -9
    reply = await asyncio.wait_for(asked, 25)
    assert reply.granted, reply.reason
    await site.until(without("trainer/1"), 5.0, "its end known and its memory proven free")
    assert device_bytes([pid], THERE) == 0
    await site.start("trainer/1")
    await site.until_registered()
    await both_have_loaded(site)


async def test_an_agent_that_is_killed_while_a_switch_measures(site: Site) -> None:
    await both_have_loaded(site)
    await site.keep_spare()
    await site.agent.arm("before_measure")
    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=15.0))
    assert await site.until_gone("memory/1") == -9
    await site.start("memory/1")
    reply = await asyncio.wait_for(asked, 30)
    assert reply.granted, reply.reason
    await both_have_loaded(site)
    await site.until(is_consistent, 5.0, "consistent")


async def test_who_dies_while_the_agent_is_away_is_known_once_it_is_back(site: Site) -> None:
    await both_have_loaded(site)
    await site.keep_spare()
    site.children["memory/1"].kill()
    await site.until_gone("memory/1")
    site.children["rollout/1"].kill()
    await site.until_gone("rollout/1")
    refused = await site.lease("rollout", "trainer", deadline_s=3.0)
    assert not refused.granted
    assert "could not be measured in time" in refused.reason or "fenced" in refused.reason, refused.reason
    view = await site.view()
    assert {t.state for t in view.devices[0].tenants if t.gang == "trainer"} == {"active"}, "nobody was disturbed"
    await site.start("memory/1")
    await site.until(without("rollout/1"), 10.0, "without rollout/1")
    await site.start("rollout/1")
    await site.until_registered()
    await both_have_loaded(site)


async def test_an_agent_that_stands_still_is_named_in_the_refusal(site: Site) -> None:
    await both_have_loaded(site)
    os.kill(site.children["memory/1"].pid, signal.SIGSTOP)
    started = time.monotonic()
    try:
        refused = await site.lease("rollout", "trainer", deadline_s=8.0)
    finally:
        os.kill(site.children["memory/1"].pid, signal.SIGCONT)
    assert time.monotonic() - started < 9.0
    assert not refused.granted
    assert "host:0@1 could not be measured in time" in refused.reason
    assert "memory/1" in refused.reason
    view = await site.view()
    assert {t.state for d in view.devices for t in d.tenants if t.gang == "trainer"} == {"active"}
    await both_have_loaded(site)


async def test_the_manager_that_comes_back_knows_both_nodes(site: Site) -> None:
    await both_have_loaded(site)
    await site.keep_spare()
    await site.manager.arm("after_journal_release")
    asked = asyncio.ensure_future(site.lease("rollout", "trainer", deadline_s=10.0))
    assert await site.until_gone("memory/0") == -9
    site.children["trainer/1"].kill()  # the agent has nobody to tell
    await site.until_gone("trainer/1")
    await site.start("memory/0")
    reply = await asyncio.wait_for(asked, 40)
    assert reply.granted, reply.reason
    await site.until(without("trainer/1"), 10.0, "without trainer/1")
    await site.start("trainer/1")
    await site.until_registered()
    await both_have_loaded(site)


async def test_a_tenant_of_a_node_that_nobody_sees_is_refused(tmp_path: Path) -> None:
    async with site_of(tmp_path, {"trainer/0": ("trainer", HERE)}) as alone:
        alone.members["trainer/1"] = ("trainer", "host:0@3")
        await alone.start("trainer/1")
        assert await alone.until_gone("trainer/1") == 7, "the error of its registration ends it"
        del alone.members["trainer/1"]
        view = await alone.view()
        assert [device.device for device in view.devices] == [HERE]
