"""A change over several owners is made everywhere or nowhere, whoever dies, whatever comes late or twice."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.knobs.change_world import NUMBERED, World

pytestmark = pytest.mark.timeout(170)

NUM_EXAMPLES = int(os.environ.get("MYXA_KNOB_EXAMPLES", "80"))
NAMES = st.sampled_from(["trainer/0", "buffer", "rollout/0", "rollout/1"])
PICKS = st.integers(0, 7)
WISHES = st.sampled_from([
    (("lr", "filter"), ""), (("lr",), "trainer"), (("filter", "lr", "pace"), ""), (("lr", "room"), ""), (("filter",), ""),
    (("room",), "rollout/*"), (("room", "pace"), "rollout/1"), (("pace",), "rollout"), (("pace", "filter"), "buffer"),
    (("lr", "filter", "room", "pace"), ""),
])  # fmt: skip
COUNTS = {"begun": 0, "decided": 0, "aborted": 0, "killed": 0, "passed": 0, "held": 0}


class ChangeMachineWorld(RuleBasedStateMachine):
    """Rules are what happens; the invariants look at every owner that ever lived."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(wish=WISHES, values=st.lists(st.integers(0, 40), min_size=4, max_size=4), not_before=PICKS, num=PICKS)
    def ask(self, wish: tuple[tuple[str, ...], str], values: list[int], not_before: int, num: int) -> None:
        names, whom = wish
        COUNTS["begun"] += not self.world.ask(dict(zip(names, values, strict=False)), whom, not_before)
        for _ in range(num):
            self.world.deliver(num)
        if num > 4:
            self.world.repeat(-num)

    @rule(epoch=st.integers(0, 6))
    def undo(self, epoch: int) -> None:
        COUNTS["begun"] += not self.world.undo(epoch)

    @rule(pick=PICKS)
    def deliver(self, pick: int) -> None:
        self.world.deliver(pick)

    @rule(pick=PICKS)
    def hear(self, pick: int) -> None:
        self.world.hear(pick)

    @rule(count=st.integers(1, 12))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver(0)
            self.world.hear(0)

    @rule(name=st.sampled_from(sorted(NUMBERED)), count=st.integers(1, 3))
    def work(self, name: str, count: int) -> None:
        site = self.world.sites.get(name)
        for _ in range(count):
            if site is not None and site.has_joined and site.number < 50:
                COUNTS["passed" if site.try_to_pass() else "held"] += 1

    @rule(name=NAMES)
    def kill(self, name: str) -> None:
        COUNTS["killed"] += name in self.world.sites
        self.world.kill(name)

    @rule()
    def start_all(self) -> None:
        for name in ("trainer/0", "buffer", "rollout/0", "rollout/1"):
            self.world.start(name)

    @rule(name=NAMES)
    def start(self, name: str) -> None:
        self.world.start(name)

    @rule(pick=PICKS)
    def time_out(self, pick: int) -> None:
        self.world.time_out(pick)

    @rule(pick=st.integers(0, 50))
    def repeat(self, pick: int) -> None:
        self.world.repeat(pick)

    @rule(is_full=st.sampled_from([True, False, False]))
    def disk(self, is_full: bool) -> None:
        self.world.disk_is_full = is_full

    @invariant()
    def numbers_are_right(self) -> None:
        self.world.check_numbers()

    @invariant()
    def nothing_undecided_is_used(self) -> None:
        self.world.check_now()

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_all_agree()
        self.world.check_numbers()
        COUNTS["decided"] += len(self.world.past)
        COUNTS["aborted"] += self.world.aborted


def test_all_or_none_in_every_history() -> None:
    COUNTS.update(dict.fromkeys(COUNTS, 0))
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        ChangeMachineWorld,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        ),
    )
    print(COUNTS)
    # A world in which nothing happens proves nothing.
    assert all(COUNTS[name] > NUM_EXAMPLES // 4 for name in COUNTS), COUNTS
