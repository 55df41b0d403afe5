"""When the autopilot moves a knob: rarely, only for a reason that lasts, and never back and forth. Sans-IO.

    look    one verdict after another; a move is due once the same bottleneck was seen `num_looks` times in a row, each
            time costing at least `least_share`, and `settle_steps` steps after the move before
    effect  once a move has settled, the time that is not lost must have grown by a factor of `least_speedup`, for that
            is how much faster the run is; a knob that did not help is left alone from then on
    no way  a knob goes one way only, and one that a person turned meanwhile is left to the person
    back

So the number of moves is bounded by what helps. Knows verdicts and advice; steps are passed in. Must not know clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from ...core.knobs import KnobValue
from ..views.advice import Advice
from ..views.bottleneck import Verdict

Propose = Callable[[Container[str]], Advice | None]
"""The best advice that does not touch these knobs."""


@dataclass(frozen=True, slots=True)
class PilotOptions:
    """Damping."""

    settle_steps: int = 5
    """Steps between two moves at least, and before the effect of one is judged."""
    num_looks: int = 3
    least_share: float = 0.3
    """Above the share at which a verdict speaks of a bottleneck, so that both do not answer to the same noise."""
    least_speedup: float = 1.05


@dataclass(slots=True)
class _Made:
    """The newest move."""

    advice: Advice
    version: int
    bound: str
    share: float


class Pilot:
    """See the module's head."""

    def __init__(self, options: PilotOptions | None = None) -> None:
        self._options = options or PilotOptions()
        self._streak = 0
        self._bound = ""
        self._last: _Made | None = None
        self._is_judged = True
        self._goes_up: dict[str, bool] = {}
        self._set_to: dict[str, KnobValue] = {}
        self.left_alone: dict[str, str] = {}
        """Knob -> why the pilot does not touch it any more."""
        self.num_moves = 0

    def look(self, version: int, verdict: Verdict, propose: Propose) -> Advice | None:
        """One look at the run at this version; a move to make now, or None. Tell `moved` when it was made."""
        last, options = self._last, self._options
        if last is not None and version < last.version + options.settle_steps:
            self._streak = 0
            return None
        self._judge_last(verdict)
        is_worth_it = verdict.share >= options.least_share
        self._streak = (self._streak + 1 if verdict.bound == self._bound else 1) if is_worth_it else 0
        self._bound = verdict.bound
        if self._streak < options.num_looks:
            return None
        return self._chosen(propose)

    def moved(self, version: int, advice: Advice, verdict: Verdict) -> None:
        """The move was made."""
        self._last = _Made(advice, version, verdict.bound, verdict.share)
        self._is_judged = False
        self._goes_up[advice.knob] = _is_up(advice)
        self._set_to[advice.knob] = advice.new
        self._streak = 0
        self.num_moves += 1

    def refused(self, advice: Advice, why: str) -> None:
        """The owners did not take it."""
        self.left_alone[advice.knob] = why
        self._streak = 0

    def _judge_last(self, verdict: Verdict) -> None:
        if self._last is None or self._is_judged:
            return
        self._is_judged = True
        made = self._last
        useful_before, useful_now = max(1.0 - made.share, 0.01), max(1.0 - verdict.share, 0.01)
        if verdict.bound == made.bound and useful_now < useful_before * self._options.least_speedup:
            before, now = f"{made.share * 100:.0f} %", f"{verdict.share * 100:.0f} %"
            self.left_alone[made.advice.knob] = f"{made.advice.new} did not help: {before} before, {now} after"

    def _chosen(self, propose: Propose) -> Advice | None:
        """The best advice that goes on the way its knob went so far."""
        while True:
            advice = propose(self.left_alone)
            if advice is None or not advice.knob:
                return None
            why = self._objection(advice)
            if not why:
                return advice
            self.left_alone[advice.knob] = why

    def _objection(self, advice: Advice) -> str:
        if advice.knob in self._set_to and self._set_to[advice.knob] != advice.old:
            return f"a person set it to {advice.old}"
        if self._goes_up.get(advice.knob, _is_up(advice)) != _is_up(advice):
            return "it would go back"
        return ""


def _is_up(advice: Advice) -> bool:
    if isinstance(advice.old, str) or isinstance(advice.new, str):
        return True
    return advice.new > advice.old
