"""One change of knobs over several owners, as a transaction: all of them or none. Sans-IO.

    preparing   every owner is asked; one no, or one that cannot answer, aborts it for all
    deciding    all said yes: the decision is made durable before anybody hears of it
    committing  it is decided. Every owner is told until it answers, or is gone: whoever takes its place is given the
                values when it joins, before its first work
    aborting    every owner that was asked is told to forget it, until it answers or is gone
    done

What happened comes in as an event, what is to be done goes out as instructions; times are the caller's. An event that
the stage has no use for changes nothing: answers may come late or twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import ConfigError
from ...core.knobs import KnobChange, KnobCommit, KnobValue, KnobVote

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
class Failed:
    """An owner was told the decision and could not carry it out."""

    owner: str
    why: str


ChangeEvent = Voted | Unanswered | Recorded | NotRecorded | Delivered | Gone | Failed


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
    """Tell an owner until it confirms; answer with `Delivered`, `Gone` or `Failed`."""

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
        return self._told(event.owner)

    def on_gone(self, event: Gone) -> Sequence[Instruction]:
        if event.owner in self.open and self.is_committed:
            self.gone[event.owner] = event.why
        return self._told(event.owner)

    def on_failed(self, event: Failed) -> Sequence[Instruction]:
        if event.owner in self.open and self.is_committed:
            self.failed[event.owner] = event.why
        return self._told(event.owner)

    def _told(self, owner: str) -> Sequence[Instruction]:
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
    ("committing", Failed): ChangeMachine.on_failed,
    ("aborting", Delivered): ChangeMachine.on_delivered,
    ("aborting", Gone): ChangeMachine.on_gone,
    ("aborting", Failed): ChangeMachine.on_failed,
}
