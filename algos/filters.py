"""Group filters: which finished groups are worth training on. Pure functions from a group to a reason or None.

Knows one group at a time. Must not know queues or slots: whoever drops a group must give its slot back.
Users' own filters (`module:function`) have the same signature and are loaded by the roles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.errors import ConfigError
from ..core.samples import Group

GroupFilter = Callable[[Group], str | None]
"""Reason why the group is left out, or None when it stays."""

SPREAD_EPS = 1e-6
"""Rewards that differ by no more than this are equal."""


def zero_variance(group: Group) -> str | None:
    """All rewards are equal, so every advantage would be 0 (dynamic sampling of DAPO, arXiv 2503.14476, eq. 11)."""
    rewards = group.rewards.astype(np.float64)
    if rewards.size and float(rewards.max() - rewards.min()) > SPREAD_EPS:
        return None
    return "zero_variance"


def keep_all(group: Group) -> str | None:
    """Every group stays."""
    return None


GROUP_FILTERS: dict[str, GroupFilter] = {"zero_variance": zero_variance, "none": keep_all}


def group_filter(name: str) -> GroupFilter:
    """The built-in filter of that name. Raises ConfigError for any other name."""
    found = GROUP_FILTERS.get(name)
    if found is None:
        raise ConfigError(
            f'group filter "{name}" is not known',
            remedy=f"use {', '.join(sorted(GROUP_FILTERS))}, or module:function for your own",
        )
    return found
