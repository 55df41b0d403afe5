"""One change of knobs over several owners, as a transaction: all of them or none. Sans-IO.

    preparing   every owner votes; a no, or an owner that cannot answer, aborts the change for all
    deciding    all said yes: the decision is made durable before any owner hears of it
    committing  each owner receives the decision until it confirms or is gone; its successor gets the values when it
                joins, before its first work
    aborting    each owner that voted is asked to forget the change, until it answers or is gone
    done

`KnobOrder` is the change as requested, and the record of it for the audit log. `ChangeMachine` is the transaction:
events come in, instructions go out. An event that its stage does not expect changes nothing: answers may come late or
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...core.errors import ConfigError
from ...core.knobs import AuditRecord, ChangeRequest, KnobChange, KnobCommit, KnobValue, KnobVote, Operator
from .knob_plan import ChangePlan

Stage = Literal["preparing", "deciding", "committing", "aborting", "done"]


# -- what happened


@dataclass(frozen=True, slots=True)
class Voted:
    """An owner answered."""

    vote: KnobVote


@dataclass(frozen=True, slots=True)
class Unanswered:
    """An owner cannot be had for its vote: it died, is not there, or let the deadline pass."""

    owner: str
    why: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """The decision is durable."""


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """It could not be made durable."""

    why: str


@dataclass(frozen=True, slots=True)
class Delivered:
    """An owner confirmed the decision, whichever it was."""

    owner: str


@dataclass(frozen=True, slots=True)
class Gone:
    """That incarnation of an owner ended before it confirmed."""

    owner: str
    why: str


@dataclass(frozen=True, slots=True)
class OwnerFailed:
    """An owner received the decision and could not carry it out."""

    owner: str
    why: str


ChangeEvent = Voted | Unanswered | Recorded | NotRecorded | Delivered | Gone | OwnerFailed


# -- what is to be done


@dataclass(frozen=True, slots=True)
class Prepare:
    """Ask an owner for its vote; answer with `Voted` or `Unanswered`."""

    owner: str
    change: KnobChange


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Make the decision durable; answer with `Recorded` or `NotRecorded`."""

    at: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Tell an owner until it confirms; answer with `Delivered`, `Gone` or `OwnerFailed`."""

    owner: str
    commit: KnobCommit


@dataclass(frozen=True, slots=True)
class Abort:
    """Likewise."""

    owner: str
    epoch: int


Instruction = Prepare | RecordDecision | Commit | Abort


@dataclass(frozen=True, slots=True)
class ChangeOptions:
    """How a change is made."""

    force: bool = False
    dry_run: bool = False
    """Ask, then abort."""
    not_before: int = 0
    """First number that it may be for; 0 where no knob of it has a numbered boundary."""


@dataclass(slots=True)
class ChangeMachine:
    """See the module's head. One per change."""

    epoch: int
    values: Mapping[str, Mapping[str, KnobValue]]
    """Owner -> its knobs."""
    options: ChangeOptions = ChangeOptions()
    stage: Stage = "preparing"
    at: int = 0
    """Number at which it is in force, once all votes are there; 0: no knob of it has a numbered boundary."""
    is_committed: bool = False
    reason: str = ""
    """Why it was aborted."""
    gone: dict[str, str] = field(default_factory=dict[str, str])
    """Owners that ended before they confirmed, and how."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Owners that could not carry the decision out."""
    remarks: dict[str, str] = field(default_factory=dict[str, str])
    """What owners that agreed want the operator to know."""
    open: set[str] = field(default_factory=set[str])
    """Owners whose answer is still to come."""

    def begin(self) -> list[Instruction]:
        """The first instructions. Raises ConfigError for a change of nothing."""
        if not self.values or not all(self.values.values()):
            raise ConfigError("a change without values", remedy="name at least one knob")
        self.open = set(self.values)
        force = self.options.force
        return [
            Prepare(owner, KnobChange(epoch=self.epoch, values=dict(values), force=force))
            for owner, values in self.values.items()
        ]

    def on(self, event: ChangeEvent) -> list[Instruction]:
        """What to do now that this happened."""
        step = _STEPS.get((self.stage, type(event)))
        return [] if step is None else list(step(self, event))

    # -- preparing

    def on_vote(self, event: Voted) -> Sequence[Instruction]:
        vote = event.vote
        if vote.owner not in self.open:
            return ()
        if not vote.accepted:
            return self._abort(f"{vote.owner}: {vote.reason}" if vote.owner not in vote.reason else vote.reason)
        self.open.discard(vote.owner)
        if vote.reason:
            self.remarks[vote.owner] = vote.reason
        self.at = max(self.at, vote.earliest, self.options.not_before)
        if self.open:
            return ()
        if self.options.dry_run:
            return self._abort("")
        self.stage = "deciding"
        return (RecordDecision(self.at),)

    def on_unanswered(self, event: Unanswered) -> Sequence[Instruction]:
        if event.owner not in self.open:
            return ()
        return self._abort(f"{event.owner} did not answer: {event.why}")

    # -- deciding

    def on_recorded(self, event: Recorded) -> Sequence[Instruction]:
        self.stage, self.is_committed = "committing", True
        self.open = set(self.values)
        return [
            Commit(owner, KnobCommit(epoch=self.epoch, at=self.at, values=dict(values)))
            for owner, values in self.values.items()
        ]

    def on_not_recorded(self, event: NotRecorded) -> Sequence[Instruction]:
        return self._abort(f"it could not be recorded: {event.why}")

    # -- telling

    def on_delivered(self, event: Delivered) -> Sequence[Instruction]:
        return self._close(event.owner)

    def on_gone(self, event: Gone) -> Sequence[Instruction]:
        if event.owner in self.open and self.is_committed:
            self.gone[event.owner] = event.why
        return self._close(event.owner)

    def on_failed(self, event: OwnerFailed) -> Sequence[Instruction]:
        if event.owner in self.open and self.is_committed:
            self.failed[event.owner] = event.why
        return self._close(event.owner)

    def _close(self, owner: str) -> Sequence[Instruction]:
        self.open.discard(owner)
        if not self.open:
            self.stage = "done"
        return ()

    def _abort(self, reason: str) -> Sequence[Instruction]:
        self.stage, self.reason = "aborting", reason
        self.open = set(self.values)
        return [Abort(owner, self.epoch) for owner in self.values]


