"""Whether another process's event loop is alive, judged by the times at which it was heard. Pure; time is an argument.

The phi accrual detector of N. Hayashibara, X. Defago, R. Yared, T. Katayama, "The phi accrual failure detector",
SRDS 2004: the longer the silence is compared with the gaps seen so far, the greater the suspicion

    phi(t) = -log10 P(gap > t),   gaps taken as normally distributed                          (section 4.2 there)

with two additions that practice has taught: the deviation counts as at least `min_std_s`, for a regular peer would
else be suspected of one late message, and an acceptable pause is added to the mean. A peer that said beforehand that
it would be busy is not judged until then, and a pause of the observer itself does not count as silence.

    ok ──quiet──> suspect ──silent──> hung          suspect, hung ──heard──> ok

Suspicion informs; it never decides that a peer is dead. Pekko's detector was considered: it runs on the JVM, judges
nodes where actors hang, and knows neither declared busy periods nor the observer's own pauses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

HeartState = Literal["ok", "suspect", "hung"]
HeartEvent = Literal["heard", "quiet", "silent"]
Suspicion = Literal["suspect", "hung"]
Verdict = Literal["suspect", "hung", "recovered"]
"""What is reported of a peer."""

TRANSITIONS: Final[Mapping[tuple[HeartState, HeartEvent], HeartState]] = {
    ("ok", "heard"): "ok",
    ("ok", "quiet"): "suspect",
    ("suspect", "heard"): "ok",
    ("suspect", "quiet"): "suspect",
    ("suspect", "silent"): "hung",
    ("hung", "heard"): "ok",
    ("hung", "quiet"): "hung",
    ("hung", "silent"): "hung",
}
"""(state, event) -> next state. "silent" is never reported of a peer that was not quiet before."""

MAX_PHI: Final = 300.0
"""What phi is said to be where a double cannot hold the probability any more."""


@dataclass(frozen=True, slots=True)
class DetectorPolicy:
    """How soon who is suspected of what."""

    interval_s: float = 1.0
    """How often a living peer is expected to be heard; the first guess of its mean gap."""
    min_std_s: float = 0.1
    suspect_pause_s: float = 3.0
    """Acceptable pause before it is suspect: a loop held up that long is worth a word, and happens."""
    hung_pause_s: float = 10.0
    """Acceptable pause before it counts as hung."""
    threshold: float = 8.0
    """Of phi: one wrong verdict in 10^8 gaps, if gaps were normally distributed."""
    limit_s: float = 13.5
    """After so long a silence a peer counts as hung, however irregular it was before."""
    window: int = 100
    """Gaps that are remembered."""

    @property
    def num_stds(self) -> float:
        """How many deviations above the mean `threshold` lies."""
        return NormalDist().inv_cdf(1.0 - 10.0**-self.threshold)


DEFAULT_POLICY: Final = DetectorPolicy()


class FailureDetector:
    """Watches one peer, from `now` on. Times are seconds of one monotonic clock, the observer's."""

    def __init__(self, now: float, policy: DetectorPolicy = DEFAULT_POLICY) -> None:
        self.state: HeartState = "ok"
        self._policy = policy
        self._num_stds = policy.num_stds
        self._heard_at = now
        self._busy_until = -math.inf
        self._is_gap_excused = False
        """The gap that ends next teaches nothing: part of it was declared as busy, or the observer did not listen."""
        # As if two gaps had been seen, so that the first real ones do not decide alone.
        guess_s = policy.interval_s
        self._gaps = deque((0.75 * guess_s, 1.25 * guess_s), maxlen=policy.window)
        self._learn()

    def heard(self, now: float, busy_s: float = 0.0) -> bool:
        """It was heard, and said that it may be silent for the next `busy_s` seconds (0: it takes back what
        it said before). True if it was suspect or hung until now."""
        gap_s = now - self._heard_at
        # A sign that follows another at once is an answer, no beat; of a hung peer nothing is learned.
        if not self._is_gap_excused and self.state != "hung" and gap_s >= self._policy.interval_s / 2:
            self._gaps.append(gap_s)
            self._learn()
        self._heard_at = max(now, self._heard_at)
        self._is_gap_excused = busy_s > 0
        self._busy_until = now + busy_s if busy_s > 0 else -math.inf
        before = self.state
        self._move("heard")
        return before != "ok"

    def forgive(self, now: float, pause_s: float) -> None:
        """The observer itself was stopped for the last `pause_s`: it could not have heard anything."""
        self._heard_at = min(max(now, self._heard_at), self._heard_at + pause_s)

    def resume(self, now: float) -> None:
        """Watch again after a pause of the observer; what was learned before stays."""
        self._heard_at = max(self._heard_at, now)
        self._is_gap_excused = True

    def check(self, now: float) -> tuple[Suspicion, ...]:
        """Judge the silence so far; the states entered by it, in order."""
        silence_s = self.silence_s(now)
        events: tuple[HeartEvent, ...] = ()
        if silence_s >= self.bound_s("suspect"):
            events = ("quiet", "silent") if silence_s >= self.bound_s("hung") else ("quiet",)
        entered: list[Suspicion] = []
        for event in events:
            before = self.state
            self._move(event)
            if self.state not in (before, "ok"):
                entered.append(self.state)
        return tuple(entered)

    def silence_s(self, now: float) -> float:
        """How long it should have been heard and was not: not counting what it declared as busy."""
        return max(0.0, now - max(self._heard_at, self._busy_until))

    def bound_s(self, state: Suspicion) -> float:
        """Silence at which that state is entered."""
        policy = self._policy
        pause_s = policy.suspect_pause_s if state == "suspect" else policy.hung_pause_s
        return min(policy.limit_s, self._mean_s + pause_s + self._num_stds * self._std_s)

    def phi(self, now: float) -> float:
        """Suspicion that it hangs, on the paper's scale: -log10 of the chance that a living peer is silent so long."""
        z = (self.silence_s(now) - self._mean_s - self._policy.hung_pause_s) / self._std_s
        chance = 0.5 * math.erfc(z / math.sqrt(2.0))
        return min(MAX_PHI, -math.log10(chance)) if chance > 0 else MAX_PHI

    def _move(self, event: HeartEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    def _learn(self) -> None:
        gaps = self._gaps
        self._mean_s = math.fsum(gaps) / len(gaps)
        variance = math.fsum((gap_s - self._mean_s) ** 2 for gap_s in gaps) / len(gaps)
        self._std_s = max(self._policy.min_std_s, math.sqrt(variance))
