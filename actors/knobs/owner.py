"""The owner's half of live knobs: held between prepare and decision, used at boundaries.

    prepare   judge everything, change nothing, hold it: one undecided change at a time, a newer one replaces it
    commit    "now" and "request" knobs are used at once, numbered ones wait for their number
    abort     forget it
    boundary  stop before a number that an undecided change might be meant for; then use what waits for it

Messages may come late, twice or out of turn: epochs order them, knob by knob, and an older value never follows a newer
one. For the loop of one actor, not thread-safe. Knows no role and no socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import BadRequest, ConfigError, DeadlineExceeded
from ...core.knobs import (
    NUMBERED,
    Boundary,
    KnobChange,
    KnobCommit,
    KnobSheet,
    KnobsInForce,
    KnobState,
    KnobValue,
    KnobVote,
    Tunable,
)
from ...core.retry import until_answered
from ...core.suggestion import suggest
from ..contracts import CoordinatorContract, KnobsContract


@dataclass(frozen=True, slots=True)
class Knob:
    """A knob and the two ways into the actor that uses it."""

    tunable: Tunable
    read: Callable[[], KnobValue]
    """The value in force. Called once when the knob is added: that is what the run file said."""
    use: Callable[[KnobValue], None]
    """Put a value into force, on the actor's loop. It was judged before and must not fail: an error fails the actor."""
    judge: Callable[[KnobValue], str] | None = None
    """A reason to refuse that only the owner knows, or nothing. Must not change anything."""
    first: KnobValue | None = None
    """The run file's value, where `read` already returns another one when the knob is added."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A committed value whose number is still to come."""

    epoch: int
    at: int
    name: str
    value: KnobValue


