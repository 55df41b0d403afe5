"""The demo's task as a taskset of verifiers: sort digits; the reward is the share of digits in their places."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SortDigits"]


class DigitsData(vf.TaskData):
    label: str


class DigitsTask(vf.Task[DigitsData]):
    @vf.reward
    async def in_place(self, trace: vf.Trace) -> float:
        said = (trace.last_reply or "").strip()
        right = sum(a == b for a, b in zip(said, self.data.label, strict=False))
        return right / max(len(said), len(self.data.label))


class DigitsConfig(vf.TasksetConfig):
    num: int = 2000
    seed: int = 7


class SortDigits(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num):
            digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 7)))
            yield DigitsTask(DigitsData(prompt=f"sort {digits}", label="".join(sorted(digits))))
