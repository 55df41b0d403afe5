"""A coordinator that decides changes of knobs for owners in tests, by the real rules, and records nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from myxa.actors.contracts import CoordinatorContract
from myxa.actors.coordinator.knob_decisions import ChangeDraft, Decisions, OwnerStates, draft_change
from myxa.core.errors import ConfigError
from myxa.core.knobs import AuditRecord, ChangeRequest, KnobValue, LiveKnob, LiveKnobs, Operator

WHO = Operator(user="tester", via="test")


def decided(
    draft: ChangeDraft, epoch: int, at: int = 0, *, verb: str = "set", version: int = 0, wall_s: float = 0.0
) -> AuditRecord:
    """The record of a change."""
    return AuditRecord(
        number=0, wall_s=wall_s, verb=verb, who=WHO, arguments={}, result="done", epoch=epoch,
        at=at if draft.decision.numbered else 0, version=version, moves=draft.moves, decision=draft.decision,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of a change that was asked for."""

    accepted: bool
    reason: str = ""
    """Why not, or what the owner remarked."""
    at: int = 0


class Decider(CoordinatorContract):
    """See the module's head. Owners in the same test ask it as they ask the real one."""

    def __init__(self, decisions: Decisions | None = None) -> None:
        self.decisions = decisions or Decisions("test")

    async def knobs_in_force(self, after: int, number: int) -> LiveKnobs:
        return self.decisions.news(after)

    async def change(self, owner: Any, epoch: int, at: int = -1, version: int = 0, /, **values: KnobValue) -> Outcome:
        """Judge and decide, and have the owner use it. `owner`: a reference to it, or itself; `at`: for that number."""
        roster = OwnerStates([await owner.knobs()], {})
        name = roster.sheets[0].owner
        try:
            draft = draft_change(ChangeRequest(values=values, who=WHO), roster, self.decisions)
        except ConfigError as error:
            return Outcome(accepted=False, reason=str(error))
        number = draft.earliest(roster, version) if at < 0 else at
        verdict = await owner.judge_knobs(dict(draft.values[name]), number)
        if not verdict.refusal:
            self.decisions.add(decided(draft, epoch, number))
            await owner.knobs_decided(epoch)
        return Outcome(not verdict.refusal, verdict.refusal or verdict.remark, number)

    async def hold_from(self, buffer: Any, at: int = 0) -> None:
        """No step from `at` on; -1: they go on. It takes the next epoch."""
        assert (await self.change(buffer, self.decisions.epoch + 1, pause_at=at)).accepted


def news(epoch: int, at: int = 0, /, **values: KnobValue | None) -> LiveKnobs:
    """What an owner takes: these values by that change."""
    return LiveKnobs(
        epoch=epoch,
        knobs=tuple(LiveKnob(name=name, value=value, first=0, epoch=epoch, at=at) for name, value in values.items()),
    )