class KnobOwner:
    """See the module's head."""

    def __init__(
        self,
        owner: str,
        knobs: Sequence[Knob],
        *,
        last_boundary: Callable[[], int],
        clock: Clock,
        telemetry: TelemetryBuffer | None = None,
    ) -> None:
        """`last_boundary`: number of the boundary that was passed last (version trained from), -1 before the first.
        `telemetry`: gets an event "knob-in-force" for every value that is put into force."""
        self.owner = owner
        self.epoch = 0
        """Newest change that is in force here with all its values; to be stamped into samples, metrics, checkpoints."""
        self._last_boundary = last_boundary
        self._clock = clock
        self._telemetry = telemetry
        self._knobs: dict[str, Knob] = {}
        self._first: dict[str, KnobValue] = {}
        self._prepared: KnobChange | None = None
        self._earliest = 0
        self._decided = 0
        """Newest epoch that was committed or aborted here: a prepare that comes after that is too late."""
        self._used: dict[str, int] = {}
        """Knob -> epoch of its value in force."""
        self._waiting: list[_Waiting] = []
        self._passed: dict[Boundary, int] = {}
        self._news = asyncio.Event()
        self.add(knobs)

    def add(self, knobs: Iterable[Knob]) -> None:
        """More knobs of the same actor. Raises ConfigError for a name that is taken."""
        for knob in knobs:
            name = knob.tunable.name
            if name in self._knobs:
                raise ConfigError(f"{self.owner} declares the knob {name!r} twice", remedy="give one another name")
            self._knobs[name] = knob
            self._first[name] = knob.read() if knob.first is None else knob.first

    def took_up(self, epochs: Mapping[str, int]) -> None:
        """An owner that keeps its values itself restarted: knob -> epoch of the value that it restored."""
        self._used |= epochs
        self.epoch = max(self.epoch, *epochs.values(), 0)

    def sheet(self) -> KnobSheet:
        """All knobs with their present values."""
        pending = {w.name: w.value for w in sorted(self._waiting, key=lambda w: w.at)}
        states = tuple(
            KnobState(tunable=knob.tunable, value=knob.read(), first=self._first[name], pending=pending.get(name))
            for name, knob in self._knobs.items()
        )
        return KnobSheet(owner=self.owner, knobs=states, epoch=self.epoch)

    def newest(self, name: str) -> tuple[int, KnobValue]:
        """What was decided last for a knob, whether its boundary came or not, and by which change; 0: the run file."""
        if waiting := [w for w in self._waiting if w.name == name]:
            last = max(waiting, key=lambda w: w.epoch)
            return last.epoch, last.value
        return self._used.get(name, 0), self._knobs[name].read()

    # -- the change

    def prepare(self, change: KnobChange) -> KnobVote:
        """Judge all values; hold them if all are good. Names every bad one."""
        if change.epoch <= self._decided:
            reason = f"change {change.epoch} comes late: change {self._decided} was decided already"
            return KnobVote(owner=self.owner, accepted=False, reason=reason)
        complaints = [c for name, value in change.values.items() if (c := self._judge(name, value, change.force))]
        if complaints:
            return KnobVote(owner=self.owner, accepted=False, reason="; ".join(complaints))
        self._prepared = change
        self._earliest = self._earliest_of(change.values)
        self._ring()
        return KnobVote(owner=self.owner, accepted=True, earliest=self._earliest)

    def commit(self, commit: KnobCommit) -> None:
        """Use the values, now or at their number. Nothing happens for values that a newer change has overtaken.

        Raises BadRequest, before anything is changed, for a value that no vote of this actor would have accepted.
        """
        values = {name: self._fitting(name, value) for name, value in commit.values.items()}
        for name, value in values.items():
            self._take(_Waiting(commit.epoch, commit.at, name, value))
        self._settle(commit.epoch)
        self._count_in(commit.epoch)

    def take_over(self, commits: Iterable[KnobCommit]) -> None:
        """What was decided before this incarnation began, oldest first; knobs of other owners may be among it."""
        for commit in commits:
            values = {name: value for name, value in commit.values.items() if name in self._knobs}
            if values:
                self.commit(KnobCommit(epoch=commit.epoch, at=commit.at, values=values))

    def abort(self, epoch: int) -> None:
        """Forget the change of that epoch, if it is held here or still on its way."""
        self._settle(epoch)

    async def pass_boundary(self, boundary: Boundary, number: int, timeout_s: float) -> dict[str, KnobValue]:
        """Called before the actor passes `number` at `boundary`; returns what was put into force for it.

        Waits while a change is held that might be meant for this number. Raises DeadlineExceeded, naming the
        coordinator, when that is not decided within `timeout_s`. Passing a number again changes nothing.
        """
        deadline_s: float | None = None
        while self.holds(boundary, number):
            now_s = self._clock.monotonic()
            deadline_s = now_s + timeout_s if deadline_s is None else deadline_s
            await self._await_news(deadline_s - now_s, f"{boundary} {number}", timeout_s)
        self._passed[boundary] = max(number, self._passed.get(boundary, number))
        return self._use_waiting(boundary, number) if self._waiting else {}

    def holds(self, boundary: Boundary, number: int) -> bool:
        """Whether an undecided change might be meant for that number, so that it must not be passed yet."""
        held = self._prepared
        if held is None or self._earliest > number:
            return False
        return any(self._knobs[name].tunable.boundary == boundary for name in held.values)

    # -- judging

    def _judge(self, name: str, value: KnobValue, force: bool) -> str:
        knob = self._knobs.get(name)
        if knob is None:
            return f"{self.owner} has no knob {name!r}; {suggest(name, self._knobs)}"
        try:
            checked = knob.tunable.check(value, first=self._first[name], force=force)
        except ConfigError as error:
            return str(error)
        return knob.judge(checked) if knob.judge is not None else ""

    def _fitting(self, name: str, value: KnobValue) -> KnobValue:
        knob = self._knobs.get(name)
        if knob is None:
            raise BadRequest(f"{self.owner} has no knob {name!r}", remedy="commit only what an owner has prepared")
        try:
            return knob.tunable.check(value, first=self._first[name], force=True)
        except ConfigError as error:
            raise BadRequest(f"{self.owner}: {error.message}", remedy=error.remedy) from error

    def _earliest_of(self, names: Iterable[str]) -> int:
        boundaries = {self._knobs[name].tunable.boundary for name in names}
        passed = [self._passed.get(boundary, -1) for boundary in boundaries if boundary in NUMBERED]
        return max(self._last_boundary(), *passed) + 1 if passed else 0

    # -- using

    def _take(self, new: _Waiting) -> None:
        """Put a committed value into force or into its place in the queue, unless a newer one overtook it."""
        if new.epoch <= self._used.get(new.name, 0):
            return
        mine = [w for w in self._waiting if w.name == new.name]
        if any(w.epoch >= new.epoch and w.at <= new.at for w in mine):
            return
        overtaken = {w for w in mine if w.epoch <= new.epoch and w.at >= new.at}
        boundary = self._knobs[new.name].tunable.boundary
        is_due = boundary not in NUMBERED or new.at <= max(self._last_boundary(), self._passed.get(boundary, -1))
        if is_due:
            overtaken.update(w for w in mine if w.epoch < new.epoch)
        self._waiting = [w for w in self._waiting if w not in overtaken]
        if is_due:
            self._use(new)
        else:
            self._waiting.append(new)

    def _use_waiting(self, boundary: Boundary, number: int) -> dict[str, KnobValue]:
        due = [w for w in self._waiting if w.at <= number and self._knobs[w.name].tunable.boundary == boundary]
        if not due:
            return {}
        self._waiting = [w for w in self._waiting if w not in due]
        for waiting in sorted(due, key=lambda w: w.epoch):
            self._use(waiting)
        for epoch in sorted({w.epoch for w in due}):
            self._count_in(epoch)
        return {w.name: self._knobs[w.name].read() for w in due}

    def _use(self, new: _Waiting) -> None:
        knob = self._knobs[new.name]
        old = knob.read()
        knob.use(new.value)
        self._used[new.name] = new.epoch
        if self._telemetry is not None:
            at = new.at if knob.tunable.boundary in NUMBERED else 0
            self._telemetry.event(
                "knob-in-force",
                f"{self.owner}: {new.name} = {new.value} (was {old}), change {new.epoch}",
                name=new.name,
                owner=self.owner,
                old=old,
                new=new.value,
                epoch=new.epoch,
                at=at,
            )

    def _count_in(self, epoch: int) -> None:
        if not any(w.epoch == epoch for w in self._waiting):
            self.epoch = max(self.epoch, epoch)

    # -- holding

    def _settle(self, epoch: int) -> None:
        """The change of `epoch` is decided, and so is every older one."""
        self._decided = max(self._decided, epoch)
        if self._prepared is not None and self._prepared.epoch <= epoch:
            self._prepared = None
            self._ring()

    def _ring(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _await_news(self, left_s: float, what: str, timeout_s: float) -> None:
        epoch = self._prepared.epoch if self._prepared is not None else 0
        try:
            async with asyncio.timeout(left_s):
                await self._news.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the coordinator did not decide change {epoch} of the knobs within {timeout_s:g} s, "
                f"and {self.owner} may not pass {what} before that",
                remedy="see the coordinator's log; it is dead, stuck or unreachable",
            ) from error


