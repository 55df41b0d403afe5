"""Progress of an engine with a weight version: set by the thread that moves bytes, read by a call.

`actors/weights/rollout_update.py` decides whether it makes progress.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from ...core.weight_channel import WeightProgress

T = TypeVar("T")

IDLE = "nothing under way"


class Beacon:
    """One engine's. Setting it costs an assignment."""

    def __init__(self) -> None:
        self._position = IDLE
        self._num_done = 0
        self._is_counted = False

    def step(self, position: str, *, is_counted: bool = True) -> None:
        """Something came; `position` says what is waited for now. `is_counted` False: it cannot be seen moving."""
        self._position, self._is_counted = position, is_counted
        self._num_done += 1

    def progress(self) -> WeightProgress:
        return WeightProgress(at=self._position, num_done=self._num_done, is_counted=self._is_counted)


class Counted(Mapping[str, T]):
    """Tensors by name; the beacon steps with each one that is taken."""

    def __init__(self, tensors: Mapping[str, T], beacon: Beacon, phase: str) -> None:
        self._tensors = tensors
        self._beacon = beacon
        self._phase = phase
        self._num_taken = 0

    def __getitem__(self, name: str) -> T:
        self._num_taken += 1
        self._beacon.step(f"{self._phase}: tensor {min(self._num_taken, len(self))} of {len(self)} ({name})")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
