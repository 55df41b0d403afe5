"""The group filter of a run: a built-in one, or a user's `keep(group) -> bool | str` made to look like one.

Knows how a verdict is read. Must not know what happens to groups that are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...algos.filters import GROUP_FILTERS, GroupFilter, SampleFilter, group_filter, learn_from_all
from ...core.errors import UserCodeError
from ...core.samples import Group
from ..user_code import GROUP_FILTER, load_function, what_was_raised


@dataclass(frozen=True, slots=True)
class GroupFilters:
    """The filters that were loaded when the run began, and the one that the run file chose. No other can be chosen
    while the run goes on: a name that comes by a message never makes anybody import code."""

    chosen: str
    by_name: Mapping[str, GroupFilter]
    of_samples: SampleFilter = learn_from_all
    """Which members of the groups that stay are learnt from. Not to be changed while the run goes on."""


def load_group_filters(
    name: str, args: Mapping[str, Any] | None = None, *, of_samples: SampleFilter = learn_from_all
) -> GroupFilters:
    """The filter of that name with its arguments, and the built-in ones. Raises as `load_group_filter`."""
    return GroupFilters(name, {**GROUP_FILTERS, name: load_group_filter(name, args or {})}, of_samples)


def load_group_filter(name: str, args: Mapping[str, Any]) -> GroupFilter:
    """The filter of that name, with named arguments. Raises ConfigError or UserCodeError when it cannot be loaded;
    calling one of the user's raises UserCodeError when it raises or answers nonsense."""
    if name in GROUP_FILTERS:
        return group_filter(name, args)
    keep = partial(load_function(name, GROUP_FILTER, args).fn, **args)

    def reason(group: Group) -> str | None:
        try:
            verdict: Any = keep(group)
        except Exception as error:
            raise UserCodeError(
                f'group filter "{name}" raised {what_was_raised(error)} (group {group.group_id})',
                remedy="mend the function",
            ) from error
        if isinstance(verdict, str):
            return verdict or None
        if isinstance(verdict, bool | np.bool_):
            return None if verdict else name
        raise UserCodeError(
            f'group filter "{name}" returned a value of type {type(verdict).__name__} (group {group.group_id})',
            remedy="return True to keep the group, False or a reason to leave it out",
        )

    return reason
