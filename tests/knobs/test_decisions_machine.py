"""All or none, whoever dies, whatever comes late or twice: changes, undoing, owners and coordinators that start
anew."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.harness.decider import WHO, decided

from myxa.actors.coordinator.knob_decisions import ChangeDraft, Decisions, OwnerStates, draft_change
from myxa.actors.knobs.owner import Knob, KnobOwner
from myxa.core.errors import ConfigError
from myxa.core.knobs import AuditRecord, ChangeRequest, Decision, KnobValue, LiveKnobs, Tunable

NUM_EXAMPLES = int(os.environ.get("MYXA_KNOB_EXAMPLES", "60"))
FIRST = 1
KNOBS: dict[str, tuple[str, ...]] = {
    "trainer/0": ("lr", "pace"), "buffer": ("eta", "pace"), "rollout/0": ("room", "pace"), "rollout/1": ("room", "pace"),
}  # fmt: skip
WISHES = st.sampled_from([
    ("lr",), ("lr", "eta"), ("lr", "pace"), ("room",), ("room", "pace"), ("pace",), ("lr", "eta", "room", "pace"),
])  # fmt: skip
NAMES = st.sampled_from(sorted(KNOBS))
PICKS = st.integers(0, 7)


class Site:
    """One incarnation of an owner."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, KnobValue] = dict.fromkeys(KNOBS[name], FIRST)
        self.owner = KnobOwner(name, [self._knob(knob) for knob in KNOBS[name]])

    def _knob(self, name: str) -> Knob:
        role = "process" if name == "pace" else self.name.partition("/")[0]
        boundary: Any = "step" if name == "lr" else "now"
        tunable = Tunable(name=name, kind="int", boundary=boundary, owner=role, help="", low=0, high=1000)
        return Knob(tunable, lambda: self.values[name], lambda value: self.values.update({name: value}))


