"""The buffer ends and comes back over the same ledger: who still has what, and what a resumed run inherits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.harness.manual_clock import ManualClock

from myxa.core.errors import LedgerError
from myxa.core.timeouts import TIMEOUTS


async def test_actors_keep_what_they_have_in_hand(shop: Any) -> None:
    """Groups 0 and 1 at rollout/0, 2 and 3 at rollout/1. After the restart 0 is still in hand, 1 is not."""
    clock = ManualClock()
    async with shop.open(clock=clock) as desk:
        first = (await desk.draw(max_groups=2)).assignments
        second = (await desk.draw(max_groups=2, rollout="rollout/1")).assignments
    async with shop.open(clock=clock) as desk:
        assert (await desk.ref.stats()).states == {"REQUEUED": 4}
        reply = await desk.draw(max_groups=10, holding=(0,))
        assert [(a.prompt.group_id, a.attempt) for a in reply.assignments] == [(1, 2)], "2 and 3 wait for rollout/1"
        assert (await desk.ref.stats()).states == {"DISPATCHED": 2, "REQUEUED": 2}
        assert (await desk.put(first[0])).outcome == "ready", "its attempt went on"
        assert (await desk.put(first[1])).outcome == "stale-attempt"
        assert (await desk.put(second[0], rollout="rollout/1")).outcome == "ready", "a late put counts"
        assert (await desk.draw(max_groups=10)).blocked_by == "staleness"
        clock.advance(TIMEOUTS.buffer.reattach_s)
        (taken,) = (await desk.draw(max_groups=10)).assignments
        assert (taken.prompt.group_id, taken.attempt) == (3, 2), "rollout/1 did not ask for it in time"
        assert (await desk.put(second[1], rollout="rollout/1")).outcome == "stale-attempt"


async def test_a_claim_outlives_the_buffer(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.fill()
        claim = await desk.ref.claim(0, 0.0)
    async with shop.open() as desk:
        assert (await desk.draw()).blocked_by == "staleness", "claimed groups hold their slots"
        assert await desk.ref.claim(0, 0.0) == claim
        groups = await desk.ref.fetch(tuple(claim.groups))
        assert [group.group_id for group in groups] == list(claim.groups)
        await desk.ref.trained(0)
    async with shop.open() as desk:
        await desk.ref.trained(0)
        assert await desk.train(1) == (2, 3)
        assert (await desk.ref.stats()).trained == 4


async def test_a_pause_outlives_the_buffer_and_not_the_run(shop: Any, tmp_path: Path) -> None:
    async with shop.open() as desk:
        await desk.pause()
    async with shop.open() as desk:
        assert (await desk.draw()).blocked_by == "paused"
    later = type(shop)(tmp_path / "later.sqlite", run="run-2")
    async with later.open(resume_from=shop.path) as desk:
        await desk.rewind(0)
        assert (await desk.draw(max_groups=1)).assignments


async def test_a_resumed_run_inherits_the_ledger(shop: Any, tmp_path: Path) -> None:
    """The earlier run was killed at version 2 with a checkpoint of 1: rows of step 1 come back, none is skipped."""
    async with shop.open() as desk:
        for step in range(2):
            await desk.fill(version=step, versions=(step,))
            await desk.train(step)
        await desk.ref.durable(1)
        await desk.draw(version=2)
    later = type(shop)(tmp_path / "later.sqlite", run="run-2")
    async with later.open(resume_from=shop.path) as desk:
        assert await desk.rewind(1) == 2
        assert await desk.train(1) == (2, 3)
        (a, b) = (await desk.draw(version=2)).assignments
        assert (a.prompt.row, b.prompt.row) == (6, 7), "4 and 5 are ready"
        assert await desk.train(2) == (4, 5)
    async with later.open(resume_from=shop.path) as desk:
        assert (await desk.ref.stats()).trained == 6, "a restart does not copy again"
    async with shop.open() as desk:
        assert (await desk.ref.stats()).trained == 4, "the earlier run keeps its own"
        with pytest.raises(LedgerError, match="in use"):
            async with type(shop)(tmp_path / "third.sqlite").open(resume_from=shop.path):
                pass
    with pytest.raises(LedgerError, match="there is no ledger"):
        async with type(shop)(tmp_path / "fourth.sqlite").open(resume_from=tmp_path / "gone.sqlite"):
            pass
