"""A network that is gone for a while, on purpose: what was going on breaks, what is asked meanwhile waits, and it goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.clock import ManualClock
from myxa.core.errors import CallError, LaunchError, NoSuchActor
from myxa.core.ids import PeerKey
from myxa.core.refs import with_deadline
from myxa.transport.socket_transport import Cuts

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def kind(request):
    return getattr(request, "param", "ipc")


real = pytest.mark.parametrize("kind", ["ipc", "tcp"], indirect=True)


def test_a_cut_is_of_a_node_whatever_its_incarnation_and_ends_by_itself():
    clock = ManualClock()
    cuts = Cuts(clock)
    cuts.make(7, 10.0)
    clock.advance(4.0)
    assert cuts.why_not(PeerKey(7, 1)) == cuts.why_not(PeerKey(7, 2)) == "cut off on purpose, for 6.0 s more"
    assert cuts.why_not(PeerKey(8, 1)) == ""
    clock.advance(6.0)
    assert cuts.why_not(PeerKey(7, 1)) == ""
    cuts.make(7, 10.0)
    cuts.make(7, 0.0)
    assert cuts.why_not(PeerKey(7, 1)) == ""


@real
async def test_nothing_passes_while_it_lasts_and_all_goes_on_after_it(world):
    near, far = await world.join("near"), await world.join("far")
    await near.start(Echo(), "near-echo")
    await far.start(Echo(), "far-echo")
    await near.wait_for("far-echo", timeout_s=10)
    await far.wait_for("near-echo", timeout_s=10)
    there, back = near.ref(EchoContract, "far-echo"), far.ref(EchoContract, "near-echo")
    await there.ping()
    await back.ping()
    near.cut_off("far-echo", 60.0)
    far.cut_off("near-echo", 60.0)
    for ref in (there, back):
        with pytest.raises(CallError):
            await with_deadline(ref, 0.3).ping()
    waiting = asyncio.ensure_future(with_deadline(there, 20.0).ping())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    near.cut_off("far-echo", 0.0)
    far.cut_off("near-echo", 0.0)
    await waiting
    await with_deadline(back, 20.0).ping()


async def test_one_way_it_is_heard_and_not_answered(world):
    near, far = await world.join("near"), await world.join("far")
    await near.start(Echo(), "near-echo")
    await far.start(echo := Echo(), "far-echo")
    await near.wait_for("far-echo", timeout_s=10)
    await far.wait_for("near-echo", timeout_s=10)
    there = near.ref(EchoContract, "far-echo")
    await there.ping()
    far.cut_off("near-echo", 60.0)
    await there.note("heard")
    with pytest.raises(CallError):
        await with_deadline(there, 0.5).ping()
    await until(lambda: "heard" in echo.log)


async def test_nobody_is_cut_off_who_is_not_there(world):
    near = await world.join("near")
    with pytest.raises(NoSuchActor, match="nobody"):
        near.cut_off("nobody", 1.0)


@pytest.mark.parametrize("kind", ["inproc"], indirect=True)
async def test_inside_one_process_the_network_is_to_be_told(world):
    near, far = await world.join("near"), await world.join("far")
    await far.start(Echo(), "far-echo")
    await near.wait_for("far-echo", timeout_s=10)
    with pytest.raises(LaunchError, match="in-process network"):
        near.cut_off("far-echo", 1.0)