class DecisionsMachine(RuleBasedStateMachine):
    """See the module's head."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[AuditRecord] = []
        self.decisions = Decisions("test")
        self.sites = {name: Site(name) for name in KNOBS}
        self.version = 0
        self.passed = -1
        """By this trainer."""
        self.under_way: list[tuple[Site, LiveKnobs]] = []

    # -- the operator

    @rule(wish=WISHES, value=st.integers(0, 40), not_before=PICKS, for_steps=st.sampled_from([0, 0, 2]))
    def change(self, wish: tuple[str, ...], value: int, not_before: int, for_steps: int) -> None:
        request = ChangeRequest(values=dict.fromkeys(wish, value), who=WHO, for_steps=for_steps)
        self._decide(lambda: draft_change(request, self.roster, self.decisions), not_before + self.version)

    @rule(epoch=st.integers(0, 6))
    def undo(self, epoch: int) -> None:
        self._decide(lambda: self.decisions.draft_undo(epoch, self.roster))

    @property
    def roster(self) -> OwnerStates:
        return OwnerStates([site.owner.sheet() for site in self.sites.values()], {})

    def _decide(self, drafter: Any, not_before: int = 0, at: int = 0) -> None:
        try:
            draft: ChangeDraft = drafter()
        except ConfigError:
            return
        if draft.moves:
            at = at or max(draft.earliest(self.roster, self.version), not_before)
            assert at > self.passed or not draft.decision.numbered
            self._write(decided(draft, self.decisions.epoch + 1, at, version=self.version))

    def _write(self, record: AuditRecord) -> None:
        self.log.append(record)
        self.decisions.add(record)

    # -- owners

    @rule(name=NAMES, is_lost=st.booleans())
    def ask(self, name: str, is_lost: bool) -> None:
        site = self.sites[name]
        news = self.decisions.news(site.owner.heard)
        if not is_lost:
            site.owner.take(news)
        self.under_way.append((site, news))

    @rule(pick=PICKS)
    def arrive(self, pick: int) -> None:
        """An answer comes late, or once more."""
        if self.under_way:
            site, news = self.under_way[-1 - pick % len(self.under_way)]
            site.owner.take(news)

    @rule(num=st.integers(1, 3))
    def work(self, num: int) -> None:
        site = self.sites["trainer/0"]
        for _ in range(num):
            number = self.version
            site.owner.reach("step", number)
            self._end_what_is_due(number)
            site.owner.take(self.decisions.news(site.owner.heard))
            site.owner.use_due("step", number)
            self.passed, self.version = number, number + 1
            assert site.values["lr"] == self._meant("lr", number)
            for due in self.decisions.due(self.version, 0.0):
                self._decide(lambda due=due: self.decisions.draft_undo(due.epoch, self.roster, due.names))

    def _end_what_is_due(self, number: int) -> None:
        for due in self.decisions.due(0, 0.0, number):
            self._decide(lambda due=due: self.decisions.draft_undo(due.epoch, self.roster, due.names), at=number)

    @rule(name=NAMES, back=st.integers(0, 5))
    def restart(self, name: str, back: int) -> None:
        self.sites[name] = site = Site(name)
        if name == "trainer/0":
            before, self.version = self.version, max(self.version - back, 0)
            self.passed = self.version - 1
            self._write(AuditRecord(
                number=0, wall_s=0, verb="rewind", who=WHO, arguments={}, result="done", at=before, version=self.version,
                decision=Decision(launch="test"),
            ))  # fmt: skip
        site.owner.take(self.decisions.news(0))

    @rule()
    def coordinator_starts_anew(self) -> None:
        self.decisions = Decisions("test")
        self.decisions.replay(self.log)

    # -- what must hold

    def _meant(self, name: str, number: int) -> KnobValue:
        """By the log: the newest value that came to its number and was not ended."""
        begun: dict[int, int] = {}
        ended: dict[int, int] = {}
        standing: dict[int, AuditRecord] = {}
        for record in self.log:
            decision = record.decision
            assert decision is not None
            if record.verb == "rewind":
                for numbers in (begun, ended):
                    numbers.update({e: min(n, record.version) for e, n in numbers.items() if n <= record.at})
            elif name in decision.values:
                for epoch, older in standing.items():
                    if epoch == decision.undoes or (older.decision and older.decision.for_steps):
                        ended.setdefault(epoch, record.at if name in decision.numbered else 0)
                begun[record.epoch] = record.at if name in decision.numbered else 0
                if decision.values[name] is not None:
                    standing[record.epoch] = record
        for epoch in sorted(standing, reverse=True):
            decision = standing[epoch].decision
            assert decision is not None
            if begun[epoch] <= number < ended.get(epoch, 1 << 60):
                return decision.values[name]  # type: ignore[return-value]
        return FIRST

    @invariant()
    def only_decided_values_are_used(self) -> None:
        possible = {FIRST, *(v for r in self.log if r.decision for v in r.decision.values.values())}
        for site in self.sites.values():
            assert set(site.values.values()) <= possible

    def teardown(self) -> None:
        """Everybody asks once more, and agrees with the log; so does an owner that joins."""
        self.work(1)
        for name, site in self.sites.items():
            for site_now in (site, Site(name)):
                site_now.owner.take(self.decisions.news(site_now.owner.heard))
                site_now.owner.use_due("step", self.passed)
                for knob in KNOBS[name]:
                    assert site_now.values[knob] == self._meant(knob, self.passed), (name, knob)
        self._resumed_from_a_checkpoint_has_the_same()

    def _resumed_from_a_checkpoint_has_the_same(self) -> None:
        resumed = Decisions("next")
        for knob in sorted(self.decisions.live(self.version, 0.0).knobs, key=lambda k: (k.for_steps, k.at)):
            assert knob.value is not None
            request = ChangeRequest(values={knob.name: knob.value}, who=WHO, for_steps=knob.for_steps)
            draft = draft_change(request, self.roster, resumed)
            resumed.add(
                decided(draft, resumed.epoch + 1, max(knob.at, self.version), version=self.version, verb="restore")
            )
        self._end_what_is_due(self.version)  # the checkpoint left that out already
        for name, knobs in KNOBS.items():
            for number in range(self.version, self.version + 12):
                site = Site(name)
                site.owner.take(resumed.news(0))
                site.owner.use_due("step", number)
                for knob in knobs:
                    assert site.values[knob] == self._meant(knob, number), (knob, number)
        ends = [{ended_knob.knob.name: end for ended_knob, _, end in log._ends()} for log in (self.decisions, resumed)]
        assert all(ends[0][name] == end for name, end in ends[1].items())
        with pytest.raises(ConfigError):
            resumed.draft_undo(0, self.roster)


TestDecisions = DecisionsMachine.TestCase
TestDecisions.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=50, deadline=None)
