"""One envelope of one kind is lost on a living connection: what waits for it is mended, or ends honestly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.simulation.sim_network import SimNetwork
from tests.simulation.simulator import Sim, run

from myxa.core.actor import Actor
from myxa.core.handlers import call, cast, durable_put
from myxa.core.refs import with_deadline
from myxa.transport.session import credit
from myxa.transport.session.frames import Kind


class Parcel(msgspec.Struct, frozen=True):
    key: str


class Depot(Actor):
    def __init__(self) -> None:
        self.kept: list[str] = []
        self.num_cancelled = 0

    @durable_put(key="parcel.key", deadline=60)
    async def keep(self, parcel: Parcel) -> int:
        self.kept.append(parcel.key)
        return len(self.kept)

    @call(deadline=None, reentrant=True)
    async def brood(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1

    @cast
    async def note(self) -> None:
        pass


def lossy(monkeypatch: pytest.MonkeyPatch, kind: Kind, *, skip: int = 0, count: int = 1) -> None:
    """After `skip` envelopes of that kind between "a" and "b", the next `count` are lost."""
    carry = SimNetwork.carry
    seen = 0

    def drop(self: Any, source: Any, target: Any, connection: Any, lane: Any, data: Any) -> None:
        nonlocal seen
        names = {self._hosts[source].name, self._hosts[target].name}
        if names == {"a", "b"} and data[3] == kind:
            seen += 1
            if skip < seen <= skip + count:
                return
        carry(self, source, target, connection, lane, data)

    monkeypatch.setattr(SimNetwork, "carry", drop)


def between(body: Callable[[Sim, Depot, Depot], Awaitable[Any]]) -> Any:
    """Run `body(sim, depot on b, reference to it on a)`."""

    async def scenario(seed: int) -> Any:
        depot = Depot()

        async def open_depot(node: Any) -> None:
            await node.start(depot, "depot")

        async with Sim(seed) as sim:
            await sim.node("a")
            await sim.node("b", open_depot)
            return await body(sim, depot, sim.nodes["a"].node.ref(Depot, "depot"))

    return run(scenario, 1)


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REPLY])
@pytest.mark.parametrize("count", [1, 2])
def test_a_put_is_sent_again_and_has_one_effect(monkeypatch: pytest.MonkeyPatch, kind: Kind, count: int) -> None:
    lossy(monkeypatch, kind, count=count)

    async def body(sim: Sim, depot: Depot, ref: Depot) -> None:
        assert await sim.spawn("a", ref.keep(Parcel("x"))) == 1
        assert depot.kept == ["x"]

    between(body)


def test_a_lost_cancel_is_noticed_by_the_callee(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy(monkeypatch, Kind.CANCEL)

    async def body(sim: Sim, depot: Depot, ref: Depot) -> None:
        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await ref.brood()

        await sim.spawn("a", give_up())
        await asyncio.sleep(5.0)
        assert depot.num_cancelled == 0
        await asyncio.sleep(40.0)
        assert depot.num_cancelled == 1

    between(body)


def test_a_long_call_that_is_waited_for_goes_on() -> None:
    async def body(sim: Sim, depot: Depot, ref: Depot) -> None:
        asked = sim.spawn("a", ref.brood())
        await asyncio.sleep(300.0)
        assert not asked.done()
        assert depot.num_cancelled == 0
        await sim.restart("b")
        assert (await asyncio.gather(asked, return_exceptions=True))[0].__class__.__name__ == "PeerDied"

    between(body)


def test_credit_of_lost_messages_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "WINDOW_UNITS", 10)
    monkeypatch.setattr(credit, "DUE_UNITS", 5)
    lossy(monkeypatch, Kind.CAST, count=10)

    async def body(sim: Sim, depot: Depot, ref: Depot) -> int:
        async def many() -> None:
            for _ in range(11):
                await with_deadline(ref, 60.0).note()

        await sim.spawn("a", many())
        return await sim.spawn("a", ref.keep(Parcel("x")))

    assert between(body) == 1
