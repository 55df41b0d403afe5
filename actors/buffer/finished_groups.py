"""Rewards of all groups that were finished, those that the filter left out among them: by step, and of the newest ones.

What a batch tells of its rewards is about the groups that the filter kept. How the model does on its prompts is told
here. Pure: no clock, no IO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.samples import Group

KEPT = 256
"""Newest groups, of the run and of each source."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    rewards: np.ndarray
    num_passed: int
    is_left_out: bool

    @property
    def is_all_right(self) -> bool:
        return self.num_passed == len(self.rewards)

    @property
    def is_all_wrong(self) -> bool:
        return self.num_passed == 0

    @property
    def is_flat(self) -> bool:
        """All rewards are equal; a single sample has nothing to be compared with."""
        return len(self.rewards) > 1 and float(np.ptp(self.rewards)) == 0.0


class FinishedGroups:
    """Of the groups that were finished since the buffer started."""

    def __init__(self, pass_reward: float = 1.0, *, has_rewards: bool = True) -> None:
        """`pass_reward`: from which on an answer is right. `has_rewards`: False for demonstrations, which all count
        1: nothing is told of them."""
        self._pass_reward = pass_reward
        self._has_rewards = has_rewards
        self._since_step: list[_Outcome] = []
        self._newest: deque[_Outcome] = deque(maxlen=KEPT)
        self._by_source: dict[str, deque[float]] = {}

    def add(self, source: str, group: Group, *, is_left_out: bool) -> None:
        """A group was finished. Its rewards are numbers."""
        rewards = group.rewards.astype(np.float64)
        self._by_source.setdefault(source, deque(maxlen=KEPT)).append(float(rewards.mean()))
        if self._has_rewards:
            found = _Outcome(rewards, int((group.rewards >= self._pass_reward).sum()), is_left_out)
            self._since_step.append(found)
            self._newest.append(found)

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
        return {
            "reward/raw_mean": float(rewards.mean()),
            "reward/raw_std": float(rewards.std()),
            "reward/pass_rate": sum(group.num_passed for group in groups) / len(rewards),
            "reward/all_right": _share([group.is_all_right for group in groups]),
            "reward/all_wrong": _share([group.is_all_wrong for group in groups]),
            "reward/finished_groups": float(len(groups)),
            "reward/left_out_groups": float(sum(group.is_left_out for group in groups)),
            "reward/zero_std_groups": float(sum(group.is_flat for group in groups)),
        }

    def newest(self) -> dict[str, float]:
        """Figures of the newest groups, whatever step they belong to: a run that keeps no group makes no step."""
        groups = self._newest
        if not groups:
            return {}
        return {
            "buffer/newest/groups": float(len(groups)),
            "buffer/newest/left_out": _share([group.is_left_out for group in groups]),
            "buffer/newest/flat": _share([group.is_flat for group in groups]),
            "buffer/newest/all_right": _share([group.is_all_right for group in groups]),
            "buffer/newest/all_wrong": _share([group.is_all_wrong for group in groups]),
            "buffer/newest/reward_min": min(float(group.rewards.min()) for group in groups),
            "buffer/newest/reward_max": max(float(group.rewards.max()) for group in groups),
        }


def _share(of: Sequence[bool]) -> float:
    return sum(of) / len(of)
