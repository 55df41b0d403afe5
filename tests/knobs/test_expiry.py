"""Changes for a time that cross each other: what goes back, to what, and what stays. Sans-IO."""

from __future__ import annotations

import pytest
from tests.knobs.knob_maker import Desk, make_desk

from myxa.actors.coordinator.knob_decisions import Decisions, Expiries, Expiry
from myxa.actors.coordinator.knob_plan import ChangePlan, OwnerStates, plan_change
from myxa.core.errors import ConfigError
from myxa.core.knobs import ChangeRequest, KnobCommit, KnobValue, Operator

FILE = 8


class Run:
    """Two rollout actors and a buffer that use every change at once; time is told."""

    def __init__(self) -> None:
        self.decisions, self.expiries = Decisions(), Expiries()
        self.desks: dict[str, Desk] = {
            "rollout/0": make_desk("rollout/0", "room", "level"),
            "rollout/1": make_desk("rollout/1", "room", "level"),
            "buffer": make_desk("buffer", "eta", "level"),
        }
        self.epoch = 0
        self.now_s = 0.0

    @property
    def roster(self) -> OwnerStates:
        return OwnerStates([desk.owner.sheet() for desk in self.desks.values()], {})

    def set(self, target: str, for_s: float = 0.0, **values: KnobValue) -> int:
        plan = plan_change(ChangeRequest(values=values, who=Operator(), target=target), self.roster)
        self.expiries.check(plan, self.now_s)
        return self._make(plan, for_s=for_s)

    def undo(self, epoch: int) -> None:
        undone, plan = self.decisions.plan_undo(epoch, self.roster)
        self._make(plan, undoes=undone)

    def until(self, now_s: float) -> None:
        """As the conductor does it, in the order of time."""
        while (due_s := self.expiries.next_s()) is not None and due_s <= now_s:
            self.now_s = due_s
            for expiry in self.expiries.due(0, due_s):
                undone, plan = self.decisions.plan_undo(expiry.epoch, self.roster, expiry.names)
                self._make(plan, undoes=undone)
                self.expiries.done(expiry)
        self.now_s = now_s

    def rooms(self) -> tuple[KnobValue, ...]:
        """Of both actors and of one that would join now; an actor that restarts gets what it has."""
        for name in ("rollout/0", "rollout/1"):
            assert self._of_joiner(name) == self.desks[name].values["room"], f"{name} restarted"
        return (*(self.desks[f"rollout/{i}"].values["room"] for i in range(2)), self._of_joiner("rollout/9"))

    def _of_joiner(self, name: str) -> KnobValue:
        anew = make_desk(name, "room", "level")
        anew.owner.take_over(self.decisions.commits_for(name))
        return anew.values["room"]

    def _make(self, plan: ChangePlan, *, undoes: int = 0, for_s: float = 0.0) -> int:
        self.epoch += 1
        for owner, values in plan.values.items():
            self.desks[owner].owner.commit(KnobCommit(epoch=self.epoch, at=0, values=dict(values)))
        decided = self.decisions.decide(self.epoch, 0, 0, plan, undoes=undoes)
        for ended in self.expiries.ended_by(plan):
            self.decisions.lapse(ended.epoch, ended.names)
        self.expiries.add(decided, for_steps=0, for_s=for_s, version=0, now_s=self.now_s)
        return self.epoch


@pytest.mark.parametrize("target", ["", "rollout/*"])
def test_all_actors_go_back_each_to_its_own_value(target: str) -> None:
    run = Run()
    run.set("rollout/1", room=5)
    run.set(target, for_s=10, room=2)
    assert run.rooms() == (2, 2, 2)
    assert set(run.expiries.words(0)) == {"room"}
    run.until(10)
    assert run.rooms() == (FILE, 5, FILE)


@pytest.mark.parametrize(("outer", "inner"), [("", "rollout/*"), ("", "rollout/1"), ("rollout/*", "rollout/0")])
def test_a_change_of_some_of_the_actors_is_refused_until_they_went_back(outer: str, inner: str) -> None:
    run = Run()
    first = run.set(outer, for_s=10, level="DEBUG")
    with pytest.raises(ConfigError, match="level goes back in 10 s"):
        run.set(inner, level="ERROR")
    run.undo(first)
    run.set(inner, level="ERROR")
    assert run.expiries.next_s() is None


@pytest.mark.parametrize("target", ["rollout/*", ""])
def test_all_are_set_again_and_none_goes_back(target: str) -> None:
    run = Run()
    run.set("rollout/*", for_s=10, room=2)
    again = run.set(target, room=3)
    assert run.expiries.words(0) == {}
    run.until(10)
    assert run.rooms() == (3, 3, 3)
    run.undo(again)
    assert run.rooms() == (FILE, FILE, FILE), "not to the value that was for a time"


@pytest.mark.parametrize(("outer_s", "inner_s"), [(20, 5), (5, 20)])
def test_a_time_within_a_time_leaves_nothing_behind(outer_s: float, inner_s: float) -> None:
    run = Run()
    run.set("rollout/*", for_s=outer_s, room=4)
    run.set("rollout/*", for_s=inner_s, room=2)
    run.until(inner_s - 1)
    assert run.rooms() == (2, 2, 2)
    run.until(inner_s)
    assert run.rooms() == (FILE, FILE, FILE)
    assert run.expiries.next_s() is None


def test_one_that_is_taken_back_by_hand_does_not_go_back_again() -> None:
    run = Run()
    first = run.set("rollout/*", for_s=10, room=4, level="DEBUG")
    run.set("rollout/*", level="ERROR")
    assert set(run.expiries.words(0)) == {"room"}
    run.undo(first)
    assert run.expiries.next_s() is None
    assert (run.rooms(), run.desks["rollout/0"].values["level"]) == ((FILE, FILE, FILE), "ERROR")
    with pytest.raises(ConfigError, match="taken back before"):
        run.undo(first)


def test_a_knob_of_one_owner_may_be_set_again_by_its_name() -> None:
    run = Run()
    run.set("", for_s=10, eta=4)
    run.set("buffer", eta=2)
    run.until(10)
    assert run.desks["buffer"].values["eta"] == 2


@pytest.mark.parametrize(("step_s", "begun_at"), [(60.0, 197), (0.5, 197), (0.1, 190), (0.01, 100)])
def test_the_way_back_to_a_number_is_begun_early_enough_for_fast_steps(step_s: float, begun_at: int) -> None:
    expiries = Expiries()
    expiries.restore([Expiry(1, frozenset({"lr"}), "", due_version=197, not_before=200)], 0.0)
    asked = (version for version in range(20, 201) if expiries.due(version, version * step_s))
    assert next(asked) == begun_at
    assert not expiries.due(10, 500.0), "the run fell back, and its steps are slow while it comes again"
    assert not expiries.due(11, 900.0)
