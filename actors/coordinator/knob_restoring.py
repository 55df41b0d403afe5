"""Values that were in force when a checkpoint was written come into force again before a resumed run's first work.

All that is in force goes together, since values may only make sense together, and the order in which a run came to them
cannot be made again from where it ended: one change for each target, the widest first. What was still to come gets its
own number. The run file's own word wins where it is newer: a value that was rewritten there since stays as it says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...core.errors import LaunchError
from ...core.knobs import ChangeRequest, KnobValue, LiveKnob, LiveKnobs
from .knob_conductor import KnobConductor
from .knob_order import AUTO, Order, pairs
from .knob_plan import MANY, ChangePlan, Roster, breadth, fits, plan_restored

APPEAR_S = 5.0
"""How long owners may take to be seen; a knob that nobody has any more holds a resumed run up that long."""
ANSWER_S = 15.0
"""How long owners that are there may take to say how they stand."""
SURE = ("buffer", "trainer/0")
"""Owners that are up by then in every run."""
RETRY_S = 0.2

Tell = Callable[[str, str], None]
"""An event, its kind and text."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A value that is to be restored, and for whom."""

    knob: LiveKnob
    target: str
    """"" for a knob that there is one of, however its change named the owner."""
    due: int
    """Number at which it is in force; that of the first step for all that were in force already."""

    @property
    def rank(self) -> tuple[int, int]:
        """Of values for one actor and number the one with the highest holds."""
        return self.knob.epoch, breadth(self.knob.target)[0]

    def is_overtaken_by(self, other: _Kept) -> bool:
        """Whether nobody gets this value any more."""
        is_same = other.knob.name == self.knob.name and fits(self.target, other.target)
        return is_same and other.rank > self.rank and other.due <= self.due


async def restore(conductor: KnobConductor, live: LiveKnobs | None, version: int, tell: Tell) -> None:
    """`live`: what the checkpoint holds, None for a run without one; `version`: of the first step.

    Raises LaunchError for a value that its owner refuses.
    """
    roster = await conductor.roster()
    if live is None:
        live = LiveKnobs()
    else:
        names = {knob.name for knob in live.knobs}
        roster = await _patiently(conductor, lambda found: _is_whole(found, names), APPEAR_S)
    known = [epoch for sheet in roster.sheets for epoch in (sheet.epoch, sheet.past_epoch)]
    conductor.go_on_from(max([live.epoch, *known]))
    kept = [_keep(knob, roster, version) for knob in live.knobs if not _is_passed_over(knob, roster, tell)]
    for part in _changes(kept):
        await _restore_one(conductor, part, tell, is_due=part[0].due <= version)


async def _patiently(conductor: KnobConductor, is_enough: Callable[[Roster], bool], wait_s: float) -> Roster:
    """How all owners stand; with patience for those that the registry, whose news comes late, does not know yet."""
    roster = await conductor.roster()
    try:
        async with asyncio.timeout(wait_s):
            while not is_enough(roster):
                await asyncio.sleep(RETRY_S)
                roster = await conductor.roster()
    except TimeoutError:
        pass  # who is missing or silent is named for each value that it concerns
    return roster


def _is_whole(roster: Roster, names: Iterable[str]) -> bool:
    """Whether all that a resumed run surely has are there and answer, and each knob has an owner."""
    there = {sheet.owner for sheet in roster.sheets}
    return not roster.silent and there.issuperset(SURE) and all(roster.states(name, "") for name in names)


def _is_answered(roster: Roster) -> bool:
    return not roster.silent


def _is_passed_over(knob: LiveKnob, roster: Roster, tell: Tell) -> bool:
    states = list(roster.states(knob.name, "").values())
    if not states:
        tell("knobs-not-restored", f"{knob.name} = {knob.value}: no actor of this run has such a knob")
        return True
    if states[0].first != knob.first:
        tell("knobs-not-restored", f"{knob.name} = {knob.value}: the run file was changed since ({states[0].first})")
        return True
    return False


def _keep(knob: LiveKnob, roster: Roster, version: int) -> _Kept:
    role = next(iter(roster.states(knob.name, "").values())).tunable.owner
    return _Kept(knob, knob.target if role in MANY else "", max(knob.at, version))


def _changes(kept: Sequence[_Kept]) -> list[list[_Kept]]:
    """What is to be restored together, in order."""
    changes: dict[tuple[int, tuple[int, str]], list[_Kept]] = {}
    for each in kept:
        if not any(each.is_overtaken_by(other) for other in kept):
            changes.setdefault((each.due, breadth(each.target)), []).append(each)
    return [changes[key] for key in sorted(changes)]


async def _restore_one(conductor: KnobConductor, part: Sequence[_Kept], tell: Tell, *, is_due: bool) -> None:
    values: dict[str, KnobValue] = {each.knob.name: each.knob.value for each in part}
    request = ChangeRequest(
        values=values,
        who=AUTO,
        reason=f"in force by {_changes_text(each.knob.epoch for each in part)} when the checkpoint was written",
        target=part[0].target,
        force=True,
        not_before=0 if is_due else part[0].due,
    )
    order = Order.of(request, verb="resume")
    absent = False

    async def plan() -> tuple[Order, ChangePlan]:
        nonlocal absent
        planned = plan_restored(request, await _patiently(conductor, _is_answered, ANSWER_S))
        absent = not planned.values
        return order, planned

    reply = await conductor.make(order, plan)
    if reply.refused:
        raise LaunchError(
            f"the checkpoint's knobs cannot be restored: {reply.refused}",
            remedy="write the value that you want into the run file: a value that was changed there wins; if it says "
            "so already, resume with the other keys as they were, and set the knob back first",
        )
    later = f"; {request.target} is not there yet and gets it when it joins" if absent else ""
    tell("knobs-restored", f"{pairs(values)}: {request.reason}{later}")


def _changes_text(epochs: Iterable[int]) -> str:
    numbers = [str(epoch) for epoch in sorted(set(epochs))]
    return f"change{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
