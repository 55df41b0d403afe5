"""A reward function that stops working is left alone for a while: answers wait and none is lost; it is tried again by
one call at a time; it comes back, or the run ends with the cause. One bad prompt is no outage, a function that never
worked has none."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.world import call_here

from myxa.actors.rewards.guard import Breaker, BreakerState
from myxa.actors.rewards.rewarder import Rewarder
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError

S = BreakerState
TRANSITIONS = {S.CLOSED: {S.OPEN}, S.OPEN: {S.PROBING}, S.PROBING: {S.CLOSED, S.OPEN, S.GIVEN_UP}, S.GIVEN_UP: set()}


def test_the_whole_way_through_the_table() -> None:
    breaker = Breaker(after=3, cool_down_s=5.0, max_wait_s=30.0)
    went = [breaker.state]

    def note(to: BreakerState) -> None:
        assert breaker.state is to
        assert to in TRANSITIONS[went[-1]] or to is went[-1]
        went.append(to)

    assert not breaker.failed(1, 0.0, is_probe=False), "it never worked: the failure counts"
    breaker.worked(is_probe=False)
    for group in (1, 1, 1, 2):
        assert not breaker.failed(group, 1.0, is_probe=False), "one bad prompt is no outage"
        note(S.CLOSED)
    assert breaker.failed(3, 10.0, is_probe=False), "the third group: its answer waits too"
    note(S.OPEN)
    assert (breaker.may_call(14.9), breaker.wait_s(14.0)) == (False, 1.0)
    assert breaker.failed(4, 14.9, is_probe=False), "a call that was under way waits with the others"
    assert breaker.may_call(15.0)
    note(S.PROBING)
    assert not breaker.may_call(15.0), "one probe at a time"
    assert breaker.wait_s(15.0) is None
    breaker.worked(is_probe=False)
    note(S.PROBING)
    assert breaker.failed(4, 15.5, is_probe=False), "calls from before the outage end when they like, and wait too"
    note(S.PROBING)
    assert breaker.failed(3, 16.0, is_probe=True)
    note(S.OPEN)
    assert (breaker.may_call(25.9), breaker.may_call(26.0)) == (False, True), "twice the cool-down"
    note(S.PROBING)
    breaker.abandoned(27.0)
    note(S.OPEN)
    assert breaker.may_call(27.0), "at once: nobody heard how it ended"
    note(S.PROBING)
    breaker.worked(is_probe=True)
    note(S.CLOSED)
    for group in (5, 6, 7):
        breaker.failed(group, 100.0, is_probe=False)
    note(S.OPEN)
    assert breaker.wait_s(100.0) == 5.0, "the cool-down starts anew"
    for now_s in (105.0, 115.0):
        assert breaker.may_call(now_s)
        assert breaker.failed(5, now_s, is_probe=True)
    assert breaker.wait_s(115.0) == 15.0, "the last probe is made when the time is over, not later"
    assert breaker.may_call(130.0)
    note(S.PROBING)
    assert not breaker.failed(5, 130.0, is_probe=True)
    note(S.GIVEN_UP)
    assert breaker.num_opened == 2


CODE = """
broken = False
calls = []

async def judge(completion):
    calls.append(completion.group_id)
    if broken or completion.text == "bad":
        raise ConnectionError("the judge does not answer")
    return 1.0
"""


@dataclass
class Judge:
    rewarder: Rewarder
    module: Any
    told: list[tuple[str, str]] = field(default_factory=list)

    def score(self, group_id: int, text: str = "x") -> asyncio.Task[RewardOutcome]:
        completion = Completion(group_id=group_id, index=0, messages=(), prompt="?", text=text)
        return asyncio.ensure_future(self.rewarder.score(completion))

    async def until(self, kind: str) -> str:
        async with asyncio.timeout(30):
            while True:
                for said, text in self.told:
                    if said == kind:
                        return text
                await asyncio.sleep(0.01)


@asynccontextmanager
async def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> AsyncIterator[Judge]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    call_here(monkeypatch)
    file = tmp_path / "judge.py"
    file.write_text(CODE)
    made = Rewarder(RewardSettings(fn=f"{file}:judge", pause_after=3, cool_down_s=0.05, **more))
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", "") == str(file)]
    judged = Judge(made, module)
    made.listen(lambda kind, text: judged.told.append((kind, text)))
    try:
        yield judged
    finally:
        await made.close()


async def test_answers_wait_while_the_judge_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with judge(tmp_path, monkeypatch) as here:
        await here.score(0)
        here.module.broken = True
        lost = await asyncio.gather(*(here.score(group) for group in (1, 2)), return_exceptions=True)
        assert all(isinstance(error, UserCodeError) for error in lost), "it may be these two prompts"
        waiting = [here.score(group) for group in range(3, 40)]
        said = await here.until("reward-paused")
        assert "failed for 3 groups in a row and is left alone for 0.05 s; answers wait; last: it raised" in said
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        gauges = here.rewarder.gauges()
        assert (gauges["reward/is_paused"], gauges["reward/error_rate"]) == (1.0, 0.0)
        here.module.broken = False
        assert {outcome.value for outcome in await asyncio.gather(*waiting)} == {1.0}
        assert "works again after" in await here.until("reward-works-again")
        assert here.rewarder.too_many_errors == "", "an outage that ended is not held against the run"
        assert here.rewarder.gauges()["reward/is_paused"] == here.rewarder.gauges()["reward/waiting"] == 0.0


async def test_a_judge_that_does_not_come_back_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with judge(tmp_path, monkeypatch, max_outage_s=0.4) as here:
        await here.score(0)
        here.module.broken = True
        done = await asyncio.gather(*(here.score(group) for group in range(1, 30)), return_exceptions=True)
        assert all(isinstance(error, UserCodeError) for error in done)
        assert await here.until("reward-given-up") == here.rewarder.too_many_errors
        assert "has not worked for" in here.rewarder.too_many_errors
        assert "more than reward.max_outage_s = 0.4 allows; last: it raised ConnectionError: the judge does not" in (
            here.rewarder.too_many_errors
        )
        assert any("is not called any more; it last raised ConnectionError" in str(error) for error in done)
        num_calls = len(here.module.calls)
        with pytest.raises(UserCodeError):
            await here.score(99)
        assert len(here.module.calls) == num_calls, "it is not called any more"


async def test_one_bad_prompt_that_is_alone_in_line_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judge(tmp_path, monkeypatch) as here:
        await here.score(0)
        for group in (1, 2):
            with pytest.raises(UserCodeError):
                await here.score(group, "bad")
        with pytest.raises(UserCodeError):
            await here.score(3, "bad")  # opens, and is the probe twice
        assert here.module.calls.count(3) == 3
        assert (await here.score(4)).value == 1.0
        assert here.rewarder.too_many_errors == ""


async def test_errors_may_be_zeros_until_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with judge(tmp_path, monkeypatch, on_error="zero", max_error_rate=0.5) as here:
        assert await here.score(1, "bad") == RewardOutcome(0.0)
        for group in range(2, 20):
            await here.score(group, "bad")
        with pytest.raises(UserCodeError):
            await here.score(20, "bad")
        assert "failed in 20 of the last 20 calls" in here.rewarder.too_many_errors
