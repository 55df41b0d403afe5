"""The evaluation sets of a run: what the coordinator asks of each, and what judges those with rewards of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...actors.coordinator.options import EvalSet
from ...core.config import RewardSettings, RunConfig

if TYPE_CHECKING:
    from ...actors.rewards.rewarder import Rewarder


def eval_sets(config: RunConfig) -> tuple[EvalSet, ...]:
    """In the order of names; the only one, of `eval.data`, is called ""."""
    if not config.eval.sets:
        return (EvalSet(pass_reward=config.reward.pass_reward),)
    return tuple(
        EvalSet(
            name=name,
            num_prompts=one.num_prompts,
            num_samples=one.num_samples,
            temperature=None if one.temperature < 0 else one.temperature,
            top_p=one.top_p,
            top_k=one.top_k,
            max_new_tokens=one.max_new_tokens,
            pass_reward=one.pass_reward,
        )
        for name, one in sorted(config.eval.sets.items())
    )


def eval_rewards(config: RunConfig) -> dict[str, RewardSettings]:
    """By the name of the set, of those that are not judged as training samples are."""
    return {
        name: config.reward.alone(one.reward, pattern=one.reward_pattern, args=one.reward_args)
        for name, one in sorted(config.eval.sets.items())
        if one.reward
    }


def eval_rewarders(config: RunConfig) -> dict[str, Rewarder]:
    """The same, loaded. Raises ConfigError or UserCodeError for a function that cannot be."""
    from ...actors.rewards.call import RewardKeys
    from ...actors.rewards.rewarder import Rewarder

    return {name: Rewarder(settings, RewardKeys.of_eval_set(name)) for name, settings in eval_rewards(config).items()}
