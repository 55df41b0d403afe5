"""Which groups of a step people can read later: some that were trained on, some that the filter left out.

Knows telemetry and groups. Must not know files: the monitor writes what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.samples import Group
from ..group_text import group_text


class SampleLog:
    """Bounds what is told of each step."""

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
        if self._num_left_out < self._per_step // 2:
            self._num_left_out += 1
            self._tell(group, step, "filtered", rollout, reason)

    def num_wanted(self, step: int) -> int:
        """Groups of the batch of this step that are to be told."""
        return self._per_step - (self._num_left_out if step == self._step else 0)

    def trained(self, groups: Iterable[Group], step: int) -> None:
        """These were trained on."""
        for group in groups:
            self._tell(group, step, "kept", "")

    def _tell(self, group: Group, step: int, outcome: str, rollout: str, reason: str = "") -> None:
        wall_s = self._clock.wall()
        source = rollout or self._telemetry.source
        self._telemetry.sample(
            group_text(group, step=step + 1, outcome=outcome, wall_s=wall_s, source=source, reason=reason)
        )
