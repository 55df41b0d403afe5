"""A reward function that stops working is left alone for a while: answers wait and none is lost; each is tried
again after a while; it comes back, or the run ends with the cause."""

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

from myxa.actors.rewards.rewarder import Rewarder
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.completions import Completion
from myxa.core.config import RewardSettings
from myxa.core.errors import UserCodeError

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


async def test_errors_may_be_zeros_until_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with judge(tmp_path, monkeypatch, on_error="zero", max_error_rate=0.5) as here:
        assert await here.score(1, "bad") == RewardOutcome(0.0)
        for group in range(2, 20):
            await here.score(group, "bad")
        with pytest.raises(UserCodeError):
            await here.score(20, "bad")
        assert "failed in 20 of the last 20 calls" in here.rewarder.too_many_errors
