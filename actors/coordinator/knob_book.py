"""The conductor's book: what owners are asked, what was decided, what goes back when; durable before it is told.

    ask      the number of a change is in the journal before any owner hears of it: it is never used twice
    decide   journal, then audit log; if either refuses, nothing was decided
    take_up  what an earlier incarnation of the coordinator left: a change that it had not decided is void

A decision that reached the journal stands, whoever dies next; if it did not come into the audit log any more, the next
incarnation writes it there. Knows journal and audit log; must not know owners or messages.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.clock import Clock
from ...core.errors import MyxaError
from ...core.knobs import AuditRecord
from ..audit import AuditDesk
from .journal import CoordinatorJournal, KnobsKept
from .knob_decisions import Decisions
from .knob_expiry import Expiries
from .knob_order import Order
from .knob_plan import ChangePlan


class KnobBook:
    """See the module's head."""

    def __init__(
        self, desk: AuditDesk, journal: CoordinatorJournal, clock: Clock, fail: Callable[[BaseException], None]
    ) -> None:
        """`fail`: ends this incarnation of the coordinator."""
        self.decisions = Decisions()
        self.expiries = Expiries()
        self.void = 0
        """Up to this epoch nothing is decided any more beside what `decisions` holds: owners that an earlier
        incarnation asked are told so. 0: there was none."""
        self._desk = desk
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

    async def decide(self, order: Order, plan: ChangePlan, epoch: int, at: int, version: int) -> AuditRecord:
        """The point of no return: from here on the change is made, whoever dies. `version`: where the run stands.
        Raises MyxaError when it could not be made durable, and is not made."""
        before = self.kept()
        record = self._desk.stamp(order.done(plan, epoch, at))
        self._enter(order, plan, epoch, at, version)
        self._undecided, self._record = "", record
        try:
            await self._journal.keep()
        except MyxaError:
            self._take(before)
            raise
        try:
            return await self._desk.append(record)
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

    def _enter(self, order: Order, plan: ChangePlan, epoch: int, at: int, version: int) -> None:
        is_restored = order.verb == "resume"
        decided = self.decisions.decide(epoch, at, version, plan, undoes=order.undoes, is_restored=is_restored)
        self.expiries.overtaken_by(decided)
        now_s = self._clock.monotonic()
        self.expiries.add(decided, for_steps=order.for_steps, for_s=order.for_s, version=version, now_s=now_s)

    def go_on_from(self, epoch: int) -> None:
        """A resumed run counts on from the newest epoch that its checkpoint or its groups carry."""
        self._asked = max(self._asked, epoch)
        self.decisions.go_on_from(epoch)

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
        """Go on from what an earlier incarnation kept; returns in words what it had not decided."""
        self._take(kept)
        self._undecided = ""
        self.void = kept.asked
        return kept.undecided and f"change {kept.asked} ({kept.undecided})"

    async def complete_audit(self) -> bool:
        """Have the newest decision in the audit log; returns whether it was missing there. Raises as `AuditDesk`."""
        return self._record is not None and await self._desk.complete(self._record)

    def _ahead_s(self) -> float:
        return self._clock.wall() - self._clock.monotonic()
