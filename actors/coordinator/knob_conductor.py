"""The coordinator's half of live knobs: one change at a time, decided, recorded, used by its owners.

    request -> draft -> run file and owners judge -> audit log (decided) -> owners hear of it, ask, use it

A decision that is in the audit log is made, whichever process dies. Values for numbered boundaries are decided for the
first number that no owner has passed: an owner that asks before it passes one waits while a change is undecided.
Changes for a time go back by a change of their own. `restore` decides the values of a checkpoint again, in one change,
before a resumed run's first work; a value that was changed in the run file since wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec

from ...core.errors import ConfigError, LaunchError, LedgerError, MyxaError, NoSuchActor, PeerDied, RemoteError
from ...core.ids import LEADER
from ...core.knobs import (
    AuditRecord,
    ChangeReply,
    ChangeRequest,
    Decision,
    KnobSheet,
    KnobTable,
    KnobValue,
    KnobVerdict,
    LiveKnob,
    LiveKnobs,
    Operator,
)
from ...core.timeouts import TIMEOUTS
from ..contracts import KnobsContract
from .knob_decisions import RESTORE, ChangeDraft, Decisions, Due, OwnerStates, draft_change
from .run_state import RunContext

AUTO = Operator(via="auto")
"""No operator: an expiry, a resumed run."""
TELL_TRIES = 4
"""How often an owner may fail to use what was decided."""

NOT_ARGUMENTS = ("who", "reason", "dry_run")
"""Fields of a request that the audit log has elsewhere, or never."""


LENGTHS = frozenset({"num_steps", "epochs", "minibatches", "decay_steps", "min_lr_ratio"})
"""Knobs of the trainer by which updates come after the end of a schedule."""


@dataclass(frozen=True, slots=True)
class Order:
    """A change that is to be made."""

    verb: str
    request: ChangeRequest
    drafter: Callable[[OwnerStates], ChangeDraft]
    """Says what it is, or raises ConfigError."""
    arguments: Mapping[str, object]
    at: int = 0
    """The very number that it is for; 0: the first possible one."""
    is_recorded: bool = True
    """Whether a refusal goes into the audit log."""
    roster: OwnerStates | None = None
    """Instead of asking all owners, one of which may be slow."""

    def record(self, result: str, **more: Any) -> AuditRecord:
        return AuditRecord(
            number=0, wall_s=0.0, verb=self.verb, who=self.request.who, arguments=dict(self.arguments), result=result,
            reason=self.request.reason, **more,
        )  # fmt: skip


@dataclass(eq=False)
class KnobConductor:
    """See the module's head."""

    run: RunContext
    _: KW_ONLY
    own: KnobsContract
    """The coordinator as an owner of knobs."""
    engines: Collection[str]
    """The rollout actors that reported in, as they change; others get what was decided when they report in."""
    on_broken: Callable[[str, str], Awaitable[None]]
    """Called with name and reason of an owner that could not use what was decided."""
    on_decided: Callable[[], None]
    """Called when a change is made."""

    def __post_init__(self) -> None:
        run = self.run
        self.decisions = Decisions(run.options.launch)
        self._ctx, self._clock, self._tell, self._version = run.ctx, run.clock, run.tell, run.version
        self._record, self._file = run.record, run.options.file
        self._turn = asyncio.Lock()
        self._is_attached = asyncio.Event()
        """Whether owners that an earlier incarnation knew have reported in, or had the time to."""
        self._is_decided = asyncio.Event()
        """Cleared while it is open whether a change is made."""
        self._is_decided.set()
        self._news = asyncio.Event()
        self._late: set[tuple[int, frozenset[str]]] = set()
        """Ways back that were refused, and are tried again."""

    def begin(self) -> None:
        """Changes may be made, and go back by themselves, from here on."""
        self._is_attached.set()
        self._ctx.spawn(self._expire_forever(), name="knobs-expire")

    async def change(self, request: ChangeRequest, verb: str = "set", at: int = 0) -> ChangeReply:
        """All or none. A refusal is an answer, not an error. `at`: as of an `Order`."""
        fields = msgspec.structs.asdict(request).items()
        arguments = {n: v for n, v in fields if n not in NOT_ARGUMENTS and (v or n == "values")}
        return await self.make(
            Order(verb, request, lambda roster: draft_change(request, roster, self.decisions), arguments, at)
        )

    async def undo(self, who: Operator, reason: str, epoch: int) -> ChangeReply:
        """Take a change back; 0: the newest."""
        request = ChangeRequest(values={}, who=who, reason=reason)
        return await self.make(self._undoing("undo", request, Due(epoch, frozenset())))

    async def table(self) -> KnobTable:
        roster = await self.roster()
        return KnobTable(
            sheets=tuple(roster.sheets),
            epoch=self.decisions.epoch,
            reverts=self.decisions.reverts(self._clock.wall()),
            silent=tuple(f"{name}: {why}" for name, why in roster.silent.items()),
        )

    async def roster(self) -> OwnerStates:
        """Every owner with its knobs; those that do not answer within `ask_s` are silent."""
        names = [self._ctx.name, *self._others(), *sorted(self.engines)]
        answers = await asyncio.gather(*(self._sheet(name) for name in names))
        silent = {name: answer for name, answer in zip(names, answers, strict=True) if isinstance(answer, str)}
        return OwnerStates(sheets=[answer for answer in answers if isinstance(answer, KnobSheet)], silent=silent)

    def _others(self) -> list[str]:
        """Owners that are there beside coordinator and rollout actors."""
        return [*self._ctx.peers("buffer"), *self._ctx.peers(LEADER)]

    async def _sheet(self, name: str) -> KnobSheet | str:
        try:
            async with asyncio.timeout(TIMEOUTS.coordinator.ask_s):
                return await self._ref(name).knobs()
        except TimeoutError:
            return f"no answer within {TIMEOUTS.coordinator.ask_s:g} s"
        except NoSuchActor:
            return "it is not there"
        except RemoteError as error:
            return KnobSheet(owner=name, knobs=()) if error.remote_type == "NotImplementedError" else error.message
        except MyxaError as error:
            return error.message

    def _ref(self, name: str) -> KnobsContract:
        return self.own if name == self._ctx.name else self._ctx.ref(KnobsContract, name)

    async def news(self, after: int, number: int) -> LiveKnobs:
        """The decisions after epoch `after`. `number`: of the boundary that the owner is
        about to pass, for which no more is decided after this; -1: of none."""
        if number >= 0:
            await self._is_decided.wait()
            for due in self.decisions.due(0, 0.0, number):
                await self._go_back(due)
        return self.decisions.news(after)

    async def live(self) -> LiveKnobs:
        await self._is_decided.wait()
        return self.decisions.live(self._version(), self._clock.wall())

    async def rewound(self, old_version: int, version: int) -> None:
        """The trainer was thrown back: what was in force by the older number stays in force."""
        if not self.decisions.has_due(version, old_version):
            return
        arguments: dict[str, object] = {"from": old_version, "to": version}
        record = AuditRecord(
            number=0, wall_s=self._clock.wall(), verb="rewind", who=AUTO, arguments=arguments, result="done",
            at=old_version, version=version, decision=Decision(launch=self.decisions.launch),
        )  # fmt: skip
        self.decisions.add(record)
        try:
            await self._record(record)
        except MyxaError as error:
            self._tell("audit-incomplete", f"that the trainer went back to version {version} was not recorded: {error}")

    def version_made(self, old_version: int, version: int) -> bool:
        """The run came to another version: something may be due. Returns whether a numbered value came into force."""
        self._news.set()
        return self.decisions.has_due(old_version, version)

    async def make(self, order: Order) -> ChangeReply:
        """Make a change once the one before it is decided."""
        return await asyncio.shield(self._ctx.spawn(self._in_turn(order), name=f"knobs-{order.verb}"))

    async def _in_turn(self, order: Order) -> ChangeReply:
        try:
            async with asyncio.timeout(TIMEOUTS.coordinator.turn_s):
                await self._is_attached.wait()
                await self._turn.acquire()
        except TimeoutError:
            return _refusal(
                f"another change, or a restart, has been under way for {TIMEOUTS.coordinator.turn_s:g} s; ask again"
            )
        self._is_decided.clear()
        owners: Sequence[str] = ()
        try:
            reply, owners = await self._decide(order)
        except ConfigError as error:
            reply = _refusal(str(error))
        except LedgerError as error:
            reply = _refusal(f"it could not be recorded: {error}")
        finally:
            self._is_decided.set()
            self._turn.release()
        if reply.refused and order.is_recorded and not order.request.dry_run:
            self._tell("knob-refused", f"{order.verb}: {reply.refused}", user=order.request.who.user)
            try:
                await self._record(order.record("refused", detail=reply.refused))
            except MyxaError:
                self._ctx.log.exception("the refusal was not recorded")
        return await self._until_used(reply, owners)

    async def _decide(self, order: Order) -> tuple[ChangeReply, Sequence[str]]:
        """The answer, and the owners that are to use it. Once the record is in the log, the change is made."""
        request = order.request
        roster = order.roster or await self.roster()
        draft = order.drafter(roster)
        if not draft.moves:
            return ChangeReply(epoch=0, at=0, moves=(), warnings=self._nothing_to_change(request)), ()
        not_before = request.not_before if draft.decision.numbered else 0
        at = order.at or max(draft.earliest(roster, self._version()), not_before)
        remarks = (*await self._judged(draft, at), *self._remarks(draft, at))
        reply = ChangeReply(epoch=0, at=at, moves=draft.moves, warnings=remarks)
        if request.dry_run:
            return reply, ()
        record = order.record("done", epoch=self.decisions.epoch + 1, at=at, moves=draft.moves, decision=draft.decision)
        values = {name: value for name, value in draft.decision.values.items() if value is not None}
        decided = {"values": values, "undoes": draft.decision.undoes}
        record = msgspec.structs.replace(record, arguments=record.arguments | {n: v for n, v in decided.items() if v})
        record = await self._record(record)
        self.decisions.add(record)
        self._news.set()
        self._tell_moves(record)
        self.on_decided()
        # Owners that came between the look at all owners and the decision: they asked too early to hear of it.
        for name in (*self._others(), *self._ctx.peers("rollout/")):
            if name not in draft.values:
                self._ctx.spawn(self.joined(name), name=f"knobs-for-{name}")
        return msgspec.structs.replace(reply, epoch=record.epoch), list(draft.values)

    def _nothing_to_change(self, request: ChangeRequest) -> tuple[str, ...]:
        """The warnings. A value that was requested again still reverts; the operator may expect it to stay."""
        due = self.decisions.reverts(self._clock.wall())
        back = (f"{n} still goes back {due[n]}: `myxa undo` it, then set it again" for n in request.values if n in due)
        return ("nothing to change: these are the values", *back)

    def _remarks(self, draft: ChangeDraft, at: int) -> Iterator[str]:
        """What the operator may not expect of values that are allowed."""
        decided, file = draft.decision.values, self._file
        if file is None:
            return
        num_steps = int(decided.get("num_steps") or self.decisions.latest("num_steps", file.run.num_steps))
        if 0 < num_steps <= at:
            yield f"the run ends with step {num_steps}: it does not come to {at}"
        new = file.with_values(draft.file_values)
        by_key = {tunable.key: name for name, tunable in draft.tunables.items()}
        for key, needs in new.without_effect():
            if key in by_key:
                yield f"{by_key[key]} has no effect: it {needs}"
        if not LENGTHS.isdisjoint(decided):
            end = new.optimizer.rate_is_zero_from(file.policy_updates)
            if 0 < end < new.policy_updates:
                yield f"the learning rate is 0 from update {end} of {new.policy_updates} on: set decay_steps too"

    async def _judged(self, draft: ChangeDraft, at: int) -> tuple[str, ...]:
        """What owners say that know more of their values than the run file. Raises ConfigError for a refusal."""
        if self._file is not None and (why := self._file.refusal(draft.file_values)):
            raise ConfigError(why)
        judges = draft.judges()
        answers = await asyncio.gather(*(self._verdict(owner, values, at) for owner, values in judges.items()))
        verdicts = dict(zip(judges, answers, strict=True))
        refusals = [
            verdict.refusal if owner in verdict.refusal else f"{owner}: {verdict.refusal}"
            for owner, verdict in verdicts.items()
            if verdict.refusal
        ]
        if refusals:
            raise ConfigError("; ".join(refusals))
        return tuple(f"{owner}: {verdict.remark}" for owner, verdict in verdicts.items() if verdict.remark)

    async def _verdict(self, owner: str, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        try:
            async with asyncio.timeout(TIMEOUTS.coordinator.judge_s):
                return await self._ref(owner).judge_knobs(values, at)
        except TimeoutError:
            return KnobVerdict(refusal=f"{owner} did not answer: not within {TIMEOUTS.coordinator.judge_s:g} s")
        except MyxaError as error:
            return KnobVerdict(refusal=f"{owner} did not answer: {error.message}")

    async def _until_used(self, reply: ChangeReply, owners: Sequence[str]) -> ChangeReply:
        """The reply, with what a person should know of owners that do not use it yet."""
        if not owners:
            return reply
        telling = {self._ctx.spawn(self.joined(name, 0.0), name=f"knobs-for-{name}"): name for name in owners}
        done, late = await asyncio.wait(telling, timeout=TIMEOUTS.coordinator.confirm_s)
        warnings = [task.result() for task in telling if task in done and task.result()]
        if late:
            names = ", ".join(sorted(telling[task] for task in late))
            warnings.append(
                f"not confirmed within {TIMEOUTS.coordinator.confirm_s:g} s by {names}: told again until it is"
            )
        return msgspec.structs.replace(reply, warnings=(*reply.warnings, *warnings))

    async def joined(self, owner: str, patience_s: float = TIMEOUTS.coordinator.join_s) -> str:
        """Have an owner use what was decided; told until it does or is gone. Returns what an operator should know.
        `patience_s`: for one that the registry may not know yet, or know as its former incarnation. An owner that
        answers and fails to use it is broken, since others rely on it."""
        began_s, num_failed = self._clock.monotonic(), 0
        while True:
            epoch = self.decisions.epoch
            try:
                async with asyncio.timeout(TIMEOUTS.coordinator.tell_s):
                    await self._ref(owner).knobs_decided(epoch)
            except (PeerDied, NoSuchActor) as error:
                if self._clock.monotonic() - began_s >= patience_s:
                    self._tell("knob-owner-gone", f"{owner} is gone: {error.message}", owner=owner, epoch=epoch)
                    return f"{owner} died meanwhile ({error.message}); who takes its place uses it"
            except RemoteError as error:
                if error.remote_type == "NotImplementedError":
                    return ""
                num_failed += 1
                self._tell("knob-not-used", f"{owner} could not use change {epoch}: {error.message}", owner=owner)
                if num_failed >= TELL_TRIES:
                    await self.on_broken(owner, f"it could not use change {epoch} of the knobs: {error.message}")
                    return f"{owner} failed to use it: {error.message}"
                await asyncio.sleep(TIMEOUTS.coordinator.tell_again_s)
            except (MyxaError, TimeoutError) as error:
                why = str(error) or f"no answer within {TIMEOUTS.coordinator.tell_s:g} s"
                self._ctx.log.warning("%s does not use change %d of the knobs: %s; told again", owner, epoch, why)
            else:
                return "" if epoch == self.decisions.epoch else await self.joined(owner, patience_s)
            await asyncio.sleep(TIMEOUTS.coordinator.retry_s)

    async def _expire_forever(self) -> None:
        """Changes that were made for a time go back by themselves; one that cannot is tried again every second."""
        while True:
            next_s = self.decisions.next_s()
            try:
                async with asyncio.timeout(None if next_s is None else max(next_s - self._clock.wall(), 0.0)):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            for due in self.decisions.due(self._version(), self._clock.wall()):
                if not await self._go_back(due):
                    self._news.set()
                    await asyncio.sleep(TIMEOUTS.coordinator.tell_again_s)

    async def _go_back(self, due: Due) -> bool:
        key = due.epoch, due.names
        request = ChangeRequest(values={}, who=AUTO, reason=f"change {due.epoch} was made for a time")
        reply = await self.make(self._undoing("expire", request, due, is_recorded=key not in self._late))
        (self._late.add if reply.refused else self._late.discard)(key)
        return not reply.refused

    def _undoing(self, verb: str, request: ChangeRequest, due: Due, *, is_recorded: bool = True) -> Order:
        def drafter(roster: OwnerStates) -> ChangeDraft:
            return self.decisions.draft_undo(due.epoch, roster, due.names)

        return Order(verb, request, drafter, {"epoch": due.epoch}, due.at, is_recorded=is_recorded)

    def _tell_moves(self, record: AuditRecord) -> None:
        more = {name: getattr(record, name) for name in ("epoch", "at", "version", "verb", "reason", "digest")}
        for move in record.moves:
            self._tell(
                "knob",
                f"{move.name} = {move.new} (was {move.old}) at {move.owner}, change {record.epoch}, by {record.verb}",
                **msgspec.structs.asdict(move),
                **more,
                user=record.who.user or record.who.via,
                audit=record.number,
            )


def _refusal(why: str) -> ChangeReply:
    return ChangeReply(epoch=0, at=0, moves=(), refused=why)


SURE = ("buffer", LEADER)
"""Owners that are up by then in every run."""


async def restore(
    conductor: KnobConductor, live: LiveKnobs | None, version: int, tell: Callable[[str, str], None]
) -> int:
    """`live`: what the checkpoint holds, None for a run without one; `version`: of the first step; `tell`: an event,
    its kind and text. Returns the epoch from which the run counts on. Raises LaunchError for a value that is refused.
    """
    roster = await _roster(conductor, live)
    live = live or LiveKnobs()
    conductor.decisions.continue_from(max([live.epoch, *(max(s.epoch, s.past_epoch) for s in roster.sheets)]))
    before = conductor.decisions.epoch
    changes: dict[tuple[float, int, int], dict[str, LiveKnob]] = {}
    for knob in live.knobs:
        firsts = [state.first for state in roster.states(knob.name).values()]
        if firsts and firsts[0] == knob.first:
            changes.setdefault((knob.for_s, knob.for_steps, max(knob.at, version)), {})[knob.name] = knob
        else:
            why = f"the run file was changed since ({firsts[0]})" if firsts else "no actor of this run has such a knob"
            tell("knobs-not-restored", f"{knob.name} = {knob.value}: {why}")
    for (for_s, for_steps, at), knobs in sorted(changes.items()):  # values for a time after those that they cover
        epochs = ", ".join(map(str, sorted({knob.epoch for knob in knobs.values()})))
        why = f"by change {epochs} when the checkpoint was written"
        values = {name: knob.value for name, knob in knobs.items() if knob.value is not None}
        request = ChangeRequest(values=values, who=AUTO, reason=why, force=True, for_s=for_s, for_steps=for_steps)
        reply = await conductor.change(request, RESTORE, at)
        if reply.refused:
            raise LaunchError(
                f"the checkpoint's knobs cannot be restored: {reply.refused}",
                remedy="write the value that you want into the run file: a value that was changed there wins; if it "
                "says so already, resume with the other keys as they were, and set the knob back first",
            )
        tell("knobs-restored", f"{', '.join(f'{name} = {value}' for name, value in values.items())}: {why}")
    return before


async def _roster(conductor: KnobConductor, live: LiveKnobs | None) -> OwnerStates:
    """All owners. A resumed run waits for those that the registry, whose news comes late, does not know yet."""
    roster = await conductor.roster()
    try:
        async with asyncio.timeout(TIMEOUTS.coordinator.appear_s):
            while live is not None and not (
                {sheet.owner for sheet in roster.sheets}.issuperset({*SURE, *roster.silent})
                and all(roster.states(knob.name) for knob in live.knobs)
            ):
                await asyncio.sleep(TIMEOUTS.coordinator.retry_s)
                roster = await conductor.roster()
    except TimeoutError:
        pass  # an owner that is missing or silent asks for its values when it is there
    return roster
