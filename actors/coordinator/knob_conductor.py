"""The coordinator's half of live knobs: one change at a time, recorded, told to everybody, taken back when it is due.

    request -> who owns these knobs, how do they stand (roster) -> plan -> prepare -> record in the audit log -> commit

A change goes to its end once it has begun, whatever becomes of who asked for it. Owners that join get what is in force
before their first work, and wait while a change is undecided. Knows contracts and the audit log; what a request means,
what was decided and when it goes back is judged without IO in `knob_plan`, `knob_decisions` and `knob_expiry`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ...core.activity import TelemetryBuffer
from ...core.actor import ActorContext
from ...core.chaos import reached
from ...core.clock import Clock
from ...core.errors import CallError, ConfigError, LedgerError, MyxaError
from ...core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    KnobCommit,
    KnobTable,
    KnobValue,
    LiveKnobs,
    Operator,
)
from ..audit import AuditDesk
from ..contracts.knobs import KnobsContract
from .journal import CoordinatorJournal, KnobsKept
from .knob_book import KnobBook
from .knob_change import ChangeMachine, Delivered, Gone
from .knob_expiry import Expiry
from .knob_messenger import KnobMessenger
from .knob_order import AUTO, Order, pairs
from .knob_plan import ChangePlan, Roster, plan_change

TURN_S = 20.0
"""How long a request waits for the change before it."""
CONFIRM_S = 10.0
"""How long a reply waits until all owners confirmed; after that it says who has not."""
DECIDED_RETRY_S = 1.0
MAX_RETRIES = 60

Planner = Callable[[], Awaitable[tuple[Order, ChangePlan]]]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the conductor needs of the coordinator."""

    own: KnobsContract
    """The coordinator as an owner of knobs."""
    engines: Callable[[], Iterable[str]]
    """Rollout actors that reported in."""
    version: Callable[[], int]
    """Where the run stands."""
    on_broken: Callable[[str, str], Awaitable[None]]
    """An owner could not use what it had agreed to: name, why."""


