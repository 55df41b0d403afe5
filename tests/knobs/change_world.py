"""A coordinator and owners of knobs without sockets, in a world that loses, delays, repeats and kills.

The real parts: `ChangeMachine`, `Decisions`, `KnobOwner`. The world carries instructions and answers in any order, and
checks after everything that happened that no owner ever used a value for a number for which it was not decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from myxa.actors.coordinator.knob_change import (
    Abort,
    ChangeEvent,
    ChangeMachine,
    ChangeOptions,
    Commit,
    Delivered,
    Gone,
    Instruction,
    NotRecorded,
    Prepare,
    RecordDecision,
    Recorded,
    Unanswered,
    Voted,
)  # fmt: skip
from myxa.actors.coordinator.knob_decisions import Decisions
from myxa.actors.coordinator.knob_plan import OwnerStates, plan_change
from myxa.actors.knobs.owner import Knob, KnobOwner
from myxa.core.clock import ManualClock
from myxa.core.errors import ConfigError
from myxa.core.knobs import ChangeRequest, KnobValue, Operator, Tunable

NUMBERED = {"trainer/0": "lr", "buffer": "filter"}
"""Owner -> its knob with numbers. Every owner has the knob "pace" too, which is used at once."""
BOUNDARY = {"lr": "step", "filter": "batch", "room": "request"}
FIRST = 1
PACE = "pace"


class Site:
    """One incarnation of an owner: what it uses, and a log of what it used for which number."""

    def __init__(self, name: str, clock: ManualClock) -> None:
        self.name = name
        self.number = -1
        self.values: dict[str, KnobValue] = {PACE: FIRST, self.knob: FIRST}
        self.used: list[tuple[int, KnobValue]] = []
        self.has_joined = False
        self.heard: set[int] = set()
        """Epochs that this incarnation was asked about."""
        self.owner = KnobOwner(
            name, [self._knob(PACE), self._knob(self.knob)], last_boundary=lambda: self.number, clock=clock
        )

    @property
    def knob(self) -> str:
        return NUMBERED.get(self.name, "room")

    def _knob(self, name: str) -> Knob:
        boundary: Any = BOUNDARY.get(name, "now")
        role = "process" if name == PACE else self.name.partition("/")[0]
        tunable = Tunable(name=name, kind="int", boundary=boundary, owner=role, help="", low=0, high=1000)

        def use(value: KnobValue) -> None:
            self.values[name] = value

        return Knob(tunable, lambda: self.values[name], use, lambda v: "bad luck" if v == 13 else "")

    def try_to_pass(self) -> bool:
        """The next number, unless the owner must wait."""
        if self.name not in NUMBERED:
            return True
        boundary: Any = BOUNDARY[self.knob]
        if self.owner.holds(boundary, self.number + 1):
            return False
        passing = self.owner.pass_boundary(boundary, self.number + 1, 1.0)
        try:
            passing.send(None)
        except StopIteration:
            self.number += 1
            self.used.append((self.number, self.values[self.knob]))
            return True
        raise AssertionError("an owner that does not hold waited")


@dataclass
class Past:
    """A decided change, as the checker remembers it."""

    epoch: int
    at: int
    values: dict[str, dict[str, KnobValue]]


@dataclass
class World:
    """See the module's head."""

    clock: ManualClock = field(default_factory=ManualClock)
    decisions: Decisions = field(default_factory=Decisions)
    machine: ChangeMachine | None = None
    plan: Any = None
    epoch: int = 0
    under_way: list[tuple[ChangeMachine, Instruction]] = field(default_factory=list[Any])
    answers: list[tuple[ChangeMachine, ChangeEvent]] = field(default_factory=list[Any])
    sites: dict[str, Site] = field(default_factory=dict[str, Site])
    dead: list[Site] = field(default_factory=list[Site])
    past: list[Past] = field(default_factory=list[Past])
    told: list[Prepare | Commit | Abort] = field(default_factory=list[Any])
    """What was sent, to be repeated late."""
    aborted: int = 0
    disk_is_full: bool = False

    def __post_init__(self) -> None:
        for name in ("trainer/0", "buffer", "rollout/0", "rollout/1"):
            self.start(name)

    # -- owners

    def start(self, name: str) -> None:
        if name not in self.sites:
            self.sites[name] = Site(name, self.clock)
            self.join(name)

    def join(self, name: str) -> None:
        """As `catch_up` and `rollout_ready` do: only while nothing is undecided."""
        site = self.sites.get(name)
        if site is None or site.has_joined or self.is_open:
            return
        site.owner.take_over(self.decisions.commits_for(name))
        site.number = max((s.number for s in self.dead if s.name == name), default=-1)
        site.has_joined = True

    def kill(self, name: str) -> None:
        site = self.sites.pop(name, None)
        if site is None:
            return
        self.dead.append(site)
        # Part of what was on its way to it may have been done before it died.
        lost = [(m, i) for m, i in self.under_way if not isinstance(i, RecordDecision) and i.owner == name]
        self.under_way = [pair for pair in self.under_way if pair not in lost]
        for machine, instruction in lost:
            event: ChangeEvent = Unanswered(name, "died") if isinstance(instruction, Prepare) else Gone(name, "died")
            self.answers.append((machine, event))

    @property
    def is_open(self) -> bool:
        return self.machine is not None and self.machine.stage in ("preparing", "deciding")

    # -- changes

    def ask(self, values: dict[str, KnobValue], target: str, not_before: int) -> str:
        """Begin a change; returns why not, if not."""
        if self.is_open:
            return "one at a time"
        roster = OwnerStates([s.owner.sheet() for s in self.sites.values() if s.has_joined], {})
        request = ChangeRequest(values=values, who=Operator(), target=target, not_before=not_before)
        try:
            plan = plan_change(request, roster)
        except ConfigError as error:
            return str(error)
        return self.begin(plan, not_before)

    def begin(self, plan: Any, not_before: int = 0) -> str:
        unconfirmed = {owner for machine, i in self.under_way for owner in machine.open}
        unconfirmed |= {owner for machine, _ in self.answers for owner in machine.open}
        if unconfirmed & set(plan.values):
            return "not confirmed"
        if not plan.moves:
            return "nothing"
        self.epoch += 1
        options = ChangeOptions(not_before=not_before if plan.numbered else 0)
        self.machine, self.plan = ChangeMachine(self.epoch, plan.values, options), plan
        self._send(self.machine, self.machine.begin())
        return ""

    def undo(self, epoch: int) -> str:
        if self.is_open:
            return "one at a time"
        roster = OwnerStates([s.owner.sheet() for s in self.sites.values() if s.has_joined], {})
        try:
            self.undoes, plan = self.decisions.plan_undo(epoch, roster)
        except ConfigError as error:
            return str(error)
        return self.begin(plan)

    def _send(self, machine: ChangeMachine, instructions: list[Instruction]) -> None:
        for each in instructions:
            self.under_way.append((machine, each))
            if not isinstance(each, RecordDecision):
                self.told.append(each)
            if isinstance(each, Abort):
                self.aborted += 1

    # -- what may happen

    def deliver(self, pick: int) -> None:
        """One of the instructions that are under way arrives, in any order between owners, in order to one owner."""
        firsts: dict[str, int] = {}
        for index, (_, each) in enumerate(self.under_way):
            firsts.setdefault("" if isinstance(each, RecordDecision) else each.owner, index)
        if not firsts:
            return
        machine, each = self.under_way.pop(sorted(firsts.values())[pick % len(firsts)])
        if isinstance(each, RecordDecision):
            self._record(machine, each)
            return
        site = self.sites.get(each.owner)
        if site is None or not site.has_joined:
            gone = Unanswered(each.owner, "not there") if isinstance(each, Prepare) else Gone(each.owner, "not there")
            self.answers.append((machine, gone))
            return
        match each:
            case Prepare(change=change):
                site.heard.add(change.epoch)
                self.answers.append((machine, Voted(site.owner.prepare(change))))
            case Commit(commit=commit):
                site.owner.commit(commit)
                self.answers.append((machine, Delivered(each.owner)))
            case Abort(epoch=epoch):
                site.owner.abort(epoch)
                self.answers.append((machine, Delivered(each.owner)))

    def _record(self, machine: ChangeMachine, each: RecordDecision) -> None:
        if self.disk_is_full:
            self.answers.append((machine, NotRecorded("disk full")))
            return
        version = max((s.number for s in self.sites.values()), default=0)
        undoes = getattr(self, "undoes", 0)
        self.undoes = 0
        self.decisions.decide(machine.epoch, each.at, version, self.plan, undoes=undoes)
        self.past.append(Past(machine.epoch, each.at, {o: dict(v) for o, v in self.plan.values.items()}))
        self.answers.append((machine, Recorded()))

    def hear(self, pick: int) -> None:
        """One of the answers reaches the coordinator."""
        if not self.answers:
            return
        machine, event = self.answers.pop(pick % len(self.answers))
        self._send(machine, machine.on(event))
        if not self.is_open:
            for name in list(self.sites):
                self.join(name)

    def time_out(self, pick: int) -> None:
        """The coordinator gives a vote up although it is on its way: it arrives late, or not at all."""
        waiting = [i for i, (_, each) in enumerate(self.under_way) if isinstance(each, Prepare)]
        if waiting:
            machine, each = self.under_way[waiting[pick % len(waiting)]]
            assert isinstance(each, Prepare)
            self.answers.append((machine, Unanswered(each.owner, "too late")))

    def repeat(self, pick: int) -> None:
        """Something old arrives once more, or a question that was given up long ago for the first time."""
        if not self.told:
            return
        each = self.told[pick % len(self.told)]
        site = self.sites.get(each.owner)
        if site is None or not site.has_joined or self._is_first(each):
            return
        if isinstance(each, Prepare):
            is_over = not self.is_open or each.change.epoch < self.epoch
            if (
                is_over and each.change.epoch in site.heard
            ):  # a question never reaches another incarnation than the one it was put to
                site.owner.prepare(each.change)
        elif isinstance(each, Commit):
            site.owner.commit(each.commit)
        else:
            site.owner.abort(each.epoch)

    def _is_first(self, each: Prepare | Commit | Abort) -> bool:
        return any(instruction is each for _, instruction in self.under_way)

    def settle(self) -> None:
        """Everything arrives, everybody lives."""
        for _ in range(1000):
            if not self.under_way and not self.answers:
                break
            self.deliver(0)
            self.hear(0)
        for name in ("trainer/0", "buffer", "rollout/0", "rollout/1"):
            self.start(name)
        assert not self.under_way and not self.answers and not self.is_open

    # -- what must hold

    def expected(self, owner: str, knob: str, number: int | None) -> KnobValue:
        """What the decisions say for a number; None: now, for knobs without numbers. For an owner of a single change
        that came with a target, what its role got."""
        value: KnobValue = FIRST
        best = 0
        for past in self.past:
            mine = past.values.get(owner)
            if mine is None and any(k.name == knob and k.epoch == past.epoch for k in self.decisions.live().knobs):
                mine = {}
            if mine and knob in mine and past.epoch > best and (number is None or past.at <= number):
                best, value = past.epoch, mine[knob]
        return value

    def check_numbers(self) -> None:
        """No number was ever passed with another value than the one decided for it."""
        for site in [*self.dead, *self.sites.values()]:
            for number, value in site.used:
                expected = self.expected(site.name, site.knob, number)
                assert value == expected, f"{site.name} used {site.knob} = {value} for {number}, decided: {expected}"

    def check_now(self) -> None:
        """Values without numbers are of a decided change, or the run file's."""
        for site in self.sites.values():
            decided = {FIRST, *(v for p in self.past for vs in p.values.values() for n, v in vs.items())}
            assert set(site.values.values()) <= decided, f"{site.name} uses what nobody decided: {site.values}"
            assert 13 not in site.values.values()

    def check_all_agree(self) -> None:
        """After everything arrived: everybody uses what was decided last."""
        for site in self.sites.values():
            assert site.has_joined
            assert site.owner._prepared is None, f"{site.name} still holds a change"
            while site.name in NUMBERED and site.number < 60:
                assert site.try_to_pass()
            for knob, value in site.values.items():
                commits = self.decisions.commits_for(site.name)
                last = [c.values[knob] for c in commits if knob in c.values]
                assert value == (last[-1] if last else FIRST), f"{site.name}: {knob} = {value}, decided {last}"
