"""Knobs against the life of groups: random changes between random draws, returns, restarts, pauses and steps."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.buffer.conftest import IN_MEMORY, NumberedRows, make_group
from tests.harness.decider import WHO, news

from myxa.actors.buffer.filters import GroupFilters
from myxa.actors.buffer.finished_groups import FinishedGroups
from myxa.actors.buffer.groups import Groups
from myxa.actors.buffer.knobs import BufferKnobs, BufferLimits, BufferValues
from myxa.actors.coordinator.knob_decisions import Decisions, OwnerStates, draft_change
from myxa.actors.ledger.file import OPEN, State
from myxa.actors.ledger.ledger import Ledger
from myxa.algos.filters import GROUP_FILTERS
from myxa.algos.staleness import Admission
from myxa.core.errors import ConfigError
from myxa.core.knobs import ChangeRequest, LiveKnob, LiveKnobs
from myxa.core.messages import Assignment, DrawRequest, GroupReturned, SamplingParams

BATCH = 2
FIRST = BufferValues(
    max_staleness=2, on_stale="pace", temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, num_samples=2,
    group_filter="none",
)  # fmt: skip
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "max_staleness": st.integers(-1, 4),
    "on_stale": st.sampled_from(["pace", "wait", "drop", "hope"]),
    "temperature": st.sampled_from([0.5, 1.0, 1.5, 0.0, -1.0]),
    "top_k": st.sampled_from([-1, 0, 5]),
    "num_samples": st.integers(0, 3),
    "group_filter": st.sampled_from(["none", "zero_variance", "os:system"]),
    "stop_token_ids": st.sampled_from(["none", "13", "13,198", "eos", ""]),
}


class KnobsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.epoch = 0
        self.in_force: dict[str, Any] = {}
        self.force_epochs: dict[str, int] = {}
        self.first_terms: dict[int, tuple[int, SamplingParams, int]] = {}
        self.out: dict[int, Assignment] = {}
        self.trained: list[int] = []
        self.step = 0
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(Path(self.folder.name) / "l.sqlite", run="m", fingerprint="f", wall=lambda: 0.0)
        admission = Admission(FIRST.on_stale, max_staleness=FIRST.max_staleness, batch_size=BATCH)
        self.knobs = BufferKnobs(
            "buffer", self.ledger, admission, FIRST, SamplingParams(max_new_tokens=FIRST.max_new_tokens),
            filters=tuple(GROUP_FILTERS), limits=BufferLimits(),
        )  # fmt: skip
        self.groups = Groups(
            NumberedRows(7), self.knobs, GroupFilters("none", GROUP_FILTERS), BufferLimits(),
            finished=FinishedGroups(), tell=lambda kind, text: None, log=logging.getLogger("myxa.test"), started_s=-100.0,
        )  # fmt: skip
        self.knobs.use = self.groups.retune
        kept = ((name, value, self.force_epochs[name]) for name, value in self.in_force.items())
        values = [LiveKnob(name=n, value=value, first=0, epoch=epoch, at=0) for n, value, epoch in kept]
        self.knobs.take(LiveKnobs(epoch=self.epoch, knobs=tuple(values)))

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            self.folder.cleanup()

    # ---- the operator

    @rule(data=st.data(), names=st.lists(st.sampled_from(sorted(CHANGES)), min_size=1, max_size=3, unique=True))
    def change(self, data: st.DataObject, names: list[str]) -> None:
        values = {name: data.draw(CHANGES[name], label=name) for name in names}
        self.epoch += 1
        before = self.knobs.values
        roster = OwnerStates([self.knobs.sheet()], {})
        try:
            draft = draft_change(ChangeRequest(values=values, who=WHO), roster, Decisions("none"))
        except ConfigError:
            return
        verdict = self.knobs.judge(draft.values["buffer"], 0)
        assert self.knobs.values == before, "judged only"
        if verdict.refusal:
            return
        self.knobs.take(news(self.epoch, **values))
        self.in_force |= values
        self.force_epochs |= dict.fromkeys(values, self.epoch)

    @rule(back=st.integers(1, 3), name=st.sampled_from(sorted(CHANGES)), data=st.data())
    def late_news(self, back: int, name: str, data: st.DataObject) -> None:
        """One that a newer change of the same knob overtook has no effect."""
        epoch = self.force_epochs.get(name, 0) - back + 1
        if epoch < 1:
            return
        before = self.knobs.values
        if epoch < self.force_epochs[name] or not self.knobs.heard:
            self.knobs.take(news(epoch, **{name: data.draw(CHANGES[name])}))
        assert self.knobs.values == before

    @rule()
    def pause(self) -> None:
        self._pause_at(0)

    @rule()
    def go_on(self) -> None:
        self._pause_at(-1)

    def _pause_at(self, step: int) -> None:
        self.epoch += 1
        self.knobs.take(news(self.epoch, pause_at=step))
        self.in_force["pause_at"], self.force_epochs["pause_at"] = step, self.epoch

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.open()

    # ---- rollout and trainer

    def _asks(self, version: int, count: int = 1) -> DrawRequest:
        return DrawRequest(rollout="r", epoch=1, version=version, max_groups=count, wait_s=0.0, holding=tuple(self.out))

    @rule(count=st.integers(1, 6), behind=st.integers(0, 1))
    def draw(self, count: int, behind: int) -> None:
        version = max(self.step - behind, 0)
        request = self._asks(version, count)
        self.groups.note_report(request)
        for assignment in self.groups.draw(request, 0.0)[0]:
            group_id = assignment.prompt.group_id
            assert group_id not in self.out, "given out twice"
            told = (assignment.knobs, assignment.sampling, assignment.num_samples)
            now = self.knobs
            assert self.first_terms.setdefault(group_id, told) == told
            if assignment.attempt == 1:
                assert told == (now.terms_epoch, now.terms.sampling, now.values.num_samples)
            self.out[group_id] = assignment
        if self.in_force.get("pause_at") == 0:
            assert self.groups.draw(request, 0.0)[1] in ("paused", "finished")

    @precondition(lambda self: bool(self.out))
    @rule(data=st.data(), flat=st.booleans())
    def put(self, data: st.DataObject, flat: bool) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.out)))
        self.finish(group_id, [0.0] * self.out[group_id].num_samples if flat else None)

    def finish(self, group_id: int, rewards: list[float] | None) -> None:
        assignment = self.out.pop(group_id)
        row = self.ledger.find(group_id)
        group = msgspec.structs.replace(
            make_group(assignment, (row.version if row else 0,), rewards), knobs=assignment.knobs
        )
        assert self.groups.put(group, assignment.attempt, "r")[0].outcome != "duplicate"
        assert self.groups.put(group, assignment.attempt, "r")[0].outcome in ("duplicate", "stale-attempt")

    @precondition(lambda self: bool(self.out))
    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.out)))
        returned = GroupReturned(group_id=group_id, attempt=self.out.pop(group_id).attempt, rollout="r")
        assert self.groups.take_back(returned, 0.0)

    @rule(rounds=st.integers(1, 3), size=st.integers(2, 5), is_trained=st.booleans())
    def work(self, rounds: int, size: int, is_trained: bool) -> None:
        """What a healthy run does most of the time."""
        for _ in range(rounds):
            self.draw(size, 0)
            for group_id in sorted(self.out):
                self.finish(group_id, None)
            if is_trained:
                self.train()

    @rule()
    def train(self) -> None:
        if self.in_force.get("pause_at") == 0 and not self.ledger.claim_of(self.step):
            return
        batch = self.groups.claim(self.step)
        if not batch:
            return
        assert len(batch) == BATCH
        for group, oldest in zip(map(self.ledger.group, batch), batch.values(), strict=True):
            assert self.step - oldest <= self.knobs.values.max_staleness
            assert len(group.rewards) == self.first_terms[group.group_id][2]
        ids = list(batch)
        assert not set(ids) & set(self.trained), "trained twice"
        self.trained += ids
        self.groups.trained(self.step)
        self.step += 1

    # ---- what must hold after each

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "ledger"):
            return
        values = self.knobs.values
        for name, value in self.in_force.items():
            assert getattr(self.knobs if name == "pause_at" else values, name) == value
        assert self.knobs.epoch == max(self.force_epochs.values(), default=0)
        of_terms = [epoch for name, epoch in self.force_epochs.items() if name != "pause_at"]
        assert self.knobs.terms_epoch == max(of_terms, default=0)
        states = self.ledger.tally.states
        assert sum(states.values()) == self.ledger.draws.next_id == len(self.first_terms)
        assert states.get(State.TRAINED, 0) == len(self.trained)
        num_open = len(self.ledger.rows(*OPEN))
        assert num_open == self.groups.admission.num_open, "ledger and admission know the same groups"
        open_now = {row.group_id for row in self.ledger.rows(State.DISPATCHED, State.REQUEUED)}
        dropped = {gid for gid in self.out if gid not in open_now}
        assert all(self.ledger.find(gid).state is State.DROPPED for gid in dropped)  # type: ignore[union-attr]


TestKnobsMachine = KnobsMachine.TestCase
TestKnobsMachine.settings = settings(max_examples=30, stateful_step_count=35, deadline=None, derandomize=True)
