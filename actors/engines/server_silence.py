"""When a server that does not answer counts as lost: by the clock since its last good answer. Pure; time is passed in.

    wait `wait_s` -> look, for `look_s` at most -> `looked` -> ... until `is_over`

A look at a server that hangs costs time itself, so it is cut to what is left. Two looks must have failed: an actor that
stood still itself finds that a minute has passed, and nothing about its server.
"""

from __future__ import annotations

LOOK_S = 10.0
"""Longest look."""
LEAST_LOOK_S = 3.0
"""SGLang 0.5.17 takes a second to answer `/health` when it is well."""


class Silence:
    """Of one server."""

    def __init__(self, bound_s: float, every_s: float, now_s: float) -> None:
        """`bound_s`: silence after which it is lost. `every_s`: between two looks."""
        self._bound_s = bound_s
        self._every_s = every_s
        self._heard_s = now_s
        self._num_failed = 0

    def lasts_s(self, now_s: float) -> float:
        """Since the last good answer."""
        return now_s - self._heard_s

    def wait_s(self, now_s: float) -> float:
        """Until the next look."""
        return max(min(self._every_s, self._bound_s - self.lasts_s(now_s)), self._every_s / 10)

    def look_s(self, now_s: float) -> float:
        """How long the next look may take."""
        least_s = min(LEAST_LOOK_S, self._bound_s)
        return min(LOOK_S, max(self._bound_s - self.lasts_s(now_s), least_s))

    def looked(self, now_s: float, *, is_well: bool) -> None:
        """What a look has found."""
        if is_well:
            self._heard_s, self._num_failed = now_s, 0
        else:
            self._num_failed += 1

    def is_over(self, now_s: float) -> bool:
        """Whether it is lost."""
        return self._num_failed > 1 and self.lasts_s(now_s) >= self._bound_s
