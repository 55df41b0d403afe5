"""Sends a change of knobs to its owners, collects their answers, and asks owners for their knobs.

A vote is asked for once; a decision is sent until the owner confirms it or its incarnation is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from ...core.actor import ActorContext
from ...core.errors import CallError, NoSuchActor, PeerDied, RemoteError
from ...core.knobs import KnobCommit, KnobSheet, KnobVote
from ..contracts import KnobsContract
from .knob_change import (
    Abort,
    ChangeEvent,
    ChangeMachine,
    Commit,
    Delivered,
    Gone,
    Instruction,
    NotRecorded,
    OwnerFailed,
    Prepare,
    RecordDecision,
    Recorded,
    Unanswered,
    Voted,
)
from .knob_plan import OwnerStates, fits

ASK_S = 5.0
PREPARE_S = 10.0
TELL_S = 5.0
JOIN_S = 15.0
"""How long who has joined may be out of reach; less than `rollout_ready` has."""
RETRY_S = 0.2
ALONE = ("buffer", "monitor")
"""Owners that there is one of."""


class KnobMessenger:
    """See the module's head."""

    def __init__(self, ctx: ActorContext, own: KnobsContract, engines: Collection[str]) -> None:
        """`own`: the coordinator itself, an owner too. `engines`: rollout actors that are ready; those that still load
        their model are given what is in force when they report in."""
        self._ctx = ctx
        self._own = own
        self._engines = engines

    # -- who there is

    async def roster(self, target: str = "") -> OwnerStates:
        """Every owner that fits the target, with its knobs; those that do not answer within `ASK_S` are silent."""
        names = [name for name in self._owners() if not target or fits(name, target) or fits(name, f"{target}/*")]
        names = names or self._owners()  # no owner fits: all of them, for a suggestion
        answers = await asyncio.gather(*(self._ask(name) for name in names))
        silent = {name: a for name, a in zip(names, answers, strict=True) if isinstance(a, str)}
        return OwnerStates(sheets=[a for a in answers if isinstance(a, KnobSheet)], silent=silent)

    def _owners(self) -> list[str]:
        there = [name for name in ALONE if name in self._ctx.peers(name)]
        return [self._ctx.name, *there, *self._ctx.peers("trainer/"), *sorted(self._engines)]

    def _ref(self, name: str) -> KnobsContract:
        return self._own if name == self._ctx.name else self._ctx.ref(KnobsContract, name)

    async def _ask(self, name: str) -> KnobSheet | str:
        """Its sheet, or why there is none."""
        try:
            async with asyncio.timeout(ASK_S):
                return await self._ref(name).knobs()
        except TimeoutError:
            return f"no answer within {ASK_S:g} s"
        except NoSuchActor:
            return "it is not there"
        except RemoteError as error:
            return KnobSheet(owner=name, knobs=()) if error.remote_type == "NotImplementedError" else error.message
        except CallError as error:
            return error.message

    # -- a change

    async def carry_out(
        self,
        machine: ChangeMachine,
        record: Callable[[int], Awaitable[None]],
        *,
        on_decided: Callable[[], None],
    ) -> None:
        """Drive a change to its end. `record`: makes the decision durable, or raises; `on_decided`: called once it is
        sure whether the change is made."""
        answers: asyncio.Queue[ChangeEvent] = asyncio.Queue()
        self._start(machine.begin(), record, answers, machine)
        while machine.stage != "done":
            self._start(machine.on(await answers.get()), record, answers, machine)
            if machine.stage not in ("preparing", "deciding"):
                on_decided()

    def _start(
        self,
        instructions: Sequence[Instruction],
        record: Callable[[int], Awaitable[None]],
        answers: asyncio.Queue[ChangeEvent],
        machine: ChangeMachine,
    ) -> None:
        async def execute(instruction: Instruction) -> None:
            match instruction:
                case Prepare():
                    answers.put_nowait(await self._prepare(instruction))
                case RecordDecision(at=at):
                    answers.put_nowait(await _recorded(record, at))
                case Commit(owner=owner, commit=commit):
                    answers.put_nowait(await self.tell(owner, lambda ref: ref.commit_knobs(commit)))
                case Abort(owner=owner, epoch=epoch):
                    answers.put_nowait(await self.tell(owner, lambda ref: ref.abort_knobs(epoch)))

        for each in instructions:
            self._ctx.spawn(execute(each), name=f"knobs {machine.epoch}: {type(each).__name__.lower()}")

    async def _prepare(self, instruction: Prepare) -> Voted | Unanswered:
        owner = instruction.owner
        try:
            async with asyncio.timeout(PREPARE_S):
                vote: KnobVote = await self._ref(owner).prepare_knobs(instruction.change)
        except TimeoutError:
            return Unanswered(owner, f"not within {PREPARE_S:g} s")
        except CallError as error:
            return Unanswered(owner, error.message)
        return Voted(vote)

    async def tell(
        self, owner: str, send: Callable[[KnobsContract], Awaitable[None]]
    ) -> Delivered | Gone | OwnerFailed:
        """Send until it answers or is gone. Its successor gets what is in force when it joins."""
        while True:
            try:
                async with asyncio.timeout(TELL_S):
                    await send(self._ref(owner))
                return Delivered(owner)
            except (PeerDied, NoSuchActor) as error:
                return Gone(owner, error.message)
            except RemoteError as error:
                return OwnerFailed(owner, error.message)
            except (CallError, TimeoutError) as error:
                why = str(error) or f"no answer within {TELL_S:g} s"
                self._ctx.log.warning("%s has not confirmed a decision about knobs: %s; sent again", owner, why)
            await asyncio.sleep(RETRY_S)

    async def bring_up_to_date(
        self, owner: str, commits: Sequence[KnobCommit], void: int = 0
    ) -> Delivered | Gone | OwnerFailed:
        """Have an owner that joined use what is in force, as far as it has these knobs. `void`: epoch up to which
        nothing else was decided, 0 for none: what it may hold of such a change is forgotten."""
        sheet = await self._joined(owner)
        known = {state.tunable.name for state in sheet.knobs} if isinstance(sheet, KnobSheet) else set[str]()
        for commit in commits:
            values = {name: value for name, value in commit.values.items() if name in known}
            if not values:
                continue
            mine = KnobCommit(epoch=commit.epoch, at=commit.at, values=values)
            outcome = await self.tell(owner, lambda ref, mine=mine: ref.commit_knobs(mine))
            if not isinstance(outcome, Delivered):
                return outcome
        if isinstance(sheet, str):
            return OwnerFailed(owner, sheet) if commits else Delivered(owner)
        return await self.tell(owner, lambda ref: ref.abort_knobs(void)) if void else Delivered(owner)

    async def _joined(self, owner: str) -> KnobSheet | str:
        """As `_ask`, repeated: the registry may not know the owner yet, or may know its former incarnation."""
        sheet: KnobSheet | str = "it is not there"
        try:
            async with asyncio.timeout(JOIN_S):
                while isinstance(sheet := await self._ask(owner), str):
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            pass
        return sheet


async def _recorded(record: Callable[[int], Awaitable[None]], at: int) -> Recorded | NotRecorded:
    try:
        await record(at)
    except Exception as error:  # noqa: BLE001 -- any failure to make it durable aborts the change, with this reason
        return NotRecorded(str(error))
    return Recorded()
