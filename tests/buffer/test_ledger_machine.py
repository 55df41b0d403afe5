"""The ledger against a dictionary: random verbs in random order, legal or not, with restarts in between."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.buffer.conftest import IN_MEMORY
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.ledger.file import LEFTOVER, STALE, Row, State, recorded
from myxa.actors.ledger.ledger import Ledger
from myxa.core.errors import LedgerError

REASONS = ("zero-variance", STALE, LEFTOVER)


@dataclass
class Known:
    state: State
    draw: int
    step: int = -1
    reason: str = ""
    payload: bytes | None = None
    is_whole: bool = False
    was_redrawn: bool = False


class LedgerMachine(RuleBasedStateMachine):
    """Every rule does the same to the ledger and to the model, and expects a refusal exactly where the model has one."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = self.open()
        self.groups: dict[int, Known] = {}
        self.next_draw = self.newest = self.next_step = self.durable_version = self.floor = 0
        self.has_claimed = False

    def open(self) -> Ledger:
        return Ledger(self.path, run="m", fingerprint="f", wall=lambda: 0.0)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            assert audit_ledger(self.path).problems == (), "also as it is judged from outside"
            assert recorded(self.path, "payload_floor") == str(self.floor), "what training may fall back to"
            self.ledger.close()
            self.folder.cleanup()

    def of(self, *states: State) -> list[int]:
        return [group_id for group_id, known in sorted(self.groups.items()) if known.state in states]

    def pick(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.groups))) if self.groups else None

    # ---- verbs

    @rule(count=st.integers(1, 4))
    def draw(self, count: int) -> None:
        rows: list[Row] = []
        for _ in range(count):
            group_id = len(self.groups)
            rows.append(Row(group_id, self.next_draw, -1, 1, rollout="r", epoch=1, version=0))
            self.groups[group_id] = Known(State.DISPATCHED, self.next_draw)
            self.next_draw += 1
        self.ledger.dispatch(rows)

    @rule()
    def redraw(self) -> None:
        waiting = [g for g, k in sorted(self.groups.items()) if k.reason == STALE and not k.was_redrawn]
        found = self.ledger.redraw()
        assert (found is None) == (not waiting)
        if found is None:
            return
        dropped, draw = found
        assert dropped in waiting
        assert draw == self.groups[dropped].draw
        group_id = len(self.groups)
        self.ledger.dispatch([Row(group_id, draw, dropped, 1, rollout="r", epoch=1, version=0)])
        self.groups[dropped].was_redrawn = True
        self.groups[group_id] = Known(State.DISPATCHED, draw)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group_id = self.pick(data)
        if group_id is None:
            return
        known = self.groups[group_id]
        payload = b"whole %d" % group_id
        if known.state in (State.DISPATCHED, State.REQUEUED):
            self.ledger.finish(group_id, payload, version=0, num_tokens=1)
            known.state, known.payload, known.is_whole = State.READY, payload, True
        else:
            with pytest.raises(LedgerError):
                self.ledger.finish(group_id, payload, version=0, num_tokens=1)

    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def drop(self, data: st.DataObject, reason: str) -> None:
        group_id = self.pick(data)
        if group_id is None:
            return
        known = self.groups[group_id]
        if known.state in (State.DISPATCHED, State.REQUEUED, State.READY):
            self.ledger.drop([(group_id, reason)])
            known.state, known.reason = State.DROPPED, reason
            if reason != LEFTOVER:
                known.payload = None
        else:
            with pytest.raises(LedgerError):
                self.ledger.drop([(group_id, reason)])

    @rule(data=st.data(), has_tokens=st.booleans())
    def requeue(self, data: st.DataObject, has_tokens: bool) -> None:
        group_id = self.pick(data)
        if group_id is None:
            return
        known = self.groups[group_id]
        partial = b"partial" if has_tokens else None
        if known.state in (State.DISPATCHED, State.REQUEUED):
            self.ledger.requeue([(group_id, partial, 0)], "gone")
            known.state = State.REQUEUED
            known.payload = partial or known.payload
        else:
            with pytest.raises(LedgerError):
                self.ledger.requeue([(group_id, partial, 0)], "gone")

    @rule(data=st.data())
    def dispatch_again(self, data: st.DataObject) -> None:
        group_id = self.pick(data)
        if group_id is None:
            return
        known = self.groups[group_id]
        row = Row(group_id, known.draw, -1, 1, rollout="r2", epoch=2, version=0)
        if known.state is State.REQUEUED:
            self.ledger.dispatch([row])
            known.state = State.DISPATCHED
        else:
            with pytest.raises(LedgerError):
                self.ledger.dispatch([row])

    @rule(size=st.integers(1, 3), ahead=st.integers(0, 1))
    def claim(self, size: int, ahead: int) -> None:
        ids = self.of(State.READY)[:size]
        if ahead:
            with pytest.raises(LedgerError):
                self.ledger.claim(self.next_step + ahead, ids)
        elif len(ids) == size:
            self.ledger.claim(self.next_step, ids)
            for group_id in ids:
                self.groups[group_id].state, self.groups[group_id].step = State.CLAIMED, self.next_step
            self.has_claimed = True
            self.next_step += 1

    @rule(offset=st.integers(-1, 1))
    def trained(self, offset: int) -> None:
        step = self.newest + offset
        if step < self.newest:
            assert not self.ledger.trained(step)
        elif offset == 0 and step < self.next_step:
            assert self.ledger.trained(step)
            for known in self.groups.values():
                if known.state is State.CLAIMED and known.step == step:
                    known.state = State.TRAINED
            self.newest += 1
        else:
            with pytest.raises(LedgerError):
                self.ledger.trained(step)

    @rule(back=st.integers(-1, 2), kept=st.none() | st.integers(0, 4))
    def durable(self, back: int, kept: int | None) -> None:
        version = max(0, self.newest - back)
        oldest = None if kept is None else max(0, version - kept)
        if version > self.newest:
            with pytest.raises(LedgerError):
                self.ledger.durable(version, oldest)
            return
        self.ledger.durable(version, oldest)
        if version <= self.durable_version:
            return
        wanted = self.durable_version if oldest is None else min(oldest, self.durable_version)
        self.floor, self.durable_version = max(self.floor, wanted), version
        for known in self.groups.values():
            if known.state in (State.TRAINED, State.DURABLE) and known.step < version:
                if known.step < self.floor:
                    known.payload = None
                known.state = State.DURABLE

    @rule(back=st.integers(-2, 3))
    def rewind(self, back: int) -> None:
        version = max(0, self.newest - back)
        if version < self.floor:
            with pytest.raises(LedgerError, match="cannot go back"):
                self.ledger.rewind(version)
            return
        if version > self.next_step and self.has_claimed:
            with pytest.raises(LedgerError, match="cannot continue from"):
                self.ledger.rewind(version)
            return
        num_ready = 0
        for known in self.groups.values():
            if known.state is State.CLAIMED and known.step < version:
                known.state = State.TRAINED
            elif known.step > version or (known.step == version and known.state is not State.CLAIMED):
                known.state, known.step = State.READY, -1
                num_ready += 1
            elif known.reason == LEFTOVER:
                known.reason = ""
                known.state = State.READY if known.is_whole and known.payload else State.REQUEUED
                num_ready += known.state is State.READY
        assert self.ledger.rewind(version) == num_ready
        self.newest = version
        self.durable_version = min(self.durable_version, version)
        is_claimed = any(k.state is State.CLAIMED for k in self.groups.values())
        self.next_step = version + is_claimed

    @rule()
    def restart(self) -> None:
        self.ledger.close()
        self.ledger = self.open()
        for known in self.groups.values():
            if known.state is State.DISPATCHED:
                known.state = State.REQUEUED

    # ---- what must hold after each

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger = self.ledger
        assert (ledger.draws.next_id, ledger.draws.next_draw) == (len(self.groups), self.next_draw)
        assert (ledger.newest_version, ledger.next_step) == (self.newest, self.next_step)
        counts: dict[str, int] = {}
        for group_id, known in self.groups.items():
            row = ledger.find(group_id)
            assert row is not None
            assert (row.state, row.step, row.reason, row.draw) == (known.state, known.step, known.reason, known.draw)
            assert ledger.payload(group_id) == known.payload
            counts[known.state] = counts.get(known.state, 0) + 1
        assert ledger.tally.states == counts
        reasons = Counter(known.reason for known in self.groups.values() if known.state is State.DROPPED)
        assert {reason: num for reason, num in ledger.tally.dropped.items() if num} == reasons


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
