"""Group filters."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from myxa.algos.filters import GROUP_FILTERS, group_filter, zero_variance
from myxa.core.config.learning import FILTER_BUILTINS
from myxa.core.ids import OVERLONG
from myxa.core.samples import Group, Message, Prompt, Sample


def group(rewards: list[float]) -> Group:
    prompt = Prompt(group_id=3, row=0, pass_index=0, messages=(Message(role="user", content="x"),))
    sample = Sample(
        group_id=3, index=0, prompt_ids=np.array([1], np.int32), response_ids=np.array([2], np.int32),
        logprobs=np.array([-0.5], np.float32), loss_mask=np.array([1], np.uint8), versions=np.array([0], np.int32),
        finish="stop",
    )  # fmt: skip
    samples = tuple(replace(sample, index=index) for index in range(len(rewards)))
    return Group(prompt=prompt, samples=samples, rewards=np.array(rewards, np.float32))


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0], [0.1, 0.1 + 1e-8], []])
def test_equal_rewards_are_left_out_with_a_reason(rewards):
    assert zero_variance(group(rewards)) == "zero_variance"


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.5, 0.5, 0.50001], [-1.0, 1.0, 0.0]])
def test_groups_with_spread_stay(rewards):
    assert zero_variance(group(rewards)) is None


def test_what_length_costs_is_no_spread():
    """DAPO's filter and its over-long punishment together: answers that are all wrong teach nothing, long or short."""
    costs = [{OVERLONG: cost} for cost in (0.0, -0.3, -1.0)]
    for rewards, reason in (
        ([0.0, -0.3, -1.0], "zero_variance"),
        ([1.0, 0.7, 0.0], "zero_variance"),
        ([0.0] * 3, None),
    ):
        assert zero_variance(replace(group(rewards), reward_parts=tuple(costs))) == reason


def test_a_group_of_equal_rewards_stays_for_what_else_is_learnt_from_it():
    first, second = (equal := group([1.0, 1.0])).samples

    def reason(**fields: object) -> str | None:
        return zero_variance(replace(equal, samples=(replace(first, **fields), second)))

    for part in ("sft", "distill"):
        assert reason(loss=part) is None
        assert reason(loss=part, loss_mask=np.array([0], np.uint8)) == "zero_variance"
    turns = np.array([2, 3, 4], np.int32)
    for early, late, expected in (((0.25, 0, 0.75), (0.75, 0, 0.25), None), ((0, 1, 0), (1, 0, 0), "zero_variance")):
        samples = [
            replace(one, response_ids=turns, token_rewards=np.array(rewards, np.float32))
            for one, rewards in ((first, early), (second, late))
        ]
        assert zero_variance(replace(equal, samples=tuple(samples))) == expected


def test_the_run_file_and_the_table_name_the_same_filters():
    assert set(GROUP_FILTERS) == set(FILTER_BUILTINS)
    assert group_filter("zero_variance") is zero_variance
    assert group_filter("none")(group([1.0, 1.0])) is None
