"""Changes for a time that cross each other: what goes back, to what, and what stays. Sans-IO."""

from __future__ import annotations

import pytest
from tests.harness.decider import WHO, decided
from tests.knobs.knob_maker import Desk, make_desk

from myxa.actors.coordinator.knob_decisions import RESTORE, ChangeDraft, Decisions, OwnerStates, draft_change
from myxa.core.errors import ConfigError
from myxa.core.knobs import AuditRecord, ChangeRequest, KnobValue

FILE = 8


class Run:
    """Two rollout actors, a buffer and a trainer; time is told."""

    def __init__(self) -> None:
        self.log: list[AuditRecord] = []
        self.decisions = Decisions("test")
        self.desks: dict[str, Desk] = {
            "rollout/0": make_desk("rollout/0", "room", "level"),
            "rollout/1": make_desk("rollout/1", "room", "level"),
            "buffer": make_desk("buffer", "eta", "level"),
            "trainer/0": make_desk("trainer/0", "lr"),
        }
        self.now_s = 0.0

    @property
    def roster(self) -> OwnerStates:
        return OwnerStates([desk.owner.sheet() for desk in self.desks.values()], {})

    def set(self, for_s: float = 0.0, for_steps: int = 0, at: int = 0, **values: KnobValue) -> int:
        request = ChangeRequest(values=values, who=WHO, for_s=for_s, for_steps=for_steps)
        return self._make(draft_change(request, self.roster, self.decisions), at)

    def undo(self, epoch: int, names: frozenset[str] = frozenset(), at: int = 0) -> None:
        self._make(self.decisions.draft_undo(epoch, self.roster, names), at)

    def until(self, now_s: float) -> None:
        """As the conductor does it, in the order of time; its process may be another one by then."""
        self.decisions = Decisions("test")
        self.decisions.replay(self.log)
        while (due_s := self.decisions.next_s()) is not None and due_s <= now_s:
            self.now_s = due_s
            for due in self.decisions.due(0, due_s):
                self.undo(due.epoch, due.names)
        self.now_s = now_s

    def rooms(self) -> tuple[KnobValue, ...]:
        """Of both actors and of one that would join now; an actor that restarts gets what it has."""
        for name in ("rollout/0", "rollout/1"):
            assert self._of_joiner(name) == self.desks[name].values["room"], f"{name} restarted"
        return (*(self.desks[f"rollout/{i}"].values["room"] for i in range(2)), self._of_joiner("rollout/9"))

    def _of_joiner(self, name: str) -> KnobValue:
        anew = make_desk(name, "room", "level")
        anew.owner.take(self.decisions.news(0))
        return anew.values["room"]

    def _make(self, draft: ChangeDraft, at: int, verb: str = "set") -> int:
        self.log.append(decided(draft, self.decisions.epoch + 1, at, verb=verb, wall_s=self.now_s))
        self.decisions.add(self.log[-1])
        for desk in self.desks.values():
            desk.owner.take(self.decisions.news(desk.owner.heard))
        return self.decisions.epoch


def test_all_actors_go_back_to_the_value_before() -> None:
    run = Run()
    run.set(room=5)
    run.set(for_s=10, room=2)
    assert run.rooms() == (2, 2, 2)
    assert run.decisions.reverts(3.0) == {"room": "in 7 s"}
    run.until(10)
    assert run.rooms() == (5, 5, 5)


def test_all_are_set_again_and_none_goes_back() -> None:
    run = Run()
    run.set(for_s=10, room=2)
    again = run.set(room=3)
    assert run.decisions.reverts(0) == {}
    run.until(10)
    assert run.rooms() == (3, 3, 3)
    run.undo(again)
    assert run.rooms() == (FILE, FILE, FILE), "not to the value that was for a time"


@pytest.mark.parametrize(("outer_s", "inner_s"), [(20, 5), (5, 20)])
def test_a_time_within_a_time_leaves_nothing_behind(outer_s: float, inner_s: float) -> None:
    run = Run()
    run.set(for_s=outer_s, room=4)
    run.set(for_s=inner_s, room=2)
    run.until(inner_s - 1)
    assert run.rooms() == (2, 2, 2)
    run.until(inner_s)
    assert run.rooms() == (FILE, FILE, FILE)
    assert run.decisions.next_s() is None


