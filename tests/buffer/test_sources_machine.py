"""Draws from several sources in any order of events, twice: by a buffer that is started anew in between, and by one that
is not. Both draw the same; every draw means for ever what it meant; ratios hold; every prompt is in one state."""

from __future__ import annotations

import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.buffer.conftest import IN_MEMORY
from tests.buffer.mixed_rows import Desk, mixed
from tests.harness.ledger_audit import audit_ledger

from myxa.actors.buffer.cursor import Window
from myxa.actors.ledger.file import OUT_OF_WINDOW, PASSED_OVER, STALE, Row

WINDOWS = (Window(), Window(0.2, 0.8), Window(0.4, 1.0))
numbers = st.integers(0, 4)


class SourcesMachine(RuleBasedStateMachine):
    @initialize(
        rows=st.lists(st.integers(2, 7), min_size=3, max_size=3),
        passes=st.lists(st.sampled_from([0, 0, 2, 5]), min_size=3, max_size=3),
    )
    def begin(self, rows: list[int], passes: list[int]) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY)
        sizes = dict(zip("abc", zip(rows, passes, strict=True), strict=True))
        self.source = mixed(**sizes)
        self.desks = [Desk(Path(self.folder.name) / f"{name}.sqlite", self.source) for name in ("one", "twin")]
        self.mix, self.window = "a:1,b:1,c:1", Window()
        self.open: dict[int, Row] = {}

    def teardown(self) -> None:
        if hasattr(self, "desks"):
            for desk in self.desks:
                assert audit_ledger(desk.path).problems == ()
                desk.ledger.close()
            self.folder.cleanup()

    @rule(count=st.integers(1, 9), is_restarted=st.booleans())
    def draw(self, count: int, is_restarted: bool) -> None:
        if is_restarted:
            self.restart()
        one, twin = (desk.draw(count) for desk in self.desks)
        assert one == twin
        self.open |= {row.group_id: row for row in one}

    @rule(rewards=st.lists(st.sampled_from([0.0, 0.3, 0.5, 1.0]), min_size=1, max_size=12), is_restarted=st.booleans())
    def work(self, rewards: list[float], is_restarted: bool) -> None:
        """What a healthy run does most of the time."""
        self.draw(len(rewards), is_restarted)
        for group_id, reward in zip(sorted(self.open), rewards, strict=False):
            for desk in self.desks:
                desk.finish(self.open[group_id], reward, is_kept=reward > 0)
            del self.open[group_id]

    @rule(shares=st.tuples(numbers, numbers, numbers).filter(any))
    def change_mix(self, shares: tuple[int, ...]) -> None:
        self.mix = ",".join(f"{name}:{share}" for name, share in zip("abc", shares, strict=True))
        self.use()

    @rule(window=st.sampled_from(WINDOWS))
    def change_window(self, window: Window) -> None:
        self.window = window
        self.use()

    def use(self) -> None:
        for desk in self.desks:
            desk.cursor.use(self.mix, self.window)

    @rule(data=st.data(), reward=st.sampled_from([0.0, 0.3, 0.5, 1.0]), is_kept=st.booleans())
    def finish(self, data: st.DataObject, reward: float, is_kept: bool) -> None:
        if self.open:
            row = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
            for desk in self.desks:
                desk.finish(row, reward, is_kept=is_kept)

    @rule(data=st.data(), reason=st.sampled_from([STALE, "engine-error"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        if self.open:
            group_id = data.draw(st.sampled_from(sorted(self.open)))
            del self.open[group_id]
            for desk in self.desks:
                desk.ledger.drop([(group_id, reason)])

    def restart(self) -> None:
        self.desks[0].restart()
        self.desks[0].cursor.use(self.mix, self.window)
        for desk in self.desks:  # what is under way is requeued by the first: a state of groups, not of draws
            desk.ledger.requeue([(group_id, None, 0) for group_id in sorted(self.open)], "again")

    @invariant()
    def draws_keep_their_meaning(self) -> None:
        for desk in getattr(self, "desks", ()):
            rows: list[Any] = [desk.ledger.find(group_id) for group_id in range(desk.ledger.draws.next_id)]
            for row in rows:
                if row.group_id in desk.told:
                    assert desk.cursor.sources.prompt(row) == desk.told[row.group_id]
                else:
                    assert row.reason == OUT_OF_WINDOW
                if row.redraw_of >= 0:
                    before = rows[row.redraw_of]
                    assert (row.draw, row.source, row.source_draw) == (before.draw, before.source, before.source_draw)
            for name in "abc":
                mine = [row.source_draw for row in rows if row.source == name and row.redraw_of < 0]
                assert mine == list(range(len(mine))) and len(mine) == desk.ledger.draws.taken[name]
            self.ratios_hold(desk, rows)

    def ratios_hold(self, desk: Desk, rows: list[Any]) -> None:
        stretch = desk.ledger.draws.stretch
        if not stretch.mix:
            return
        shares = {name: int(share) for name, _, share in (part.partition(":") for part in stretch.mix.split(","))}
        given = [
            row.source for row in rows
            if row.draw >= stretch.since and row.redraw_of < 0 and row.reason not in PASSED_OVER
        ]  # fmt: skip
        for name, share in shares.items():
            num_given = accumulate(source == name for source in given)
            off = [num - share / sum(shares.values()) * count for count, num in enumerate(num_given, 1)]
            assert all(abs(part) < 1 for part in off)


TestSourcesMachine = SourcesMachine.TestCase
TestSourcesMachine.settings = settings(max_examples=25, stateful_step_count=18, deadline=None, derandomize=True)
