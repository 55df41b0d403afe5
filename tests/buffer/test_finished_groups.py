"""A6: what is told of rewards counts every finished group, the filtered ones too, by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.buffer.conftest import make_group

from myxa.actors.buffer.finished_groups import FinishedGroups
from myxa.actors.buffer.knobs import BufferLimits
from myxa.core.ids import OVERLONG
from myxa.core.messages import Assignment, SamplingParams
from myxa.core.samples import Group, Message, Prompt


def told_of_steps(desk: Any) -> dict[int, dict[str, float]]:
    points = desk.buffer._telemetry.drain().metrics
    return {point.step: dict(point.values) for point in points if "reward/raw_mean" in point.values}


async def test_a6_all_finished_groups_count_by_step(shop: Any) -> None:
    async with shop.open(group_filter="zero_variance", max_staleness=8) as desk:

        async def put(*rewards: float) -> str:
            (given,) = (await desk.draw(max_groups=1)).assignments
            return (await desk.put_group(make_group(given, rewards=rewards), given.attempt, "rollout/0")).outcome

        first = [await put(*each) for each in ((0, 0), (0, 1), (0, 0), (1, 1), (0, 0), (1, 0))]
        assert first == ["filtered", "ready", "filtered", "filtered", "filtered", "ready"]
        gauges = desk.buffer._groups.gauges()
        assert gauges["buffer/newest/left_out"] == pytest.approx(4 / 6), "also before there is a step"
        await desk.train(0)
        for each in ((1, 1), (1, 0), (0, 1)):
            await put(*each)
        await desk.train(1)
        await desk.ref.trained(1)
        steps = told_of_steps(desk)
    assert set(steps) == {1, 2}, "a step is told once"
    assert steps[1] == {
        "reward/raw_mean": pytest.approx(4 / 12), "reward/raw_std": pytest.approx(np.std([1] * 4 + [0] * 8)),
        "reward/pass_rate": pytest.approx(4 / 12), "reward/all_right": pytest.approx(1 / 6),
        "reward/all_wrong": pytest.approx(3 / 6), "reward/finished_groups": 6.0, "reward/left_out_groups": 4.0,
        "reward/zero_std_groups": 4.0,
    }  # fmt: skip
    assert steps[2]["reward/raw_mean"] == pytest.approx(4 / 6)
    assert (steps[2]["reward/finished_groups"], steps[2]["reward/all_right"]) == (3.0, pytest.approx(1 / 3))


async def test_demonstrations_have_no_reward_to_tell_of(shop: Any) -> None:
    async with shop.open(limits=BufferLimits(has_rewards=False)) as desk:
        for given in (await desk.draw(max_groups=2)).assignments:
            await desk.put_group(make_group(given, rewards=(1, 1)), given.attempt, "rollout/0")
        await desk.train(0)
        assert told_of_steps(desk) == {}


def one(*rewards: float) -> Group:
    prompt = Prompt(group_id=0, row=0, pass_index=0, messages=(Message(role="user", content="x"),))
    return make_group(
        Assignment(prompt=prompt, attempt=1, num_samples=len(rewards), sampling=SamplingParams(max_new_tokens=4)),
        rewards=rewards,
    )


def test_right_is_what_the_run_file_says() -> None:
    finished = FinishedGroups(0.5)
    for rewards in ((0.5, 0.7), (0.49, 0.1), (-1.0, 2.0)):
        finished.add("", one(*rewards), 0.0, is_left_out=False)
    told = finished.take_step()
    assert told["reward/pass_rate"] == pytest.approx(3 / 6)
    assert (told["reward/all_right"], told["reward/all_wrong"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert told["reward/zero_std_groups"] == 0.0
    assert finished.take_step() == {}


def test_an_answer_that_is_right_and_long_is_right() -> None:
    finished = FinishedGroups()
    parts = ({OVERLONG: -0.3}, {OVERLONG: 0.0})
    finished.add("", replace(one(0.7, 1.0), reward_parts=parts), 0.85, is_left_out=False)
    told = finished.take_step()
    assert (told["reward/pass_rate"], told["reward/all_right"], told["reward/zero_std_groups"]) == (1.0, 1.0, 1.0)
    assert told["reward/raw_mean"] == pytest.approx(0.85)


def test_a_group_of_one_answer_has_no_spread_to_lack() -> None:
    finished = FinishedGroups()
    finished.add("", one(1.0), 1.0, is_left_out=False)
    told = finished.take_step()
    assert (told["reward/zero_std_groups"], told["reward/all_right"]) == (0.0, 1.0)


async def test_f4_some_groups_of_each_step_can_be_read_later(shop: Any) -> None:
    """F4: kept ones when their step was trained, and at most half as many that the filter left out."""
    limits = BufferLimits(samples_per_step=4)
    async with shop.open(group_filter="zero_variance", max_staleness=50, batch_size=3, limits=limits) as desk:
        for step in range(2):
            for rewards in ((0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (0, 1)):
                (given,) = (await desk.draw(max_groups=1)).assignments
                await desk.put_group(make_group(given, rewards=rewards), given.attempt, "rollout/0")
            await desk.train(step)
        told = desk.buffer._telemetry.drain().samples
    assert [(one.step, one.outcome, one.group_id) for one in told] == [
        (1, "filtered", 0), (1, "filtered", 1), (1, "kept", 3), (1, "kept", 4),
        (2, "filtered", 6), (2, "filtered", 7), (2, "kept", 9), (2, "kept", 10),
    ]  # fmt: skip
    assert [answer.reward for answer in told[2].answers] == [0.0, 1.0]
    assert (told[0].reason, told[0].prompt) == ("zero_variance", "user: row 0")