_STEPS: dict[tuple[Stage, type], Callable[..., Sequence[Instruction]]] = {
    ("preparing", Voted): ChangeMachine.on_vote,
    ("preparing", Unanswered): ChangeMachine.on_unanswered,
    ("deciding", Recorded): ChangeMachine.on_recorded,
    ("deciding", NotRecorded): ChangeMachine.on_not_recorded,
    ("committing", Delivered): ChangeMachine.on_delivered,
    ("committing", Gone): ChangeMachine.on_gone,
    ("committing", OwnerFailed): ChangeMachine.on_failed,
    ("aborting", Delivered): ChangeMachine.on_delivered,
    ("aborting", Gone): ChangeMachine.on_gone,
    ("aborting", OwnerFailed): ChangeMachine.on_failed,
}


AUTO = Operator(via="auto")
"""No operator: an expiry, a resumed run."""


@dataclass(frozen=True, slots=True)
class KnobOrder:
    """See the module's head."""

    verb: str
    """"set", "undo", "expire", "resume"."""
    who: Operator
    reason: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What was asked for, for the audit log."""
    options: ChangeOptions = field(default_factory=ChangeOptions)
    for_steps: int = 0
    for_s: float = 0.0
    undoes: int = 0
    """Epoch of the change that it takes back."""

    @classmethod
    def of(cls, request: ChangeRequest, *, verb: str = "set") -> KnobOrder:
        """What a request orders."""
        asked: dict[str, Any] = {"values": request.values, "target": request.target}
        extra = {
            "expect": request.expect,
            "for_steps": request.for_steps,
            "for_s": request.for_s,
            "force": request.force,
            "not_before": request.not_before,
        }
        return cls(
            verb=verb,
            who=request.who,
            reason=request.reason,
            arguments=asked | {name: value for name, value in extra.items() if value},
            options=ChangeOptions(force=request.force, dry_run=request.dry_run, not_before=request.not_before),
            for_steps=request.for_steps,
            for_s=request.for_s,
        )

    def refused(self, why: str) -> AuditRecord:
        """Nothing was changed."""
        return self._record(dict(self.arguments), "refused", detail=why)

    def done(self, plan: ChangePlan, epoch: int, at: int) -> AuditRecord:
        """It was decided. `target`, `values` and `own` say all that is needed to do it again."""
        arguments: dict[str, object] = {**self.arguments, "target": plan.target, "values": dict(plan.common)}
        if plan.own:
            arguments["own"] = {owner: dict(values) for owner, values in plan.own.items()}
        if self.undoes:
            arguments["undoes"] = self.undoes
        return self._record(arguments, "done", epoch=epoch, at=at, plan=plan)

    def _record(
        self,
        arguments: dict[str, object],
        result: str,
        *,
        detail: str = "",
        epoch: int = 0,
        at: int = 0,
        plan: ChangePlan | None = None,
    ) -> AuditRecord:
        return AuditRecord(
            number=0,
            wall_s=0.0,
            verb=self.verb,
            who=self.who,
            arguments=arguments,
            result=result,
            detail=detail,
            reason=self.reason,
            epoch=epoch,
            at=at if plan is not None and plan.numbered else 0,
            moves=plan.moves if plan is not None else (),
        )


def pairs(values: Mapping[str, KnobValue]) -> str:
    """For people: "lr = 1e-06, temperature = 0.8"."""
    return ", ".join(f"{name} = {value}" for name, value in values.items())
