"""A step on rollouts of several samples and on demonstrations beside them: loss and gradient against the formula."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from tests.backends.gang_rank import Backends, make_groups, own_scores, weights_of, with_scores

from myxa.actors.trainer.step_plan import StepPlanOptions, plan_step
from myxa.core.config import AlgoConfig
from myxa.core.samples import Group, Sample, TrainShard


def fanned(group: Group) -> Group:
    """Its second and third samples are a rollout of two; its last one a demonstration beside the first."""

    def member(i: int, sample: Sample) -> Sample:
        index, branch = ((0, 0), (1, 0), (1, 1), (0, 1))[i]
        return msgspec.structs.replace(sample, index=index, branch=branch, loss="sft" if i == 3 else "algo")

    samples = tuple(member(i, sample) for i, sample in enumerate(group.samples))
    rewards = group.rewards[[0, 1, 1, 0]]
    order = [0, 3, 1, 2]
    return msgspec.structs.replace(group, samples=tuple(samples[i] for i in order), rewards=rewards[order])


def shard_of(groups: list[Group], **options: Any) -> TrainShard:
    first: dict[str, Any] = {
        "algo": AlgoConfig(reduction="rollout"),
        "num_ranks": 1,
        "max_tokens": 60,
        "minibatches": 1,
    }
    return plan_step(0, groups, StepPlanOptions(**(first | options)))[0]


@pytest.mark.parametrize("reduction", ["rollout", "token"])
def test_the_loss_of_rollouts_and_demonstrations(backends: Backends, reduction: Any) -> None:
    """Siblings weigh as in slime: each token 1 / (all loss tokens of the rollout). Cross entropy has its own
    denominators. Rewards as they are: those of a group add up to 0 once they are compared."""
    algo = AlgoConfig(kind="reinforce_pp", reduction=reduction)
    shard = shard_of([fanned(group) for group in make_groups(7, with_tools=False)], algo=algo)
    backend = backends(algo={"reduction": reduction, "batch_size": 6, "group_filter": "none"})
    scores = own_scores(backend, shard)
    metrics = backend.train(with_scores(shard, scores), {}).metrics

    def mean(part: str, values: dict[int, float]) -> float:
        """`values`: of one token of each sample, or the sum over them."""
        mine = [(i, s) for i, s in enumerate(shard.samples) if s.loss == part]
        tokens: dict[tuple[int, int], int] = {}
        for _, s in mine:
            tokens[s.group_id, s.index] = tokens.get((s.group_id, s.index), 0) + len(s.loss_mask)
        if reduction == "token":
            return sum(values[i] for i, _ in mine) / sum(tokens.values())
        return sum(values[i] / tokens[s.group_id, s.index] for i, s in mine) / len(tokens)

    policy = mean("algo", {i: -s.advantage * len(s.loss_mask) for i, s in enumerate(shard.samples)})
    supervised = mean("sft", {i: -float(scores[i].sum()) for i in range(len(shard.samples))})
    assert metrics["train/policy_loss"] == pytest.approx(policy, rel=1e-5)
    assert metrics["train/sft_loss"] == pytest.approx(supervised, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(policy + supervised, rel=1e-5)
    assert metrics["train/approx_kl"] == 0.0, "demonstrations have no behaviour policy"


def test_any_cut_into_micro_batches_gives_the_same_weights(backends: Backends) -> None:
    groups = [fanned(group) for group in make_groups(7)]
    made: list[dict[str, np.ndarray]] = []
    for max_tokens in (30, 400):
        backend = backends(algo={"batch_size": 6, "group_filter": "none"}, optimizer={"eps": 1e-4, "lr": 1e-3})
        backend.train(shard_of(groups, max_tokens=max_tokens), {})
        made.append(weights_of(backend))
    for name, first in made[0].items():
        np.testing.assert_allclose(first, made[1][name], atol=2e-6, err_msg=name)


def test_a_weight_scales_its_tokens_alone(backends: Backends) -> None:
    """All weights doubled, denominators as before: twice the loss."""
    groups = make_groups(7, with_tools=False)

    def doubled(sample: Sample) -> Sample:
        return msgspec.structs.replace(sample, loss_weights=np.full(len(sample.response_ids), 2, np.float32))

    twice = [msgspec.structs.replace(g, samples=tuple(map(doubled, g.samples))) for g in groups]
    found = [
        backends(algo={"kind": "sft", "reduction": "token"})
        .train(shard_of(g, algo=AlgoConfig(kind="sft", reduction="rollout")), {})
        .metrics["train/loss"]
        for g in (groups, twice)
    ]
    assert found[1] == pytest.approx(2 * found[0], rel=1e-6)
