"""When a reward function that worked before is left alone for a while, and when that has no sense any more.

    CLOSED ── `after` failures in a row, of as many groups ──> OPEN ── cool-down over ──> PROBING (one call)
      ^                                                         ^                            │
      └───────────────────────── it works ──────────────────────┼────────────────────────────┤
                                  it fails, longer cool-down ───┘      it fails, `max_wait_s` is over: GIVEN_UP

A function that has never worked is not spared: there is nothing to wait for, and the run's error budget ends it.
Failures count by group, so that one bad prompt is not taken for an outage. Pure: no IO; times are passed in.

Libraries considered: pybreaker, purgatory. They raise for the callers where ours wait, and know no limit for that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

MAX_COOL_DOWN_S = 60.0


class BreakerState(enum.StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"
    GIVEN_UP = "given up"


_S = BreakerState

TRANSITIONS: Mapping[BreakerState, frozenset[BreakerState]] = {
    _S.CLOSED: frozenset({_S.OPEN}),
    _S.OPEN: frozenset({_S.PROBING}),
    _S.PROBING: frozenset({_S.CLOSED, _S.OPEN, _S.GIVEN_UP}),
    _S.GIVEN_UP: frozenset(),
}


class Breaker:
    """One per reward function and actor. All times are seconds of one monotonic clock."""

    def __init__(self, *, after: int, cool_down_s: float, max_wait_s: float) -> None:
        """`after`: failures in a row, 0 = never opens. `cool_down_s`: before the first probe, doubled for each further
        one. `max_wait_s`: from the opening to the last probe."""
        self._after = after
        self._first_cool_down_s = self._cool_down_s = cool_down_s
        self._max_wait_s = max_wait_s
        self._has_worked = False
        self._failed: set[int] = set()
        """Groups whose calls failed since the last one that worked."""
        self._opened_s = self._probe_at_s = 0.0
        self.state = _S.CLOSED
        self.num_opened = 0
        """How often it opened."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether a failure now may turn out to be the beginning of an outage."""
        return bool(self._after) and self._has_worked and self.state is _S.CLOSED

    @property
    def opened_s(self) -> float:
        """When it opened last."""
        return self._opened_s

    def may_call(self, now_s: float) -> bool:
        """Whether the caller may go on now. In the state PROBING afterwards, it is the probe and has to tell how it
        ended, by `worked`, `failed` or `abandoned`."""
        if self.state is _S.OPEN and now_s >= self._probe_at_s:
            self._go(_S.PROBING)
            return True
        return self.state is _S.CLOSED

    def wait_s(self, now_s: float) -> float | None:
        """Until asking again makes sense; None: until somebody tells how a call ended."""
        return max(self._probe_at_s - now_s, 0.0) if self.state is _S.OPEN else None

    def worked(self, *, is_probe: bool) -> None:
        """A call worked. One that was begun before the opening says nothing of the time after it."""
        if is_probe:
            self._go(_S.CLOSED)
        if self.state is _S.CLOSED:
            self._has_worked = True
            self._failed.clear()
            self._cool_down_s = self._first_cool_down_s

    def failed(self, group_id: int, now_s: float, *, is_probe: bool) -> bool:
        """A call failed. True if it is to wait and be repeated, False if it counts."""
        if is_probe:
            self._cool_down_s = min(2 * self._cool_down_s, MAX_COOL_DOWN_S)
            self._rest(now_s)
        elif self.is_in_doubt:
            self._failed.add(group_id)
            if len(self._failed) >= self._after:
                self._opened_s = now_s
                self.num_opened += 1
                self._rest(now_s)
        return self.state in (_S.OPEN, _S.PROBING)

    def abandoned(self, now_s: float) -> None:
        """The probe was cancelled; the next caller is one."""
        self._probe_at_s = now_s
        self._go(_S.OPEN)

    def _rest(self, now_s: float) -> None:
        last_s = self._opened_s + self._max_wait_s
        if self.state is _S.PROBING and now_s >= last_s:
            self._go(_S.GIVEN_UP)
            return
        self._probe_at_s = min(now_s + self._cool_down_s, last_s)
        self._go(_S.OPEN)

    def _go(self, to: BreakerState) -> None:
        assert to in TRANSITIONS[self.state], (self.state, to)
        self.state = to
