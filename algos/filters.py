"""Filters: which finished groups are worth training on, and which of their members. Pure functions of one group.

The caller that drops a group must release its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ..core.errors import ConfigError
from ..core.samples import Group
from .arguments import bind

GroupFilter = Callable[[Group], str | None]
"""Reason why the group is left out, or None when it stays."""
SampleFilter = Callable[[Group], tuple[str | None, ...]]
"""For each member, the reason why nothing is learnt from it, or None when something is."""

T = TypeVar("T")

SPREAD_EPS = 1e-6
"""Rewards that differ by no more than this are equal."""


def zero_variance(group: Group, *, eps: float = SPREAD_EPS) -> str | None:
    """All rewards are equal to within `eps`, what length costs aside: all answers are right, or wrong, and advantages
    would be 0, or speak of length alone (DAPO, arXiv 2503.14476, eq. 11)."""
    rewards = group.task_rewards().astype(np.float64)
    if rewards.size and float(rewards.max() - rewards.min()) > eps:
        return None
    return "zero_variance"


def keep_all(group: Group) -> str | None:
    return None


GROUP_FILTERS: dict[str, GroupFilter] = {"zero_variance": zero_variance, "none": keep_all}


def group_filter(name: str, args: Mapping[str, Any] | None = None) -> GroupFilter:
    """The built-in filter of that name. Raises ConfigError for any other name, and for arguments it does not take."""
    return _built_in("group", GROUP_FILTERS, name, args)


def learn_from_all(group: Group) -> tuple[str | None, ...]:
    return (None,) * len(group.samples)


def truncated(group: Group) -> tuple[str | None, ...]:
    """Nothing is learnt from answers cut off by a token limit (DAPO, arXiv 2503.14476, section 3.4)."""
    return tuple("truncated" if sample.finish == "length" else None for sample in group.samples)


SAMPLE_FILTERS: dict[str, SampleFilter] = {"none": learn_from_all, "truncated": truncated}


def sample_filter(name: str, args: Mapping[str, Any] | None = None) -> SampleFilter:
    """The built-in filter of members of that name. Raises as `group_filter`."""
    return _built_in("sample", SAMPLE_FILTERS, name, args)


def _built_in(
    kind: str, functions: Mapping[str, Callable[..., T]], name: str, args: Mapping[str, Any] | None
) -> Callable[..., T]:
    function = functions.get(name)
    if function is None:
        raise ConfigError(
            f'{kind} filter "{name}" is not known',
            remedy=f"use {', '.join(sorted(functions))}, or module:function for your own",
        )
    return bind(function, args or {}, key=f"algo.{kind}_filter_args", what=f'{kind} filter "{name}"')
