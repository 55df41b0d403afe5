"""The filters of a run: which groups are left out, and which members of a group nothing is learnt from.

Built-in, or the user's: `keep(group) -> bool | str` for groups, `keep(group) -> Sequence[bool | str]` for members,
whose rewards still count where rewards are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
from msgspec.structs import astuple

from ...algos.filters import (
    GROUP_FILTERS,
    SAMPLE_FILTERS,
    GroupFilter,
    SampleFilter,
    group_filter,
    learn_from_all,
    sample_filter,
)
from ...algos.rewards.outcome import Unusable, each_of
from ...core.errors import UserCodeError
from ...core.samples import Group, Sample
from ..user_code.functions import GROUP_FILTER, SAMPLE_FILTER, load_function, what_was_raised


@dataclass(frozen=True, slots=True)
class GroupFilters:
    """Those loaded when the run began, and the chosen one: a name in a message never imports code."""

    chosen: str
    by_name: Mapping[str, GroupFilter]
    of_samples: SampleFilter = learn_from_all
    """Which members of the groups that stay are learnt from. It cannot change during the run."""


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
    remedy = "return True to keep the group, False or a reason to leave it out"
    keep = partial(load_function(name, GROUP_FILTER, args).fn, **args)
    judge = _own_filter("group", name, keep, lambda returned, _: [_verdict(returned, 0)], remedy)
    return lambda group: judge(group)[0]


def load_sample_filter(name: str, args: Mapping[str, Any]) -> SampleFilter:
    """The same of a filter of members."""
    if name in SAMPLE_FILTERS:
        return sample_filter(name, args)
    remedy = "return, for each sample of the group, True to learn from it, False or a reason not to"
    keep = partial(load_function(name, SAMPLE_FILTER, args).fn, **args)

    def verdicts(returned: object, num_samples: int) -> list[bool | str]:
        return each_of(returned, [f"sample {index}" for index in range(num_samples)], "verdicts", _verdict)

    return _own_filter("sample", name, keep, verdicts, remedy)


def _own_filter(
    kind: str, name: str, keep: Callable[[Group], Any], listed: Callable[[object, int], list[bool | str]], remedy: str
) -> SampleFilter:
    def reasons(group: Group) -> tuple[str | None, ...]:
        title, place = f'{kind} filter "{name}"', f"(group {group.group_id})"
        for value in (*astuple(group), *(value for sample in group.samples for value in astuple(sample))):
            if isinstance(value, np.ndarray):  # `rewards.sort()` would give them to other samples
                cast("np.ndarray[Any, Any]", value).setflags(write=False)
        try:
            verdicts = listed(keep(group), len(group.samples))
        except Unusable as unusable:
            raise UserCodeError(f"{title} {unusable} {place}", remedy=remedy) from unusable
        except Exception as error:
            raise UserCodeError(
                f"{title} raised {what_was_raised(error)} {place}", remedy="mend the function"
            ) from error
        return tuple(None if verdict in (True, "") else verdict or name for verdict in verdicts)

    return reasons


ALL_MASKED = "all-masked"
"""Reason of groups with no member left to learn from."""


def mask_members(group: Group, of_samples: SampleFilter) -> tuple[Group, dict[str, int]]:
    """The group with those members masked, and how many for which reason. Raises UserCodeError if the filter fails."""
    reasons = of_samples(group)
    masked = Counter(reason for reason in reasons if reason is not None)
    if not masked:
        return group, {}
    samples = tuple(
        sample if reason is None else _masked(sample) for sample, reason in zip(group.samples, reasons, strict=True)
    )
    return msgspec.structs.replace(group, samples=samples), dict(masked)


def is_all_masked(group: Group) -> bool:
    return not any(bool(sample.loss_mask.any()) for sample in group.samples)


def _masked(sample: Sample) -> Sample:
    reference = sample.reference_logprobs
    return msgspec.structs.replace(
        sample,
        loss_mask=np.zeros_like(sample.loss_mask),
        logprobs=np.zeros_like(sample.logprobs),
        reference_logprobs=None if reference is None else np.zeros_like(reference),
    )


def _verdict(verdict: object, index: int) -> bool | str:
    if isinstance(verdict, bool | np.bool_):
        return bool(cast("object", verdict))
    if isinstance(verdict, str) and verdict.encode(errors="replace").decode() == verdict:
        return verdict
    raise Unusable(f"returned a value of type {type(verdict).__name__}")
