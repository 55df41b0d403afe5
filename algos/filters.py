"""Filters: which finished groups are worth training on, and which of their members. Pure functions of one group.

The caller that drops a group must release its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.samples import Group
from .arguments import bind

GroupFilter = Callable[[Group], str | None]
"""Reason why the group is left out, or None when it stays."""
SampleFilter = Callable[[Group], tuple[str | None, ...]]
"""For each member, the reason why nothing is learnt from it, or None when something is."""

SPREAD_EPS = 1e-6
"""Rewards that differ by no more than this are equal."""


def zero_variance(group: Group, *, eps: float = SPREAD_EPS) -> str | None:
    """All rewards are equal to within `eps`, what length costs aside: all answers are right, or wrong, and advantages
    would be 0, or speak of length alone (DAPO, arXiv 2503.14476, eq. 11). It stays if a sample is learnt whatever its
    reward is, or turns have rewards that differ."""
    rewards = group.task_rewards().astype(np.float64)
    if rewards.size and float(rewards.max() - rewards.min()) > eps:
        return None
    by_turns = [sample.token_rewards for sample in group.samples if sample.token_rewards is not None]
    if len({tuple(rewards[rewards != 0].tolist()) for rewards in by_turns}) > 1:
        return None
    is_learnt = any(sample.loss != "algo" and sample.loss_mask.any() for sample in group.samples)
    return None if is_learnt else "zero_variance"


GROUP_FILTERS: dict[str, GroupFilter] = {"zero_variance": zero_variance, "none": lambda group: None}


def group_filter(name: str, args: Mapping[str, Any] | None = None) -> GroupFilter:
    """The built-in filter of that name. Raises ConfigError for arguments that it does not take."""
    return bind(GROUP_FILTERS[name], args or {}, key="algo.group_filter_args", what=f'group filter "{name}"')


def learn_from_all(group: Group) -> tuple[str | None, ...]:
    return (None,) * len(group.samples)


def truncated(group: Group) -> tuple[str | None, ...]:
    """Nothing is learnt from answers cut off by a token limit (DAPO, arXiv 2503.14476, section 3.4)."""
    return tuple("truncated" if sample.finish == "length" else None for sample in group.samples)


SAMPLE_FILTERS: dict[str, SampleFilter] = {"none": learn_from_all, "truncated": truncated}


def sample_filter(name: str, args: Mapping[str, Any] | None = None) -> SampleFilter:
    """The built-in filter of members of that name. Raises as `group_filter`."""
    return bind(SAMPLE_FILTERS[name], args or {}, key="algo.sample_filter_args", what=f'sample filter "{name}"')
