"""The coordinator's half of live knobs: one change at a time, recorded, sent to all owners, reverted when it is due.

    request -> owners and their values -> plan -> prepare -> journal, then audit log -> commit

`KnobConductor` runs the changes. A change that has begun runs to its end, even if its caller has died. Owners that join
receive what is in force before their first work, and wait while a change is undecided.

`DecisionLog` makes decisions durable. The number of a change is in the journal before any owner hears of it, so it is
never used twice. A decision that is in the journal is valid; if the audit log lacks it, the next incarnation adds it. A
change that an earlier incarnation had not decided is void.

`restore` puts the values of a checkpoint in force before a resumed run's first work: one change for each target, the
widest first. A value that was changed in the run file since wins over the checkpoint's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.clock import Clock
from ...core.errors import CallError, ConfigError, LaunchError, LedgerError, MyxaError
from ...core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    KnobCommit,
    KnobTable,
    KnobValue,
    LiveKnob,
    LiveKnobs,
    Operator,
)
from ..contracts import KnobsContract
from .audit import AuditWriter
from .journal import CoordinatorJournal, KnobsKept
from .knob_change import AUTO, ChangeMachine, Delivered, Gone, KnobOrder, pairs
from .knob_decisions import Decisions, Expiries, Expiry
from .knob_messenger import KnobMessenger
from .knob_plan import MANY, ChangePlan, OwnerStates, breadth, fits, plan_change, plan_restored


class DecisionLog:
    """See the module's head."""

    def __init__(
        self, audit: AuditWriter, journal: CoordinatorJournal, clock: Clock, fail: Callable[[BaseException], None]
    ) -> None:
        """`fail`: ends this incarnation of the coordinator."""
        self.decisions = Decisions()
        self.expiries = Expiries()
        self.void = 0
        """Changes up to this epoch that are not in `decisions` are void: owners that an earlier incarnation asked
        learn that. 0: there was none."""
        self._audit = audit
        self._journal = journal
        self._clock = clock
        self._fail = fail
        self._asked = 0
        """Newest epoch that owners were asked about; those of aborted changes are not used again."""
        self._undecided = ""
        self._record: AuditRecord | None = None

    # -- one change

    async def ask(self, words: str) -> int:
        """The epoch of a change that owners are about to be asked for. Raises LedgerError."""
        self._asked += 1
        self._undecided = words
        try:
            await self._journal.keep()
        except MyxaError:
            self._undecided = ""
            raise
        return self._asked

    async def decide(self, order: KnobOrder, plan: ChangePlan, epoch: int, at: int, version: int) -> AuditRecord:
        """The point of no return: from here on the change is made, whichever process dies. `version`: the run's.
        Raises MyxaError when the decision could not be made durable; then it is not made."""
        before = self.kept()
        record = self._audit.stamp(order.done(plan, epoch, at))
        self._enter(order, plan, epoch, at, version)
        self._undecided, self._record = "", record
        try:
            await self._journal.keep()
        except MyxaError:
            self._take(before)
            raise
        try:
            return await self._audit.append(record)
        except MyxaError:
            self._take(before)
            await self._take_back()
            raise

    async def _take_back(self) -> None:
        """The journal has a decision that is none. While it has, this incarnation must not say so: the next one would
        say otherwise."""
        try:
            await self._journal.until_kept()
        except MyxaError as error:
            self._fail(error)
            raise

    async def give_up(self) -> None:
        """The change that owners were asked for is not made. Raises LedgerError; then the next incarnation will say
        that it was not decided, which is true."""
        self._undecided = ""
        await self._journal.keep()

    def _enter(self, order: KnobOrder, plan: ChangePlan, epoch: int, at: int, version: int) -> None:
        is_restored = order.verb == "resume"
        decided = self.decisions.decide(epoch, at, version, plan, undoes=order.undoes, is_restored=is_restored)
        for ended in self.expiries.ended_by(plan):
            self.decisions.lapse(ended.epoch, ended.names)
        now_s = self._clock.monotonic()
        self.expiries.add(decided, for_steps=order.for_steps, for_s=order.for_s, version=version, now_s=now_s)

    def continue_from(self, epoch: int) -> None:
        """A resumed run counts on from the newest epoch that its checkpoint or its groups carry."""
        self._asked = max(self._asked, epoch)
        self.decisions.continue_from(epoch)

    async def until_disk(self) -> None:
        """Until the journal can be written. Raises LedgerError if it is not the disk that is in its way."""
        await self._journal.until_kept()

    # -- from one incarnation to the next

    def kept(self) -> KnobsKept:
        """For the journal."""
        return KnobsKept(
            asked=self._asked,
            undecided=self._undecided,
            epoch=self.decisions.epoch,
            past=self.decisions.past(),
            live=self.decisions.live().knobs,
            reverts=self.expiries.kept(self._ahead_s()),
            record=self._record,
        )

    def _take(self, kept: KnobsKept) -> None:
        self._asked, self._undecided, self._record = kept.asked, kept.undecided, kept.record
        self.decisions.restore(kept.epoch, kept.past, kept.live)
        self.expiries.restore(kept.reverts, self._ahead_s())

    def take_up(self, kept: KnobsKept) -> str:
        """Continue from what an earlier incarnation kept; returns in words what it had not decided."""
        self._take(kept)
        self._undecided = ""
        self.void = kept.asked
        return kept.undecided and f"change {kept.asked} ({kept.undecided})"

    async def complete_audit(self) -> bool:
        """Have the newest decision in the audit log; returns whether it was missing there. Raises as `AuditWriter`."""
        return self._record is not None and await self._audit.complete(self._record)

    def _ahead_s(self) -> float:
        return self._clock.wall() - self._clock.monotonic()


