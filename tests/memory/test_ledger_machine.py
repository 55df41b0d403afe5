"""C8: the memory manager's decisions against a world that does its worst; invariants I1 to I10 of the protocol."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.memory.ledger_world import ALL, DEVICES, MEMBERS, MIB, SPANNING, Members, Weather, World

pytestmark = pytest.mark.timeout(110)

NAMES = st.sampled_from(sorted(MEMBERS | SPANNING))
COUNTS = {"steps": 0, "granted": 0, "refused": 0}
NUM_EXAMPLES = int(os.environ.get("MYXA_LEDGER_EXAMPLES", "40"))
STEPS = 40


class LedgerMachine(RuleBasedStateMachine):
    """Rules are what happens to the node; the world checks the invariants at every event."""

    @initialize(
        seed=st.integers(0, 2**32 - 1), members=st.sampled_from([MEMBERS, SPANNING]), drop=st.sampled_from([0.0, 0.4])
    )
    def begin(self, seed: int, members: Members, drop: float) -> None:
        print(f"seed {seed}")
        self.world = World(seed, members)
        self.world.advance(0.5)
        if drop:  # half of the examples begin in a storm
            self.world.weather = Weather(drop, drop, 3.0, 15.0)

    @rule(
        gang=st.sampled_from(["trainer", "rollout", "other"]),
        part=st.integers(1, 5),
        is_active=st.booleans(),
        is_alone=st.booleans(),
        deadline_s=st.sampled_from([5.0, 30.0, 60.0]),
    )
    def lease(self, gang: str, part: int, is_active: bool, is_alone: bool, deadline_s: float) -> None:
        quiet = tuple(g for g in ("trainer", "rollout") if g != gang) if is_alone else ()
        self.world.lease(
            gang, ALL[gang][: max(part, len(ALL[gang]) if part > 3 else part)], quiet, is_active, deadline_s
        )

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.5, 2.0, 10.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=NAMES)
    def work(self, name: str) -> None:
        self.world.work(name)

    @rule(name=NAMES)
    def kill(self, name: str) -> None:
        self.world.kill(name)

    @rule(name=NAMES)
    def respawn(self, name: str) -> None:
        if name in self.world.members and name not in self.world.live:
            self.world.spawn_tenant(name)
        self.world.advance(0.05)

    @rule(name=NAMES)
    def stop(self, name: str) -> None:
        self.world.stop(name)

    @rule(name=NAMES)
    def cont(self, name: str) -> None:
        self.world.cont(name)

    @rule()
    def restart_manager(self) -> None:
        self.world.restart_manager()

    @rule(
        drop=st.sampled_from([0.0, 0.1, 0.4]),
        double=st.sampled_from([0.0, 0.5]),
        delay_s=st.sampled_from([0.001, 0.1, 3.0]),
        slow_s=st.sampled_from([0.02, 1.0, 15.0]),
        lie=st.sampled_from([0.0, 0.0, 0.3]),
    )
    def change_weather(self, drop: float, double: float, delay_s: float, slow_s: float, lie: float) -> None:
        self.world.weather = Weather(drop, double, delay_s, slow_s, lie)

    @rule(device=st.sampled_from(DEVICES), num_mib=st.sampled_from([0, 50, 300]))
    def stranger(self, device: str, num_mib: int) -> None:
        world = self.world
        if world.used(device) - world.strangers[device] + num_mib * MIB <= 1000 * MIB:
            world.strangers[device] = num_mib * MIB
            world.has_cheated = True

    @rule()
    def same_again(self) -> None:
        """A lease that is asked for twice."""
        for request, _ in list(self.world.requests.values()):
            self.world.go(self.world.ask(request))

    @invariant()
    def holds(self) -> None:
        COUNTS["steps"] += 1
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """When the weather is calm again, whoever asks gets what fits."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.weather = Weather()
        world.strangers = dict.fromkeys(world.strangers, 0)
        for name in world.members:
            world.cont(name)
            if name not in world.live:
                world.spawn_tenant(name)
        world.advance(150)
        assert not world.requests, "I10: a lease is still open"
        for gang, quiet in (("trainer", "rollout"), ("rollout", "trainer")):
            asked = world.lease(gang, ALL[gang], (quiet,), True, 60.0)
            world.advance(61)
            assert world.answers[asked].granted, world.answers[asked].reason
        world.close()
        COUNTS["granted"] += world.num_granted
        COUNTS["refused"] += world.num_refused


def test_the_ledger_keeps_its_invariants() -> None:
    LedgerMachine.TestCase.settings = settings(
        max_examples=NUM_EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    LedgerMachine.TestCase("runTest").runTest()
    print(COUNTS)
    if NUM_EXAMPLES >= 40:
        assert COUNTS["steps"] >= 1000
        assert COUNTS["granted"] > 50
        assert COUNTS["refused"] > NUM_EXAMPLES // 40  # of a run of so many, whatever its examples are drawn from
