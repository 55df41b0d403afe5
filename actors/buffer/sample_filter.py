"""Members of a group from which nothing is learnt: their tokens are masked out, their rewards still count where rewards
are compared. A built-in filter says which, or a user's `keep(group) -> Sequence[bool | str]`.

Knows how verdicts are read and what a mask is. Must not know the ledger: it is told how many were masked, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set, Sized
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from ...algos.filters import SAMPLE_FILTERS, SampleFilter, sample_filter
from ...core.errors import UserCodeError
from ...core.samples import Group, Sample
from ..user_code import SAMPLE_FILTER, load_function, what_was_raised

ALL_MASKED = "all-masked"
"""Reason of groups with no member left to learn from."""


def load_sample_filter(name: str, args: Mapping[str, Any]) -> SampleFilter:
    """The filter of that name, with named arguments. Raises ConfigError or UserCodeError when it cannot be loaded;
    calling one of the user's raises UserCodeError when it raises or answers nonsense."""
    if name in SAMPLE_FILTERS:
        return sample_filter(name, args)
    keep = partial(load_function(name, SAMPLE_FILTER, args).fn, **args)

    def reasons(group: Group) -> tuple[str | None, ...]:
        try:
            verdicts = _listed(keep(group), len(group.samples))
        except _Nonsense as nonsense:
            raise UserCodeError(
                f'sample filter "{name}" returned {nonsense} (group {group.group_id})',
                remedy="return, for each sample of the group, True to learn from it, False or a reason not to",
            ) from nonsense
        except Exception as error:
            raise UserCodeError(
                f'sample filter "{name}" raised {what_was_raised(error)} (group {group.group_id})',
                remedy="mend the function",
            ) from error
        return tuple(None if verdict in (True, "") else verdict or name for verdict in verdicts)

    return reasons


def mask_members(group: Group, of_samples: SampleFilter) -> tuple[Group, dict[str, int]]:
    """The group with those members masked, and how many for which reason. Raises UserCodeError for a filter that
    fails."""
    reasons = of_samples(group)
    masked = Counter(reason for reason in reasons if reason is not None)
    if not masked:
        return group, {}
    samples = tuple(one if reason is None else _masked(one) for one, reason in zip(group.samples, reasons, strict=True))
    return msgspec.structs.replace(group, samples=samples), dict(masked)


def is_all_masked(group: Group) -> bool:
    """Whether there is nothing to learn from."""
    return not any(bool(sample.loss_mask.any()) for sample in group.samples)


def _masked(sample: Sample) -> Sample:
    reference = sample.reference_logprobs
    return msgspec.structs.replace(
        sample,
        loss_mask=np.zeros_like(sample.loss_mask),
        logprobs=np.zeros_like(sample.logprobs),
        reference_logprobs=None if reference is None else np.zeros_like(reference),
    )


class _Nonsense(Exception):
    """What was returned instead of verdicts."""


def _listed(returned: object, num_samples: int) -> list[bool | str]:
    kind = type(returned)
    if not (issubclass(kind, Iterable) and issubclass(kind, Sized)) or issubclass(kind, str | bytes | Mapping | Set):
        raise _Nonsense(f"a value of type {kind.__name__}, not a sequence of {num_samples} verdicts")
    verdicts = list(cast("Iterable[object]", returned))
    if len(verdicts) != num_samples:
        raise _Nonsense(f"{len(verdicts)} verdicts for {num_samples} samples")
    found: list[bool | str] = []
    for index, verdict in enumerate(verdicts):
        if isinstance(verdict, np.bool_):
            found.append(bool(cast("object", verdict)))
        elif isinstance(verdict, bool) or (isinstance(verdict, str) and _is_text(verdict)):
            found.append(verdict)
        else:
            raise _Nonsense(f"a verdict of type {type(verdict).__name__} for sample {index}")
    return found


def _is_text(verdict: str) -> bool:
    """Whether the ledger can hold it."""
    try:
        verdict.encode()
    except UnicodeEncodeError:
        return False
    return True