TURN_S = 20.0
"""How long a request waits for the change before it."""
CONFIRM_S = 10.0
"""How long a reply waits until all owners confirmed; after that it says who has not."""
DECIDED_RETRY_S = 1.0
MAX_RETRIES = 60

Planner = Callable[[], Awaitable[tuple[KnobOrder, ChangePlan]]]


class KnobConductor:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        audit: AuditWriter,
        journal: CoordinatorJournal,
        telemetry: TelemetryBuffer,
        clock: Clock,
        *,
        own: KnobsContract,
        engines: Collection[str],
        version: Callable[[], int],
        on_broken: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`own`: the coordinator as an owner of knobs. `engines`: the rollout actors that reported in, as they change.
        `version`: the run's version now. `on_broken`: called with name and reason of an owner that could not use what
        it had agreed to."""
        self._ctx = ctx
        self._version = version
        self._on_broken = on_broken
        self._audit = audit
        self._telemetry = telemetry
        self._clock = clock
        self._messenger = KnobMessenger(ctx, own, engines)
        self._book = DecisionLog(audit, journal, clock, ctx.fail)
        self._turn = asyncio.Lock()
        self._is_attached = asyncio.Event()
        """Whether owners that an earlier incarnation knew have reported in, or had the time to."""
        self._is_decided = asyncio.Event()
        """Cleared while it is open whether a change is made, and for whom."""
        self._is_decided.set()
        self._unconfirmed: set[str] = set()
        """Owners that have not heard yet how the change before ended."""
        self._news = asyncio.Event()

    # -- start and end

    def kept(self) -> KnobsKept:
        """For the journal."""
        return self._book.kept()

    def take_up(self, kept: KnobsKept) -> None:
        """Continue from what an earlier incarnation kept; `joined` brings it to the owners, this actor included."""
        if void := self._book.take_up(kept):
            self._tell("knob-void", f"{void} was not decided when the coordinator ended: it is void")

    def begin(self) -> None:
        """Changes may be made, and go back by themselves, from here on."""
        self._is_attached.set()
        self._ctx.spawn(self._complete_audit(), name="knobs-audit")
        self._ctx.spawn(self._expire_forever(), name="knobs-expire")

    async def _complete_audit(self) -> None:
        try:
            if await self._book.complete_audit():
                self._tell("audit-completed", "the newest decision about knobs was written into the audit log late")
        except MyxaError as error:
            self._tell("audit-incomplete", f"the newest decision about knobs may be missing in the audit log: {error}")

    def rewound(self, old_version: int, version: int) -> None:
        """The trainer was thrown back: what was in force by the older number stays in force."""
        self._book.decisions.rewound(old_version, version)

    # -- asked by operators

    async def change(self, request: ChangeRequest) -> ChangeReply:
        """All or none. A refusal is an answer, not an error."""
        order = KnobOrder.of(request)

        async def plan() -> tuple[KnobOrder, ChangePlan]:
            planned = plan_change(request, await self.roster(request.target))
            self._book.expiries.check(planned, self._clock.monotonic())
            return order, planned

        return await self.make(order, plan)

    async def undo(self, who: Operator, reason: str, epoch: int) -> ChangeReply:
        """Take a change back; 0: the newest."""
        return await self._undo(KnobOrder("undo", who, reason, {"epoch": epoch}), epoch)

    async def table(self) -> KnobTable:
        """All knobs of all owners."""
        roster = await self.roster()
        return KnobTable(
            sheets=tuple(roster.sheets),
            epoch=self._book.decisions.epoch,
            reverts=self._book.expiries.words(self._clock.monotonic()),
            silent=tuple(f"{name}: {why}" for name, why in roster.silent.items()),
        )

    async def roster(self, target: str = "") -> OwnerStates:
        """All owners that fit the target, with their knobs."""
        return await self._messenger.roster(target)

    # -- asked by actors

    async def until_decided(self) -> None:
        """While it is open whether a change is made: half a minute at most."""
        await self._is_decided.wait()

    def live(self) -> LiveKnobs:
        """For a checkpoint."""
        return self._book.decisions.live()

    def commits_for(self, owner: str) -> tuple[KnobCommit, ...]:
        """What an owner that starts must use."""
        return self._book.decisions.commits_for(owner)

    def newest(self, name: str, default: KnobValue) -> KnobValue:
        """What was decided last for a knob with one owner."""
        return self._book.decisions.newest(name, default)

    async def joined(self, owner: str) -> None:
        """An owner (re)started: once this returns, it uses what is in force or is gone again. Raises CallError when it
        does not."""
        commits = self._book.decisions.commits_for(owner)
        if not commits and not self._book.void:
            return
        outcome = await self._messenger.bring_up_to_date(owner, commits, self._book.void)
        if isinstance(outcome, Delivered):
            if commits:
                self._tell("knobs-joined", f"{owner} uses what is in force by change {commits[-1].epoch}", owner=owner)
        elif not isinstance(outcome, Gone):
            raise CallError(f"{owner} could not be given the knobs in force: {outcome.why}", remedy="see its log")

    def continue_from(self, epoch: int) -> None:
        """A resumed run counts on from the newest epoch that its checkpoint or its groups carry."""
        self._book.continue_from(epoch)

    def version_made(self, old_version: int, version: int) -> bool:
        """The run came to another version: something may be due. Returns whether a numbered value came into force."""
        self._news.set()
        return self._book.decisions.has_due(old_version, version)

    # -- one change

    async def make(self, order: KnobOrder, plan: Planner, *, is_recorded: bool = True) -> ChangeReply:
        """Make a change once the one before it is through. `is_recorded`: a refusal goes into the audit log."""
        task = self._ctx.spawn(self._in_turn(order, plan, is_recorded=is_recorded), name=f"knobs-{order.verb}")
        return await asyncio.shield(task)

    async def _in_turn(self, order: KnobOrder, plan: Planner, *, is_recorded: bool) -> ChangeReply:
        try:
            async with asyncio.timeout(TURN_S):
                await self._is_attached.wait()
                await self._turn.acquire()
        except TimeoutError:
            return _refusal(f"another change, or a restart, has been under way for {TURN_S:g} s; ask again")
        self._is_decided.clear()
        try:
            order, planned = await plan()
            if planned.moves or order.verb == "resume":
                reply = await self._carry_out(order, planned)
            else:
                reply = ChangeReply(epoch=0, at=0, moves=(), warnings=self._nothing_to_change(order))
        except ConfigError as error:
            reply = _refusal(str(error))
        except LedgerError as error:
            reply = _refusal(f"it could not be recorded: {error}")
        finally:
            self._is_decided.set()
            self._turn.release()
        if reply.refused and is_recorded and not order.options.dry_run:
            await self._record_refusal(order, reply.refused)
        return reply

    def _nothing_to_change(self, order: KnobOrder) -> tuple[str, ...]:
        """The warnings. A value that was requested again still reverts; the operator may expect it to stay."""
        due = self._book.expiries.words(self._clock.monotonic())
        named: Mapping[str, KnobValue] = order.arguments.get("values", {})
        back = (
            f"{name} still goes back {due[name]}: `myxa undo` it, then set it again" for name in named if name in due
        )
        return ("nothing to change: these are the values", *back)

    async def _carry_out(self, order: KnobOrder, plan: ChangePlan) -> ChangeReply:
        if late := self._unconfirmed.intersection(plan.values):
            raise ConfigError(f"{', '.join(sorted(late))} has not confirmed the change before", remedy="see its log")
        options = order.options if plan.numbered else replace(order.options, not_before=0)
        if not plan.values:
            return await self._hold(order, plan, options.not_before)
        epoch = await self._book.ask(f"{order.verb} {pairs(plan.common)}")
        machine = ChangeMachine(epoch, plan.values, options)
        is_through = asyncio.Event()

        async def record(at: int) -> None:
            await self._decide(order, plan, machine.epoch, at)

        async def run() -> None:
            self._unconfirmed.update(plan.values)
            await self._messenger.carry_out(machine, record, on_decided=self._is_decided.set)
            self._unconfirmed.difference_update(plan.values)
            is_through.set()
            if not machine.is_committed:
                await self._give_up()
            await self._mind_absent(order, machine)

        self._ctx.spawn(run(), name=f"knobs-{machine.epoch}")
        warnings = await self._until_confirmed(is_through, machine)
        at = machine.at if plan.numbered else 0
        if machine.is_committed:
            return ChangeReply(epoch=machine.epoch, at=at, moves=plan.moves, warnings=warnings)
        return ChangeReply(epoch=0, at=at, moves=plan.moves, refused=machine.reason, warnings=warnings)

    async def _give_up(self) -> None:
        try:
            await self._book.give_up()
        except MyxaError:
            self._ctx.log.exception("that a change of knobs is not made was not kept")

    async def _hold(self, order: KnobOrder, plan: ChangePlan, at: int) -> ChangeReply:
        """A change without a present owner: it is for owners that join."""
        epoch = await self._book.ask(f"{order.verb} {pairs(plan.common)}")
        try:
            await self._decide(order, plan, epoch, at)
        except MyxaError as error:
            return _refusal(f"it could not be recorded: {error}")
        return ChangeReply(epoch=epoch, at=at, moves=())

    async def _decide(self, order: KnobOrder, plan: ChangePlan, epoch: int, at: int) -> None:
        record = await self._book.decide(order, plan, epoch, at, self._version())
        self._news.set()
        self._tell_moves(order, record)

    async def _until_confirmed(self, is_through: asyncio.Event, machine: ChangeMachine) -> tuple[str, ...]:
        """Until every owner knows; what a person should know of it."""
        await self._is_decided.wait()
        said = tuple(f"{name}: {remark}" for name, remark in machine.remarks.items())
        try:
            async with asyncio.timeout(CONFIRM_S):
                await is_through.wait()
        except TimeoutError:
            names = ", ".join(sorted(machine.open))
            return (*said, f"not confirmed within {CONFIRM_S:g} s by {names}: sent again until it is")
        gone = [f"{name} died meanwhile ({why}); who takes its place uses it" for name, why in machine.gone.items()]
        return (*said, *gone, *(f"{name} failed to use it: {why}" for name, why in machine.failed.items()))

    async def _mind_absent(self, order: KnobOrder, machine: ChangeMachine) -> None:
        for name, why in machine.gone.items():
            text = f"change {machine.epoch}: {name} died before it confirmed ({why}); it gets the values when it joins"
            self._tell("knob-owner-gone", text, owner=name, epoch=machine.epoch)
        for name, why in machine.failed.items():
            self._tell("knob-not-used", f"change {machine.epoch}: {name} failed: {why}", owner=name)
            await self._on_broken(name, f"it could not use change {machine.epoch} of the knobs: {why}")

    async def _record_refusal(self, order: KnobOrder, why: str) -> None:
        self._tell("knob-refused", f"{order.verb}: {why}", user=order.who.user)
        try:
            await self._audit.write(order.refused(why))
        except MyxaError:
            self._ctx.log.exception("the refusal was not recorded")

    # -- taking back

    async def _undo(
        self,
        order: KnobOrder,
        epoch: int,
        names: Iterable[str] | None = None,
        *,
        is_recorded: bool = True,
    ) -> ChangeReply:
        async def plan() -> tuple[KnobOrder, ChangePlan]:
            undone, planned = self._book.decisions.plan_undo(epoch, await self.roster(), names)
            return replace(order, undoes=undone), planned

        return await self.make(order, plan, is_recorded=is_recorded)

    async def _expire_forever(self) -> None:
        """Changes that were made for a time go back by themselves."""
        retries: dict[Expiry, int] = {}
        while True:
            await self._until_due()
            for expiry in self._book.expiries.due(self._version(), self._clock.monotonic()):
                if await self._expire(expiry, retries.setdefault(expiry, 0)):
                    retries.pop(expiry)
                    self._book.expiries.done(expiry)
                else:
                    retries[expiry] += 1
                    self._news.set()
                    await asyncio.sleep(DECIDED_RETRY_S)

    async def _until_due(self) -> None:
        next_s = self._book.expiries.next_s()
        try:
            async with asyncio.timeout(None if next_s is None else max(next_s - self._clock.monotonic(), 0.0)):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    async def _expire(self, expiry: Expiry, num_retries: int) -> bool:
        """Whether there is nothing more to do for it."""
        with suppress(LedgerError):  # the order's own refusal is reported
            await self._book.until_disk()
        order = KnobOrder("expire", AUTO, f"change {expiry.epoch} was made for a time", {"epoch": expiry.epoch})
        order = replace(order, options=replace(order.options, force=True, not_before=expiry.not_before))
        reply = await self._undo(order, expiry.epoch, expiry.names, is_recorded=not num_retries)
        if not reply.refused:
            return True
        if num_retries >= MAX_RETRIES:
            text = f"change {expiry.epoch} does not go back: {reply.refused}"
            self._tell("knob-not-reverted", text, epoch=expiry.epoch)
            return True
        return False

    # -- telling

    def _tell_moves(self, order: KnobOrder, record: AuditRecord) -> None:
        for move in record.moves:
            self._tell(
                "knob",
                f"{move.name} = {move.new} (was {move.old}) at {move.owner}, change {record.epoch}, by {order.verb}",
                name=move.name,
                owner=move.owner,
                old=move.old,
                new=move.new,
                boundary=move.boundary,
                epoch=record.epoch,
                at=record.at,
                version=record.version,
                verb=order.verb,
                reason=order.reason,
                user=order.who.user or order.who.via,
                audit=record.number,
                digest=record.digest,
            )

    def _tell(self, kind: str, text: str, **data: object) -> None:
        self._ctx.log.info("%s: %s", kind, text)
        self._telemetry.event(kind, text, **data)


def _refusal(why: str) -> ChangeReply:
    return ChangeReply(epoch=0, at=0, moves=(), refused=why)


APPEAR_S = 5.0
"""Limit for owners to appear; a knob without an owner delays a resumed run by so much."""
ANSWER_S = 15.0
"""How long owners that are there may take to send their knobs."""
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
        """Whether the other value replaces this one everywhere."""
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
    conductor.continue_from(max([live.epoch, *known]))
    kept = [_keep(knob, roster, version) for knob in live.knobs if not _is_passed_over(knob, roster, tell)]
    for part in _changes(kept):
        await _restore_one(conductor, part, tell, is_due=part[0].due <= version)


async def _patiently(conductor: KnobConductor, is_enough: Callable[[OwnerStates], bool], wait_s: float) -> OwnerStates:
    """The knobs of all owners. Waits for those that the registry, whose news comes late, does not know yet."""
    roster = await conductor.roster()
    try:
        async with asyncio.timeout(wait_s):
            while not is_enough(roster):
                await asyncio.sleep(RETRY_S)
                roster = await conductor.roster()
    except TimeoutError:
        pass  # who is missing or silent is named for each value that it concerns
    return roster


def _is_whole(roster: OwnerStates, names: Iterable[str]) -> bool:
    """Whether all that a resumed run surely has are there and answer, and each knob has an owner."""
    there = {sheet.owner for sheet in roster.sheets}
    return not roster.silent and there.issuperset(SURE) and all(roster.states(name, "") for name in names)


def _is_answered(roster: OwnerStates) -> bool:
    return not roster.silent


def _is_passed_over(knob: LiveKnob, roster: OwnerStates, tell: Tell) -> bool:
    states = list(roster.states(knob.name, "").values())
    if not states:
        tell("knobs-not-restored", f"{knob.name} = {knob.value}: no actor of this run has such a knob")
        return True
    if states[0].first != knob.first:
        tell("knobs-not-restored", f"{knob.name} = {knob.value}: the run file was changed since ({states[0].first})")
        return True
    return False


def _keep(knob: LiveKnob, roster: OwnerStates, version: int) -> _Kept:
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
    order = KnobOrder.of(request, verb="resume")
    absent = False

    async def plan() -> tuple[KnobOrder, ChangePlan]:
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
