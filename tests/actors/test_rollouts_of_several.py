"""Rollouts of several samples, rewards of turns and parts of the loss: what the leader makes of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from myxa.actors.trainer.step_plan import ClaimedBatch, StepPlanOptions, batch_metrics, plan_step
from myxa.algos.baselines import group_advantages
from myxa.core.config import AlgoConfig
from myxa.core.samples import Group, Message, Prompt, Sample, TrainSample


def sample(index: int, branch: int, mask: list[int], **more: Any) -> Sample:
    length = len(mask)
    return Sample(
        group_id=0, index=index, branch=branch, prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.arange(length, dtype=np.int32), logprobs=np.full(length, -1.0, np.float32),
        loss_mask=np.asarray(mask, np.uint8), versions=np.full(length, 3, np.int32), finish="stop", **more,
    )  # fmt: skip


def group(group_id: int, *members: tuple[float, Sample]) -> Group:
    prompt = Prompt(group_id=group_id, row=group_id, pass_index=0, messages=(Message(role="user", content="q"),))
    samples = tuple(msgspec.structs.replace(one, group_id=group_id) for _, one in members)
    return Group(prompt=prompt, samples=samples, rewards=np.asarray([reward for reward, _ in members], np.float32))


def planned(groups: list[Group], **options: Any) -> list[TrainSample]:
    (shard,) = plan_step(3, groups, StepPlanOptions(AlgoConfig().model_copy(update=options), 1, 99, 1))
    return sorted(shard.samples, key=lambda one: (one.group_id, one.index, one.branch))


FANNED = group(
    0, (1.0, sample(0, 0, [1] * 2)), (1.0, sample(0, 1, [0, 1, 1, 1])), (1.0, sample(0, 2, [1] * 3)),
    (0.0, sample(1, 0, [1] * 4)), (0.5, sample(2, 0, [1])),
)  # fmt: skip


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dr_grpo"])
@pytest.mark.parametrize("normalise", ["group", "batch", "none"])
def test_a_rollout_counts_once_in_the_statistics(kind: str, normalise: Any) -> None:
    found = [one.advantage for one in planned([FANNED], kind=kind, normalise=normalise)]
    alone = group_advantages(kind, [1.0, 0.0, 0.5], [0, 0, 0], normalise=normalise)
    np.testing.assert_allclose(found, alone[[0, 0, 0, 1, 2]], rtol=1e-6)


def test_the_weight_of_a_rollout_in_the_loss_is_that_of_one() -> None:
    """slime: sum over samples and tokens of x m / M, M = all loss tokens of the rollout, then divided by rollouts."""
    (shard,) = plan_step(3, [FANNED], StepPlanOptions(AlgoConfig(), 1, 99, 1))
    assert shard.minibatch_rollouts == (3.0,)
    assert shard.minibatch_tokens == (13.0,)
    for one in shard.samples:
        own = float(one.loss_mask.sum())
        weight = 1.0 if one.loss_weights is None else one.loss_weights
        tokens_of_rollout = {0: 8.0, 1: 4.0, 2: 1.0}[one.index]
        np.testing.assert_allclose(weight / own, 1 / tokens_of_rollout, rtol=1e-6)
    by_tokens = planned([FANNED], reduction="token")
    assert all(one.loss_weights is None for one in by_tokens)


def test_a_turn_learns_from_its_own_return() -> None:
    """Two turns and a reply between them: returns with discount 0.5, compared with all turns of the group."""
    turns = [1, 1, 0, 1]
    paid = sample(0, 0, turns, token_rewards=np.asarray([0, 0.5, 0, 1], np.float32))
    found = planned([group(0, (1.5, paid), (0.0, sample(1, 0, turns)))], kind="dr_grpo", turn_discount=0.5)
    returns = np.asarray([[0.5 + 0.5 * 1.0, 1.0], [0.0, 0.0]])
    expected = returns - returns.mean()
    for one, row in zip(found, expected, strict=True):
        assert one.token_advantages is not None
        np.testing.assert_allclose(one.token_advantages, [row[0], row[0], 0, row[1]], rtol=1e-6)


def test_without_rewards_of_turns_a_sample_has_one_advantage() -> None:
    turns = sample(0, 0, [1, 1, 0, 1])
    plain = planned([group(0, (1.0, turns), (0.0, sample(1, 0, [1, 1])))])
    assert all(one.token_advantages is None for one in plain)
    zero = msgspec.structs.replace(turns, token_rewards=np.zeros(4, np.float32))
    told = planned([group(0, (1.0, zero), (0.0, sample(1, 0, [1, 1])))])
    assert told[0].token_advantages is not None
    np.testing.assert_allclose(told[0].token_advantages[[0, 1, 3]], plain[0].advantage, rtol=1e-6)


def test_what_no_turn_earned_comes_at_the_end() -> None:
    paid = sample(0, 0, [1, 1, 0, 1], token_rewards=np.asarray([0, 0.5, 0, 0], np.float32))
    (found, _) = planned([group(0, (1.5, paid), (0.0, sample(1, 0, [1])))], kind="reinforce_pp")
    assert (found.advantage, found.token_rewards is paid.token_rewards) == (1.0, True)


def test_parts_of_the_loss_have_denominators_of_their_own() -> None:
    shown = sample(0, 1, [1] * 5, loss="sft")
    mixed = group(0, (1.0, sample(0, 0, [1] * 2)), (1.0, shown), (0.0, sample(1, 0, [1] * 3)))
    (shard,) = plan_step(3, [mixed], StepPlanOptions(AlgoConfig(), 1, 99, 1))
    assert (shard.minibatch_tokens, shard.minibatch_rollouts) == ((5.0,), (2.0,))
    assert shard.minibatch_parts == ({"sft": (5.0, 1.0)},)
    assert all(one.loss_weights is None for one in shard.samples), "each is the whole of its rollout in its part"
    (alone,) = plan_step(3, [mixed], StepPlanOptions(AlgoConfig(kind="sft", reduction="rollout"), 1, 99, 1))
    assert {one.loss for one in alone.samples} == {"algo"}, "everything is supervised there"


def test_metrics_count_a_rollout_once() -> None:
    metrics, _ = batch_metrics(3, ClaimedBatch([FANNED]))
    assert metrics["reward/mean"] == 0.5