class KnobConductor:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        around: Surroundings,
        desk: AuditDesk,
        journal: CoordinatorJournal,
        telemetry: TelemetryBuffer,
        clock: Clock,
    ) -> None:
        self._ctx = ctx
        self._around = around
        self._desk = desk
        self._telemetry = telemetry
        self._clock = clock
        self._messenger = KnobMessenger(ctx, around.own, around.engines)
        self._book = KnobBook(desk, journal, clock, ctx.fail)
        self._turn = asyncio.Lock()
        self._is_attached = asyncio.Event()
        """Whether owners that an earlier incarnation knew have reported in, or had the time to."""
        self._is_decided = asyncio.Event()
        """Cleared while it is open whether a change is made, and for whom."""
        self._is_decided.set()
        self._unconfirmed: set[str] = set()
        """Owners that have not heard yet how the change before ended."""
        self._news = asyncio.Event()

    # -- life

    def kept(self) -> KnobsKept:
        """For the journal."""
        return self._book.kept()

    def take_up(self, kept: KnobsKept) -> None:
        """Go on from what an earlier incarnation kept; owners are told by `joined`, the coordinator itself too."""
        if void := self._book.take_up(kept):
            self._tell("knob-void", f"{void} was not decided when the coordinator ended: nobody uses it")

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
        order = Order.of(request)

        async def plan() -> tuple[Order, ChangePlan]:
            return order, plan_change(request, await self.roster(request.target))

        return await self.make(order, plan)

    async def undo(self, who: Operator, reason: str, epoch: int) -> ChangeReply:
        """Take a change back; 0: the newest."""
        return await self._undo(Order("undo", who, reason, {"epoch": epoch}), epoch)

    async def table(self) -> KnobTable:
        """All knobs of all owners."""
        roster = await self.roster()
        return KnobTable(
            sheets=tuple(roster.sheets),
            epoch=self._book.decisions.epoch,
            reverts=self._book.expiries.words(self._clock.monotonic()),
            silent=tuple(f"{name}: {why}" for name, why in roster.silent.items()),
        )

    async def roster(self, target: str = "") -> Roster:
        """All owners that fit the target, and how they stand."""
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
        """An owner is there anew: it uses what is in force once this returns, or is gone again. Raises CallError when
        it does not."""
        commits = self._book.decisions.commits_for(owner)
        if not commits and not self._book.void:
            return
        outcome = await self._messenger.bring_up_to_date(owner, commits, self._book.void)
        if isinstance(outcome, Delivered):
            if commits:
                self._tell("knobs-joined", f"{owner} uses what is in force by change {commits[-1].epoch}", owner=owner)
        elif not isinstance(outcome, Gone):
            raise CallError(f"{owner} could not be given the knobs in force: {outcome.why}", remedy="see its log")

    def go_on_from(self, epoch: int) -> None:
        """A resumed run counts on from the newest epoch that its checkpoint or its groups carry."""
        self._book.go_on_from(epoch)

    def version_made(self, old_version: int, version: int) -> bool:
        """The run came to another version: something may be due. Returns whether a numbered value came into force."""
        self._news.set()
        return self._book.decisions.has_due(old_version, version)

    # -- one change

    async def make(self, order: Order, plan: Planner, *, is_recorded: bool = True) -> ChangeReply:
        """Make a change once the one before it is through. `is_recorded`: a refusal goes into the audit log."""
        task = self._ctx.spawn(self._in_turn(order, plan, is_recorded=is_recorded), name=f"knobs-{order.verb}")
        return await asyncio.shield(task)

    async def _in_turn(self, order: Order, plan: Planner, *, is_recorded: bool) -> ChangeReply:
        try:
            async with asyncio.timeout(TURN_S):
                await self._is_attached.wait()
                await self._turn.acquire()
        except TimeoutError:
            return _refusal(f"another change, or a restart, has been under way for {TURN_S:g} s; ask again")
        self._is_decided.clear()
        try:
            order, planned = await plan()
            if planned.moves or order.verb == "resume" or (planned.common and not planned.values):
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

    def _nothing_to_change(self, order: Order) -> tuple[str, ...]:
        """Also that a value which is asked for anew still goes back: whoever asks may believe that it stays."""
        due = self._book.expiries.words(self._clock.monotonic())
        named: Mapping[str, KnobValue] = order.arguments.get("values", {})
        back = (
            f"{name} still goes back {due[name]}: `myxa undo` it, then set it anew" for name in named if name in due
        )
        return ("nothing to change: these are the values", *back)

    async def _carry_out(self, order: Order, plan: ChangePlan) -> ChangeReply:
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

    async def _hold(self, order: Order, plan: ChangePlan, at: int) -> ChangeReply:
        """A change that concerns nobody who is there: it is for those that join."""
        epoch = await self._book.ask(f"{order.verb} {pairs(plan.common)}")
        try:
            await self._decide(order, plan, epoch, at)
        except MyxaError as error:
            return _refusal(f"it could not be recorded: {error}")
        return ChangeReply(epoch=epoch, at=at, moves=())

    async def _decide(self, order: Order, plan: ChangePlan, epoch: int, at: int) -> None:
        record = await self._book.decide(order, plan, epoch, at, self._around.version())
        reached("coordinator.knobs_decided")
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
            return (*said, f"not confirmed within {CONFIRM_S:g} s by {names}: told again until it is")
        gone = [f"{name} died meanwhile ({why}); who takes its place uses it" for name, why in machine.gone.items()]
        return (*said, *gone, *(f"{name} failed to use it: {why}" for name, why in machine.failed.items()))

    async def _mind_absent(self, order: Order, machine: ChangeMachine) -> None:
        for name, why in machine.gone.items():
            text = f"change {machine.epoch}: {name} died before it confirmed ({why}); it gets the values when it joins"
            self._tell("knob-owner-gone", text, owner=name, epoch=machine.epoch)
        for name, why in machine.failed.items():
            self._tell("knob-not-used", f"change {machine.epoch}: {name} failed: {why}", owner=name)
            await self._around.on_broken(name, f"it could not use change {machine.epoch} of the knobs: {why}")

    async def _record_refusal(self, order: Order, why: str) -> None:
        self._tell("knob-refused", f"{order.verb}: {why}", user=order.who.user)
        try:
            await self._desk.write(order.refused(why))
        except MyxaError:
            self._ctx.log.exception("the refusal was not recorded")

    # -- taking back

    async def _undo(
        self,
        order: Order,
        epoch: int,
        names: Iterable[str] | None = None,
        spared: Collection[str] = (),
        *,
        is_recorded: bool = True,
    ) -> ChangeReply:
        async def plan() -> tuple[Order, ChangePlan]:
            undone, planned = self._book.decisions.plan_undo(epoch, await self.roster(), names, spared)
            return replace(order, undoes=undone), planned

        return await self.make(order, plan, is_recorded=is_recorded)

    async def _expire_forever(self) -> None:
        """Changes that were made for a time go back by themselves."""
        retries: dict[Expiry, int] = {}
        while True:
            await self._until_due()
            for expiry in self._book.expiries.due(self._around.version(), self._clock.monotonic()):
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
        if expiry.is_overtaken:
            self._book.decisions.lapse(expiry.epoch, expiry.names)
            return True
        with suppress(LedgerError):  # told with the order's own refusal
            await self._book.until_disk()
        order = Order("expire", AUTO, f"change {expiry.epoch} was made for a time", {"epoch": expiry.epoch})
        order = replace(order, options=replace(order.options, force=True, not_before=expiry.not_before))
        reply = await self._undo(order, expiry.epoch, expiry.names, expiry.spared, is_recorded=not num_retries)
        if not reply.refused:
            self._book.decisions.lapse(expiry.epoch, expiry.names)
            return True
        if num_retries >= MAX_RETRIES:
            text = f"change {expiry.epoch} does not go back: {reply.refused}"
            self._tell("knob-not-reverted", text, epoch=expiry.epoch)
            return True
        return False

    # -- telling

    def _tell_moves(self, order: Order, record: AuditRecord) -> None:
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
