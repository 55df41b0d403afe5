"""Finished groups: whether they are what was asked for, the rewards of all of them, and the groups that people read.

`FinishedGroups` covers all prompts, by step and over the newest groups, and not only those that the filter kept. A
lying engine or workflow costs its group and nothing else. `SampleLog` goes by telemetry to the monitor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.samples import Group, Prompt, Sample, check_sample
from ..group_text import group_text

KEPT = 256
"""Newest groups, of the run and of each source."""


_SHARES = ("left_out", "flat", "all_right", "all_wrong")


class _Outcome(NamedTuple):
    rewards: np.ndarray
    num_passed: int
    left_out: bool
    flat: bool
    """All rewards are equal, what length costs aside; a single sample has nothing to be compared with."""
    all_right: bool
    all_wrong: bool


class FinishedGroups:
    """Of the groups that were finished since the buffer started."""

    def __init__(self, pass_reward: float = 1.0, *, has_rewards: bool = True) -> None:
        """`pass_reward`: from which on an answer is right. `has_rewards`: False for demonstrations (they count 1)."""
        self._pass_reward = pass_reward
        self._has_rewards = has_rewards
        self._since_step: list[_Outcome] = []
        self._newest: deque[_Outcome] = deque(maxlen=KEPT)
        self._by_source: dict[str, deque[float]] = {}

    def add(self, source: str, group: Group, mean: float, *, is_left_out: bool) -> None:
        self._by_source.setdefault(source, deque(maxlen=KEPT)).append(mean)
        if not self._has_rewards:
            return
        rewards, judged = group.rollout_rewards().astype(np.float64), group.task_rewards()
        is_flat = len(judged) > 1 and bool(judged.min() == judged.max())
        passed = judged >= self._pass_reward
        outcome = _Outcome(rewards, int(passed.sum()), is_left_out, is_flat, bool(passed.all()), not bool(passed.any()))
        self._since_step.append(outcome)
        self._newest.append(outcome)

    def mean_of_source(self, source: str) -> float | None:
        """Mean reward of its newest groups; None: none was finished yet."""
        rewards = self._by_source.get(source)
        return sum(rewards) / len(rewards) if rewards else None

    def take_step(self) -> dict[str, float]:
        """A step was trained: figures of the groups that were finished since the step before; empty if none was."""
        groups, self._since_step = self._since_step, []
        if not groups:
            return {}
        rewards = np.concatenate([group.rewards for group in groups])
        counts = _counts(groups)
        return {
            "reward/raw_mean": float(rewards.mean()),
            "reward/raw_std": float(rewards.std()),
            "reward/pass_rate": sum(group.num_passed for group in groups) / len(rewards),
            "reward/all_right": counts["all_right"] / len(groups),
            "reward/all_wrong": counts["all_wrong"] / len(groups),
            "reward/finished_groups": float(len(groups)),
            "reward/left_out_groups": float(counts["left_out"]),
            "reward/zero_std_groups": float(counts["flat"]),
        }

    def newest(self) -> dict[str, float]:
        """Figures of the newest groups, whatever step they belong to: a run that keeps no group makes no step."""
        groups = self._newest
        if not groups:
            return {}
        figures = {name: count / len(groups) for name, count in _counts(groups).items()}
        rewards = np.concatenate([group.rewards for group in groups])
        figures |= {
            "groups": float(len(groups)),
            "reward_min": float(rewards.min()),
            "reward_max": float(rewards.max()),
        }
        return {f"buffer/newest/{name}": value for name, value in figures.items()}


def _counts(groups: Collection[_Outcome]) -> dict[str, int]:
    return {name: sum(getattr(group, name) for group in groups) for name in _SHARES}


INVALID = "invalid-samples"
"""Reason of groups whose records contradict each other or the assignment."""


def wrong_in_group(group: Group, prompt: Prompt, num_samples: int) -> str | None:
    """What is wrong with a group that answers `prompt`; None if nothing is."""
    answered, asked = ((p.source_name, p.row, p.pass_index) for p in (group.prompt, prompt))
    if answered != asked:
        return f"answers row {group.prompt.row} of pass {group.prompt.pass_index}, asked was row {prompt.row}"
    indexes = [sample.index for sample in group.samples]
    num_rollouts = len(set(indexes))
    if not indexes or num_rollouts + group.num_masked != num_samples or group.num_masked < 0:
        masked = f" and {group.num_masked} masked members" if group.num_masked else ""
        return f"has {num_rollouts} rollouts{masked}, {num_samples} were asked for"
    if sum(1 for _ in groupby(indexes)) != num_rollouts:
        return f"its members are numbered {indexes}: the samples of a rollout do not follow each other"
    wrong = _wrong_in_numbers(group.samples, num_samples) or _wrong_in_rewards(group, len(indexes))
    return wrong or wrong_in_samples(group.samples, prompt.group_id)


def wrong_in_partial(partial: Sequence[Sample], group_id: int, num_samples: int) -> str | None:
    """What is wrong with unfinished samples; None if nothing is."""
    return _wrong_in_numbers(partial, num_samples) or wrong_in_samples(partial, group_id)


def _wrong_in_numbers(samples: Sequence[Sample], num_samples: int) -> str | None:
    names = [(sample.index, sample.branch) for sample in samples]
    if len(set(names)) == len(names) and all(0 <= index < num_samples and branch >= 0 for index, branch in names):
        return None
    return f"its members are numbered {[index for index, _ in names]}, not 0 to {num_samples - 1}"


def wrong_in_samples(samples: Sequence[Sample], group_id: int) -> str | None:
    """The first inconsistency of any sample; None if there is none."""
    for sample in samples:
        if sample.group_id != group_id:
            return f"sample {sample.name} belongs to group {sample.group_id}"
        if sample.prompt_ids.ndim != 1 or sample.response_ids.ndim != 1:  # the wire has seen to the dtypes
            return f"sample {sample.name}: its token ids are no rows"
        if sample.loss_mask.size and int(sample.loss_mask.max()) > 1:
            return (
                f"sample {sample.name}: the loss mask holds {int(sample.loss_mask.max())}, only 0 and 1 have a meaning"
            )
        try:
            check_sample(sample)
        except ValueError as error:
            return str(error)
    return None


def num_tokens_of(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)


def _wrong_in_rewards(group: Group, num_samples: int) -> str | None:
    if group.rewards.shape != (num_samples,) or group.rewards.dtype != np.float32:
        return f"has rewards {group.rewards.dtype}{list(group.rewards.shape)}, not float32[{num_samples}]"
    if not bool(np.isfinite(group.rewards).all()):
        return f"has a reward that is not a number: {group.rewards.tolist()}"
    if group.reward_parts and len(group.reward_parts) != num_samples:
        return f"has reward parts of {len(group.reward_parts)} samples, not {num_samples}"
    return None


class SampleLog:
    """Some groups of each step: some that were trained on, some that the filter left out."""

    def __init__(self, telemetry: TelemetryBuffer, clock: Clock, per_step: int) -> None:
        """`per_step`: groups of each step, at most half of them left out by the filter; 0: none."""
        self._telemetry = telemetry
        self._clock = clock
        self._per_step = per_step
        self._step = -1
        self._num_left_out = 0

    def left_out(self, group: Group, step: int, reason: str, rollout: str) -> None:
        """A finished group is not trained on; at once, since a run that keeps none makes no step."""
        if step != self._step:
            self._step, self._num_left_out = step, 0
        if self._num_left_out < self._per_step // 2 and self._telemetry.samples_to_tell(1):
            self._num_left_out += 1
            self._tell(group, step, "filtered", rollout, reason)

    def num_wanted(self, step: int) -> int:
        return self._telemetry.samples_to_tell(self._per_step - (self._num_left_out if step == self._step else 0))

    def trained(self, groups: Iterable[Group], step: int) -> None:
        for group in groups:
            self._tell(group, step, "kept", "")

    def _tell(self, group: Group, step: int, outcome: str, rollout: str, reason: str = "") -> None:
        wall_s = self._clock.wall()
        source = rollout or self._telemetry.source
        self._telemetry.sample(
            group_text(group, step=step + 1, outcome=outcome, wall_s=wall_s, source=source, reason=reason)
        )