def test_one_that_is_taken_back_by_hand_does_not_go_back_again() -> None:
    run = Run()
    first = run.set(for_s=10, room=4, level="DEBUG")
    run.set(level="ERROR")
    assert set(run.decisions.reverts(0)) == {"room"}
    run.undo(first)
    assert run.decisions.next_s() is None
    assert (run.rooms(), run.desks["rollout/0"].values["level"]) == ((FILE, FILE, FILE), "ERROR")
    with pytest.raises(ConfigError, match="taken back before"):
        run.undo(first)


def test_a_numbered_value_goes_back_at_its_very_number_also_after_the_trainer_was_thrown_back() -> None:
    run = Run()
    first = run.set(for_steps=5, at=12, lr=2e-3)
    assert (run.decisions.due(0, 0, 16), run.decisions.due(99, 1e9)) == ([], [])
    assert run.decisions.reverts(0) == {"lr": "at version 17"}
    [due] = run.decisions.due(0, 0, 17)
    assert (due.epoch, due.names, due.at) == (first, {"lr"}, 17)
    back = AuditRecord(
        number=0, wall_s=0, verb="rewind", who=WHO, arguments={}, result="done", at=14, version=10,
        decision=run.log[0].decision,
    )  # fmt: skip
    run.decisions.add(back)
    assert run.decisions.due(0, 0, 17) == [due]
    anew = make_desk("trainer/0", "lr")
    anew.owner.take(run.decisions.news(0))
    assert anew.owner.use_due("step", 10) == {"lr": 2e-3}, "it was in force"
    run.undo(due.epoch, due.names, due.at)
    anew.owner.take(run.decisions.news(anew.owner.heard))
    assert anew.owner.use_due("step", 16) == {}
    assert anew.owner.use_due("step", 17) == {"lr": 1e-3}
    assert [(k.name, k.value, k.at) for k in run.decisions.live(16, 0).knobs] == [("lr", 2e-3, 10), ("lr", 1e-3, 17)]


def test_a_checkpoint_keeps_what_is_covered_and_the_time_that_is_left() -> None:
    run = Run()
    run.set(room=5)
    run.set(for_s=10, room=2)
    run.set(for_steps=5, at=12, lr=2e-3)
    run.set(for_steps=5, eta=3)
    live = run.decisions.live(14, 4.0).knobs
    assert [(k.name, k.value, k.at, k.for_steps, k.for_s) for k in live] == [
        ("room", 5, 0, 0, 0), ("room", 2, 0, 0, 6.0), ("lr", 2e-3, 14, 3, 0),
    ]  # fmt: skip
    assert [k.name for k in run.decisions.live(14, 10.0).knobs] == ["room", "lr"], "it is over"


def test_undo_leaves_what_a_checkpoint_restored() -> None:
    run = Run()
    request = ChangeRequest(values={"room": 5}, who=WHO)
    run._make(draft_change(request, run.roster, run.decisions), 0, RESTORE)
    for epoch, message in ((0, "no change to take back"), (1, "restored a checkpoint's values")):
        with pytest.raises(ConfigError, match=message):
            run.undo(epoch)
    run.set(room=6)
    run.undo(0)
    assert run.rooms() == (5, 5, 5)


def test_a_change_is_made_only_if_a_knob_has_the_expected_value() -> None:
    run = Run()
    run.set(at=12, lr=2e-3)
    wrong: list[tuple[dict[str, KnobValue], str]] = [
        ({"room": 7}, "room is 8, not 7"),
        ({"lr": 1e-3}, "lr is 0.002"),
        ({"no": 1}, "'no' to compare"),
    ]
    for expect, message in wrong:
        with pytest.raises(ConfigError, match=message):
            draft_change(ChangeRequest(values={"room": 2}, expect=expect), run.roster, run.decisions)
    assert draft_change(ChangeRequest(values={"room": 2}, expect={"lr": 2e-3}), run.roster, run.decisions).moves
