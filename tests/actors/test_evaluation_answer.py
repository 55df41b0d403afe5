"""Evaluations and rewards in a rollout actor: a second try meets nothing of the first, failures leave nothing
behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.actors.data_floor import data_floor
from tests.harness.waiting import until
from tests.rewards.world import call_here

from myxa.actors.rewards.rewarder import FixedReward, Rewarder
from myxa.actors.rollout.evaluation import Evaluation
from myxa.core.config import RewardSettings
from myxa.core.messages import EvalRequest, SamplingParams
from myxa.core.samples import Message, Prompt


def question(num_prompts: int = 2, **wishes: Any) -> EvalRequest:
    prompts = tuple(
        Prompt(group_id=-10 - row, row=row, pass_index=0, messages=(Message(role="user", content=f"row {row}"),))
        for row in range(num_prompts)
    )
    return EvalRequest(prompts=prompts, **({"num_samples": 1, "sampling": SamplingParams(max_new_tokens=4)} | wishes))


async def test_an_evaluation_that_is_asked_for_again_while_it_runs_is_another(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        await floor.pause()
        engine = await floor.add("rollout/0")
        both = [asyncio.ensure_future(floor.ref().evaluate(question())) for _ in range(2)]
        await until(lambda: engine.open == 4, "both run")
        assert len({request.request_id for request in engine.requests}) == 4
        engine.gate.set()
        assert [result.num_errors for result in await asyncio.gather(*both)] == [0, 0]


async def test_a_set_with_a_reward_of_its_own_is_judged_by_that_and_training_is_not(tmp_path: Path) -> None:
    async with data_floor(tmp_path) as floor:
        await floor.pause()
        own = Evaluation({"own": FixedReward(0.25)})
        engine = await floor.add("rollout/0", evaluation=own)
        engine.gate.set()
        asked = [question(3, name=name, num_samples=5, pass_reward=0.5) for name in ("own", "other")]
        judged, plain = [await floor.ref().evaluate(one) for one in asked]
        assert (judged.mean_reward, plain.mean_reward) == (0.25, 1.0)
        assert judged.metrics == {
            "reward": 0.25, "pass_at_1": 0.0, "pass_at_2": 0.0, "pass_at_4": 0.0, "response_length": 4.0,
            "truncated_ratio": 1.0, "num_errors": 0.0,
        }  # fmt: skip
        assert {name: plain.metrics[f"pass_at_{name}"] for name in (1, 2, 4)} == {1: 1.0, 2: 1.0, 4: 1.0}


async def test_a4_a_reward_that_fails_is_reported_by_the_actor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_here(monkeypatch)
    (tmp_path / "mine.py").write_text("def score(completion):\n    return completion.metadata['nothing']\n")
    settings = RewardSettings(fn=f"{tmp_path}/mine.py:score", on_error="zero", max_error_rate=1.0)
    async with data_floor(tmp_path) as floor:
        engine = await floor.add("rollout/0", scorer=Rewarder(settings), max_error_rate=1.0)
        engine.gate.set()
        await until(lambda: "reward-failed" in caplog.text)
        assert "raised KeyError: 'nothing' at" in caplog.text
