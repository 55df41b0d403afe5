"""The autopilot: approves suggestions by itself. Off unless the run file wants it.

It runs in the launcher of node 0, asks what `myxa why` asks, and changes knobs as an operator does: through the
coordinator, all or none, in the audit log. It leaves pinned knobs and forbidden proposals alone.

`Pilot` is the damping: it moves a knob rarely, only for a reason that lasts, and never back and forth. Sans-IO.

    look    one verdict after another; a move is due once the same bottleneck was seen `num_looks` times in a row, each
            time costing at least `least_share`, and `settle_steps` steps after the move before
    effect  once a move has settled, the time that is not lost must have grown by a factor of `least_speedup`, for that
            is how much faster the run is; a knob that did not help is left alone from then on
    no way  a knob goes one way only, and one that a person turned meanwhile is left to the person
    back

So the number of moves is bounded by what helps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Container
from dataclasses import dataclass

from ...actors.contracts import CoordinatorContract
from ...core.errors import MyxaError
from ...core.knobs import ChangeRequest, KnobValue, Operator
from ...core.refs import with_deadline
from ..views.advice import Advice, all_advice
from ..views.bottleneck import Bottleneck
from .suggestions import SuggestionBook
from .verb import VerbContext
from .why_verbs import gather_evidence

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
    """Decides when to move a knob; makes no move itself."""

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

    def look(self, version: int, verdict: Bottleneck, propose: Propose) -> Advice | None:
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

    def moved(self, version: int, advice: Advice, verdict: Bottleneck) -> None:
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

    def _judge_last(self, verdict: Bottleneck) -> None:
        if self._last is None or self._is_judged:
            return
        self._is_judged = True
        made = self._last
        useful_before, useful_now = max(1.0 - made.share, 0.01), max(1.0 - verdict.share, 0.01)
        if verdict.bound == made.bound and useful_now < useful_before * self._options.least_speedup:
            before, now = f"{made.share * 100:.0f} %", f"{verdict.share * 100:.0f} %"
            self.left_alone[made.advice.knob] = f"{made.advice.new} did not help: {before} before, {now} after"

    def _chosen(self, propose: Propose) -> Advice | None:
        """The best advice that moves its knob in the direction of its earlier moves."""
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


LOOK_S = 2.0
LONGEST_WINDOW_S = 60.0
MOVE_S = 60.0
WHO = Operator(user="autopilot", via="auto")

_log = logging.getLogger("myxa.autopilot")


@contextlib.asynccontextmanager
async def autopilot(context: VerbContext) -> AsyncGenerator[None]:
    """Runs the autopilot inside the block, if `control.autopilot` is set."""
    if not context.config.control.autopilot:
        yield
        return
    # Kept and ended here: the launcher has no own actor context to spawn it in.
    flight = asyncio.get_running_loop().create_task(Autopilot(context).fly())
    try:
        yield
    finally:
        flight.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flight


class Autopilot:
    """One per run."""

    def __init__(self, context: VerbContext, pilot: Pilot | None = None) -> None:
        self._context = context
        self._pilot = pilot or Pilot()
        self._seen = -1
        self._moved_s = context.node.clock.monotonic()

    async def fly(self) -> None:
        """Runs until cancelled. Errors are logged: a run never fails because of its autopilot."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (MyxaError, OSError) as error:
                _log.info("the autopilot could not look: %s", error)

    async def look(self) -> None:
        """One look, and one move if it is due. Only new versions count as looks, so that a look is new evidence."""
        since_s = self._context.node.clock.monotonic() - self._moved_s
        evidence = await gather_evidence(self._context, min(LONGEST_WINDOW_S, since_s))
        if not evidence.is_running or evidence.version <= self._seen:
            return
        self._seen = evidence.version
        verdict = evidence.verdict()
        book = SuggestionBook(self._context.run_dir.path)

        def propose(but_for: Container[str]) -> Advice | None:
            found = all_advice(verdict, evidence.facts, but_for=but_for)
            return next((advice for advice in found if advice.knob and book.allows(advice)), None)

        advice = self._pilot.look(evidence.version, verdict, propose)
        if advice is None:
            return
        refused = await self._change(advice)
        self._moved_s = self._context.node.clock.monotonic()
        if refused:
            self._pilot.refused(advice, refused)
        else:
            self._pilot.moved(evidence.version, advice, verdict)

    async def _change(self, advice: Advice) -> str:
        """Why the owners refuse it, or nothing."""
        coordinator = with_deadline(self._context.node.ref(CoordinatorContract, "coordinator"), MOVE_S)
        request = ChangeRequest(
            values={advice.knob: advice.new}, expect={advice.knob: advice.old}, who=WHO, reason=advice.why
        )
        reply = await coordinator.change_knobs(request)
        _log.info("%s: %s -> %s %s", advice.knob, advice.old, advice.new, reply.refused or "")
        return reply.refused
