"""A network that is gone for a while, on purpose: what was going on breaks, what is asked meanwhile waits, and it goes on."""

from __future__ import annotations

import asyncio

import pytest
from tests.harness.nemesis import cut_off, make_cuttable
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.errors import CallError
from myxa.core.refs import with_deadline

make_cuttable()
pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def kind(request):
    return getattr(request, "param", "ipc")


real = pytest.mark.parametrize("kind", ["ipc", "tcp"], indirect=True)


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
    cut_off(near, "far-echo", 60.0)
    cut_off(far, "near-echo", 60.0)
    for ref in (there, back):
        with pytest.raises(CallError):
            await with_deadline(ref, 0.3).ping()
    waiting = asyncio.ensure_future(with_deadline(there, 20.0).ping())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    cut_off(near, "far-echo", 0.0)
    cut_off(far, "near-echo", 0.0)
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
    cut_off(far, "near-echo", 60.0)
    await there.note("heard")
    with pytest.raises(CallError):
        await with_deadline(there, 0.5).ping()
    await until(lambda: "heard" in echo.log)
