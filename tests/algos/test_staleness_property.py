"""Random schedules: whatever the engines, lengths, filters, deaths and retunes do, the bound holds and work goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from myxa.algos.staleness import NO_TOKEN, POLICIES, Admission, LineEntry, LineStage

SEED = 20261
NUM_SCHEDULES = 1_200


@dataclass
class Work:
    """A group as the world outside admission sees it."""

    engine: int
    left: int
    """Events until it is finished."""
    oldest: int
    """Stamp of its oldest token, NO_TOKEN while it has none."""
    is_filtered: bool


@dataclass
class Schedule:
    """One random world around one Admission. Everything that admission says is checked against an own account."""

    rng: random.Random
    admission: Admission
    num_engines: int
    can_retune: bool
    versions: list[int] = field(default_factory=list)
    under_way: dict[int, Work] = field(default_factory=dict)
    waiting: dict[int, Work] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    claimed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_drawn: int = 0
    num_filtered: int = 0

    def __post_init__(self) -> None:
        self.versions = [0] * self.num_engines

    # -- what may happen

    def ask(self, engine: int) -> bool:
        """An engine with room asks for work: first what was handed back, then a new draw."""
        version = self.versions[engine]
        for group_id in list(self.waiting):
            if self.admission.may_dispatch(version, group_id):
                work = self.waiting.pop(group_id)
                work.engine = engine
                self.admission.dispatched(group_id, version)
                self.under_way[group_id] = work
                return True
        if not self.admission.may_dispatch(version):
            return False
        rng = self.rng
        length = 1 + int(rng.lognormvariate(0.5, 1.0)) if rng.random() < 0.97 else 60
        self.admission.dispatched(self.num_drawn, version)
        self.under_way[self.num_drawn] = Work(engine, length, NO_TOKEN, rng.random() < 0.15)
        self.num_drawn += 1
        return True

    def work_on(self) -> bool:
        """One group under way gets tokens, stamped with what its engine serves at this moment."""
        if not self.under_way:
            return False
        group_id = self.rng.choice(list(self.under_way))
        work = self.under_way[group_id]
        work.oldest = min(work.oldest, self.versions[work.engine])
        work.left -= 1
        if work.left > 0:
            return True
        del self.under_way[group_id]
        if work.is_filtered:
            self.admission.filtered(group_id)
            self.num_filtered += 1
        else:
            self.admission.ready(group_id, work.oldest)
            self.ready[group_id] = work.oldest
        return True

    def kill(self) -> None:
        """An engine dies: its groups are handed back, some with their tokens; it comes back with the newest weights."""
        engine = self.rng.randrange(self.num_engines)
        for group_id in [g for g, work in self.under_way.items() if work.engine == engine]:
            work = self.under_way.pop(group_id)
            if self.rng.random() < 0.5:
                work.oldest = NO_TOKEN
            self.admission.requeued(group_id, -1 if work.oldest == NO_TOKEN else work.oldest)
            self.waiting[group_id] = work
        self.versions[engine] = self.rng.randint(self.versions[engine], self.admission.newest_version)

    def adopt(self) -> bool:
        """An engine that lags takes the next version."""
        behind = [e for e, v in enumerate(self.versions) if v < self.admission.newest_version]
        if not behind:
            return False
        self.versions[self.rng.choice(behind)] += 1
        return True

    def claim(self) -> bool:
        """The trainer asks for a batch."""
        step = self.admission.next_step
        if step > self.admission.newest_version:
            return False
        selection = self.admission.select(step)
        self.drop(selection.overdue)
        if selection.claim is None:
            return bool(selection.overdue)
        assert len(selection.claim) == self.admission.batch_size
        for group_id in selection.claim:
            lag = step - self.ready.pop(group_id)
            assert lag <= self.admission.max_staleness
        self.claimed[step] = selection.claim
        return True

    def train(self) -> bool:
        """The oldest claimed step ends."""
        step = self.admission.newest_version
        if step not in self.claimed:
            return False
        self.trained.extend(self.claimed.pop(step))
        self.admission.trained(step)
        return True

    def retune(self) -> None:
        """The operator turns the knob, or the buffer restarts from its ledger."""
        if self.rng.random() < 0.3:
            self.restart()
            return
        policy = self.rng.choice(POLICIES)
        self.drop(self.admission.retune(max_staleness=self.rng.randint(0, 4), policy=policy))

    def restart(self) -> None:
        """A new Admission from what a ledger would know."""
        old = self.admission
        taken = {group_id: 0 for batch in self.claimed.values() for group_id in batch} | dict.fromkeys(self.trained, 0)
        for group_id, work in self.under_way.items():
            work.oldest = NO_TOKEN
            self.waiting[group_id] = work
        self.under_way.clear()
        places = [LineEntry(g, 0, LineStage.TAKEN) for g in taken]
        places += [
            LineEntry(g, -1 if w.oldest == NO_TOKEN else w.oldest, LineStage.WAITING) for g, w in self.waiting.items()
        ]
        places += [LineEntry(g, oldest, LineStage.READY) for g, oldest in self.ready.items()]
        self.waiting = dict(sorted(self.waiting.items()))
        self.admission = Admission(old.policy, max_staleness=old.max_staleness, batch_size=old.batch_size)
        self.drop(
            self.admission.restore(
                sorted(places, key=lambda p: p.group_id), next_step=old.next_step, newest_version=old.newest_version
            )
        )
        assert self.admission.slots_used == old.slots_used

    def drop(self, overdue: tuple[int, ...]) -> None:
        for group_id in overdue:
            gone = [box.pop(group_id, None) for box in (self.under_way, self.waiting, self.ready)]
            assert sum(x is not None for x in gone) == 1, f"group {group_id} dropped from nowhere"
            self.dropped.append(group_id)

    # -- the run

    def run(self, num_steps: int) -> None:
        rng = self.rng
        actions = [self.claim, self.train, self.adopt, self.work_on, self.work_on, self.work_on]
        for _ in range(100_000):
            if self.admission.newest_version >= num_steps:
                break
            draw, has_changed = rng.random(), True
            if draw < 0.01:
                self.kill()
            elif draw < 0.02 and self.can_retune:
                self.retune()
            elif draw < 0.45:
                has_changed = self.ask(rng.randrange(self.num_engines))
            else:
                has_changed = rng.choice(actions)()
            if has_changed and not self.can_retune:
                self.check_time_is_left()
        assert self.admission.newest_version >= num_steps, "no progress"
        self.account()

    def check_time_is_left(self) -> None:
        """The invariant of the proof of `pace`: for every d, the groups that are due by step d fit in front of it."""
        admission = self.admission
        if admission.policy == "drop":
            return
        open_groups = [e for e in admission._line if e.stage is not LineStage.TAKEN and e.version != NO_TOKEN]
        dues = sorted(e.version + admission.max_staleness for e in open_groups)
        for number, due in enumerate(dues, 1):
            assert number <= (due - admission.next_step + 1) * admission.batch_size

    def account(self) -> None:
        """Nothing lost, nothing doubled."""
        places = [*self.trained, *self.dropped, *self.under_way, *self.waiting, *self.ready]
        places += [group_id for batch in self.claimed.values() for group_id in batch]
        assert len(places) == len(set(places))
        assert len(places) + self.num_filtered == self.num_drawn
        assert self.admission.num_open == len(self.under_way) + len(self.waiting) + len(self.ready)
        assert self.admission.num_ready == len(self.ready)


def _run(seed: int, policy: str, *, can_retune: bool) -> Schedule:
    rng = random.Random(seed)
    admission = Admission(policy, max_staleness=rng.randint(0, 4), batch_size=rng.choice((1, 2, 3, 5)))
    schedule = Schedule(rng, admission, rng.randint(1, 3), can_retune)
    try:
        schedule.run(num_steps=6)
    except Exception as error:
        error.add_note(f"policy {policy}, seed {seed}, retunes {can_retune}")
        raise
    return schedule


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_holds_in_random_schedules(policy: str) -> None:
    """Without retunes pace and wait never drop; drop does; none exceeds eta, loses, doubles or deadlocks."""
    num_dropped = sum(len(_run(SEED + i, policy, can_retune=False).dropped) for i in range(NUM_SCHEDULES // 6))
    assert (num_dropped > 0) == (policy == "drop"), f"seeds from {SEED}"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_holds_when_eta_and_policy_change(policy: str) -> None:
    """Retunes and restarts in the middle: the bound that holds is the one in force when the batch is formed."""
    for i in range(NUM_SCHEDULES // 6):
        _run(SEED - 1 - i, policy, can_retune=True)
