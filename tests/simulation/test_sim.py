"""Processes that stop and die, and a network that fails, in virtual time. That sweeps find bugs: test_scenarios.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.sim_loop import SimulationError
from tests.simulation.sim_network import Net
from tests.simulation.simulator import ProcessCrashed, Sim, run

from myxa.core.actor import Actor
from myxa.core.errors import OutcomeUnknown, PeerDied
from myxa.core.handlers import call
from myxa.core.refs import with_deadline


class Clerk(Actor):
    def __init__(self) -> None:
        self.notes: list[int] = []

    @call(deadline=5)
    async def work(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.ctx.epoch

    @call(deadline=5)
    async def heard(self) -> tuple[int, ...]:
        return tuple(self.notes)

    @call(deadline=5)
    async def note(self, number: int) -> None:
        self.notes.append(number)


async def clerk(node: Any) -> None:
    await node.start(Clerk(), f"clerk/{node.name}")


def simulated(body: Callable[[Sim], Awaitable[Any]], net: Net | None = None, seed: int = 1) -> Any:
    """Run `body` in a simulation with nodes "a" and "b", a clerk on each."""

    async def scenario(seed: int) -> Any:
        async with Sim(seed, net) as sim:
            for name in ("a", "b"):
                await sim.node(name, clerk)
            return await body(sim)

    return run(scenario, seed)


def ref(sim: Sim, here: str, there: str, deadline_s: float = 5.0) -> Clerk:
    return with_deadline(sim.nodes[here].node.ref(Clerk, f"clerk/{there}"), deadline_s)


def test_the_example_of_the_readme_runs() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", Path(__file__).with_name("README.md").read_text(encoding="utf-8"), re.S
    )
    names: dict[str, Any] = {}
    exec(compile(code.replace("seeds(200", "seeds(10"), "README.md", "exec"), names)
    names["test_counter"]()


# -- processes


def test_a_crash_fails_the_call_and_runs_no_finally() -> None:
    ended: list[str] = []

    async def body(sim: Sim) -> None:
        async def hold() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                ended.append("finally")

        held = sim.spawn("b", hold())
        asked = sim.spawn("a", ref(sim, "a", "b").work(3.0))
        await asyncio.sleep(0.5)
        await sim.crash("b")
        assert not sim.nodes["b"].is_alive
        with pytest.raises(ProcessCrashed):
            await held
        with pytest.raises(PeerDied, match="SIGKILL"):
            await asked
        with pytest.raises(SimulationError, match="b is down"):
            sim.spawn("b", hold())
        await asyncio.sleep(200)
        assert ended == []  # a killed process says nothing
        await sim.restart("b")
        await sim.spawn("a", sim.nodes["a"].node.wait_for("clerk/b", timeout_s=5))
        assert await sim.spawn("a", ref(sim, "a", "b").work(0.0)) == 2

    simulated(body)
    assert ended == ["finally"]  # only when the simulation is cleared away


def test_a_pause_holds_everything_and_loses_nothing_and_a_long_one_breaks_no_promise() -> None:
    async def body(sim: Sim) -> None:
        asked = sim.spawn("a", ref(sim, "a", "b").work(0.1))
        await asyncio.sleep(0.05)
        sim.pause("b")
        notes = [sim.spawn("a", ref(sim, "a", "b").note(number)) for number in range(5)]
        await asyncio.sleep(1.5)
        assert not asked.done()
        sim.resume("b")
        assert await asked == 1
        await asyncio.gather(*notes)
        assert await sim.spawn("a", ref(sim, "a", "b").heard()) == (0, 1, 2, 3, 4)
        sim.pause("b")
        with pytest.raises(OutcomeUnknown):
            await sim.spawn("a", ref(sim, "a", "b", 3.0).work(0.0))
        sim.resume("b")
        await asyncio.sleep(5.0)
        assert await sim.spawn("a", ref(sim, "a", "b").work(0.0)) >= 1

    simulated(body, Net(unreachable_s=30.0))


def test_a_node_that_was_given_up_is_fenced_and_comes_back() -> None:
    async def body(sim: Sim) -> None:
        sim.partition({"b"}, {"a", "launcher/0"})
        await asyncio.sleep(10.0)
        sim.heal()
        await asyncio.sleep(10.0)
        assert await sim.spawn("a", ref(sim, "a", "b").work(0.0)) > 1
        assert sim.failures == []  # a fenced node is no failure
        assert sim.log.lines("failed")

    simulated(body)


# -- the network


def test_a_slow_reader_is_spared_by_credit() -> None:
    async def body(sim: Sim) -> int:
        await sim.spawn("a", ref(sim, "a", "b").work(0.0))
        sim.slow("b", 200.0)

        async def flood() -> None:
            clerk_b = with_deadline(sim.nodes["a"].node.ref(Clerk, "clerk/b"), 100.0)
            await asyncio.gather(*(clerk_b.note(number) for number in range(3000)))

        await sim.spawn("a", flood())
        sim.slow("b", 0)
        assert (await sim.spawn("a", ref(sim, "a", "b", 60.0).heard())) == tuple(range(3000))
        return sim.network.most_under_way

    most = simulated(body, Net(unreachable_s=100.0))
    assert 900 < most < 1100  # the window, and a few answers
