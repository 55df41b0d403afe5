"""When the members of a group were first, and last, at a station: what a trace shows of it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ...core.clock import Clock
from ...core.flow_sampling import Hop


class Stretches:
    """Of one group."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.found: dict[Hop, tuple[float, float]] = {}
        """Hop -> begin and end on the monotonic clock."""

    @contextmanager
    def of(self, hop: Hop) -> Generator[None]:
        """A member is there."""
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            first_s = self.found[hop][0] if hop in self.found else began_s
            self.found[hop] = (min(first_s, began_s), self._clock.monotonic())

    def wall_s(self, monotonic_s: float) -> float:
        """That moment on the wall clock."""
        return self._clock.wall() - self._clock.monotonic() + monotonic_s
