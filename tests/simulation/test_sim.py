"""The simulator itself: virtual time, processes that stop and die, a network that fails, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from tests.simulation.sim_loop import SimulationError
from tests.simulation.sim_network import Net
from tests.simulation.simulator import VERBS, Nemesis, ProcessCrashed, Sim, carry_out, run, sweep

from myxa.core.actor import Actor
from myxa.core.errors import OutcomeUnknown, PeerDied
from myxa.core.handlers import call, cast
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

    @cast
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


# -- time


async def for_ever() -> None:
    while True:
        await asyncio.sleep(10)


async def stand_still() -> None:
    asyncio.current_task().set_name("Godot's friend")  # pyright: ignore[reportOptionalMemberAccess]
    await asyncio.Event().wait()


async def leave_a_task() -> None:
    KEPT.append(asyncio.get_running_loop().create_task(asyncio.sleep(9), name="forgotten"))


async def hide_an_error() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(1)


KEPT: list[Any] = []
ENDS: dict[Callable[[], Coroutine[Any, Any, None]], str] = {
    for_ever: "did not end in time", stand_still: "standstill.*Godot's friend", leave_a_task: "forgotten",
    hide_an_error: "never retrieved",
}  # fmt: skip


@pytest.mark.parametrize("body", ENDS, ids=lambda body: body.__name__)
def test_a_run_that_does_not_end_well_names_the_reason(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with pytest.raises(SimulationError, match=ENDS[body]):
        run(lambda seed: body(), 1, limit_s=100)


# -- what is outside


OUTSIDE: dict[str, Callable[[asyncio.AbstractEventLoop], Any]] = {
    "run_in_executor": lambda loop: loop.run_in_executor(None, time.monotonic),
    "create_connection": lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 80),
    "add_reader": lambda loop: loop.add_reader(0, print),
}


def test_the_world_is_refused_by_name() -> None:
    async def reach_out(seed: int) -> None:
        for name, deed in OUTSIDE.items():
            with pytest.raises(SimulationError, match=f"loop.{name} reaches out"):
                await deed(asyncio.get_running_loop())

    run(reach_out, 1)


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
        for number in range(5):
            await sim.spawn("a", ref(sim, "a", "b").note(number))
        await asyncio.sleep(1.5)
        assert not asked.done()
        sim.resume("b")
        assert await asked == 1
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
            for number in range(3000):
                await with_deadline(sim.nodes["a"].node.ref(Clerk, "clerk/b"), 100.0).note(number)

        await sim.spawn("a", flood())
        sim.slow("b", 0)
        assert (await sim.spawn("a", ref(sim, "a", "b", 60.0).heard())) == tuple(range(3000))
        return sim.network.most_under_way

    most = simulated(body, Net(unreachable_s=100.0))
    assert 900 < most < 1100  # the window, and a few answers


# -- the rest


def test_what_is_still_under_way_is_named() -> None:
    async def body(sim: Sim) -> None:
        sim.spawn("a", ref(sim, "a", "b").work(3.0)).add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.1)
        with pytest.raises(SimulationError, match="after 1 s still under way: .*clerk/b"):
            await sim.quiet(1.0)

    with pytest.raises(SimulationError, match="a call of node 2 epoch 1 to clerk/b is still open"):
        simulated(body)


def test_every_verb_of_the_nemesis_is_carried_out() -> None:
    async def body(sim: Sim) -> set[str]:
        schedule = Nemesis(every_s=(0.3, 0.3)).schedule(sim.rng("nemesis"), ["a", "b"], 40.0)
        assert schedule == Nemesis(every_s=(0.3, 0.3)).schedule(sim.rng("nemesis"), ["a", "b"], 40.0)
        assert {strike.verb for strike in schedule} == set(VERBS)
        await carry_out(sim, schedule)
        assert all(node.is_alive for node in sim.nodes.values())
        await sim.quiet()
        return {line.split()[2] for line in sim.log.lines()}

    assert {"kill", "pause", "resume", "partition", "heal", "reset", "slow", "clock", "break"} <= simulated(body)


def test_a_failing_seed_says_how_to_repeat_it() -> None:
    async def fragile(seed: int) -> None:
        await asyncio.sleep(1)
        assert seed != 17

    with pytest.raises(AssertionError) as found:
        sweep(fragile, range(100), repro="python -m pytest tests/mine -k fragile")
    assert found.value.__notes__ == ["SIM_SEED=17 python -m pytest tests/mine -k fragile"]
    assert sweep(fragile, range(10), repro="") == 10
