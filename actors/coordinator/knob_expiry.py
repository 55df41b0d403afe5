"""Changes that go back by themselves: after so many training steps, or seconds. Sans-IO.

Steps are exact for knobs with numbered boundaries: their way back is begun some versions early and committed for the
very number. The others go back when the run has come to that version.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .knob_decisions import Decided
from .knob_plan import breadth, fits, overlap

AHEAD = 3
"""Versions before its number at which the way back is begun, at least."""
AHEAD_S = 1.0
"""And so long before it, as fast as versions come: steps of milliseconds do not wait until all owners have answered."""
PACE_OF = 16
"""Versions by which it is told how fast they come."""
_AT_ONCE_S = 1e-9
"""A time that is over: 0 means none."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """Knobs of one change that go back together."""

    epoch: int
    names: frozenset[str]
    target: str
    due_version: int = 0
    due_s: float = 0.0
    """Monotonic; 0: by version."""
    not_before: int = 0
    """Number at which the old values are to be in force; 0: at once."""
    overtakers: frozenset[tuple[str, int]] = frozenset()
    """(target, epoch) of changes that set the knobs again since: these actors do not go back."""

    @property
    def spared(self) -> tuple[str, ...]:
        """Targets that stay as they are, the wider before the narrower."""
        return tuple(sorted({target for target, _ in self.overtakers}, key=breadth))

    @property
    def is_overtaken(self) -> bool:
        """Nobody is left to go back."""
        return any(fits(self.target, target) for target in self.spared)


class Expiries:
    """See the module's head."""

    def __init__(self) -> None:
        self._open: list[Expiry] = []
        self._seen: deque[tuple[int, float]] = deque(maxlen=PACE_OF)
        """(version, monotonic seconds) of the newest ones."""

    def add(self, decided: Decided, *, for_steps: int, for_s: float, version: int, now_s: float) -> None:
        """That change is to go back. `version`: where the run stands."""
        names, target = frozenset(decided.plan.common), decided.plan.target
        if for_s > 0:
            self._open.append(Expiry(decided.epoch, names, target, due_s=now_s + for_s))
        if for_steps <= 0:
            return
        numbered = names & decided.plan.numbered
        if numbered:
            end = decided.at + for_steps
            self._open.append(Expiry(decided.epoch, numbered, target, due_version=end - AHEAD, not_before=end))
        if names - numbered:
            self._open.append(Expiry(decided.epoch, names - numbered, target, due_version=version + for_steps))

    def overtaken_by(self, decided: Decided) -> None:
        """Knobs that were set again, or taken back by hand, stay as they are, at those actors; the others go back. What
        set them again may be taken back itself: then the time of the older change counts for them once more."""
        self._open = [part for expiry in self._open for part in _parts(expiry, decided)]

    def due(self, version: int, now_s: float) -> tuple[Expiry, ...]:
        """What is to go back now; it stays listed until `done`. To be asked at every version."""
        more = self._more_ahead(version, now_s)
        return tuple(
            e
            for e in self._open
            if (e.due_s <= now_s if e.due_s else e.due_version - (more if e.not_before else 0) <= version)
        )

    def _more_ahead(self, version: int, now_s: float) -> int:
        """By how many versions more than `AHEAD` the way back is begun early."""
        if self._seen and version < self._seen[-1][0]:
            self._seen.clear()  # the run fell back to a checkpoint
        if not self._seen or version > self._seen[-1][0]:
            self._seen.append((version, now_s))
        (first, began_s), (last, ended_s) = self._seen[0], self._seen[-1]
        per_s = (last - first) / (ended_s - began_s) if ended_s > began_s else 0.0
        return max(math.ceil(per_s * AHEAD_S) - AHEAD, 0)

    def done(self, expiry: Expiry) -> None:
        """It went back, or cannot any more."""
        self._open = [e for e in self._open if (e.epoch, e.names) != (expiry.epoch, expiry.names)]

    def kept(self, ahead_s: float) -> tuple[Expiry, ...]:
        """For another process; `ahead_s`: by how much the wall clock is ahead of the monotonic one."""
        return tuple(_shifted(e, ahead_s) for e in self._open)

    def restore(self, kept: Iterable[Expiry], ahead_s: float) -> None:
        """What an earlier process, or moment, kept; what was due meanwhile is due now."""
        self._open = [_shifted(e, -ahead_s) for e in kept]

    def next_s(self) -> float | None:
        """When the next one by time is due."""
        return min((e.due_s for e in self._open if e.due_s), default=None)

    def words(self, now_s: float) -> dict[str, str]:
        """Knob -> when it goes back."""
        return {
            name: f"in {max(e.due_s - now_s, 0):.0f} s" if e.due_s else f"at version {e.not_before or e.due_version}"
            for e in self._open
            if not e.is_overtaken
            for name in e.names
        }


def _shifted(expiry: Expiry, by_s: float) -> Expiry:
    return replace(expiry, due_s=max(expiry.due_s + by_s, _AT_ONCE_S)) if expiry.due_s else expiry


def _parts(expiry: Expiry, decided: Decided) -> list[Expiry]:
    """What is left of an expiry after a change: knobs that it did not touch, and those that it did."""
    plan = decided.plan
    touched = expiry.names.intersection(plan.common)
    is_meant = overlap(expiry.target, plan.target) and not any(fits(expiry.target, each) for each in plan.spared)
    if not touched or expiry.epoch == decided.epoch or not is_meant:
        return [expiry]
    parts = [replace(expiry, names=left)] if (left := expiry.names - touched) else []
    if decided.undoes == expiry.epoch:
        return parts
    overtakers = {(target, epoch) for target, epoch in expiry.overtakers if epoch != decided.undoes}
    if len(overtakers) == len(expiry.overtakers):
        overtakers.add((plan.target, decided.epoch))
    return [*parts, replace(expiry, names=touched, overtakers=frozenset(overtakers))]