class OwnsKnobs(KnobsContract):
    """The four handlers, for roles that have a `KnobOwner`. Name it before the role's contract among the bases, and set
    `knob_owner` in `__init__` or `on_start`."""

    knob_owner: KnobOwner

    async def knobs(self) -> KnobSheet:
        return self.knob_owner.sheet()

    async def prepare_knobs(self, change: KnobChange) -> KnobVote:
        return self.knob_owner.prepare(change)

    async def commit_knobs(self, commit: KnobCommit) -> None:
        self.knob_owner.commit(commit)

    async def abort_knobs(self, epoch: int) -> None:
        self.knob_owner.abort(epoch)


JOIN_GIVE_UP_S = 60.0


async def catch_up(ctx: ActorContext, owner: KnobOwner) -> KnobsInForce:
    """Bring `owner` to what the coordinator decided so far; returns what there is beside values.

    Called in `on_start`, before the first message. Without a coordinator, as at the start of a run, nothing was decided
    yet, and there is no wait: it gives everybody that registers what it decides. Raises CallError when one is
    registered and does not answer, BadRequest for a value that the owner could never have agreed to.
    """
    if "coordinator" not in ctx.peers("coordinator"):
        return KnobsInForce()
    coordinator = ctx.ref(CoordinatorContract, "coordinator")
    known = await until_answered(
        lambda: coordinator.knobs_in_force(ctx.name),
        who="coordinator",
        clock=ctx.clock,
        log=ctx.log,
        give_up_s=JOIN_GIVE_UP_S,
    )
    owner.take_over(known.commits)
    return known
