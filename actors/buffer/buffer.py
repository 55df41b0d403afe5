"""The buffer role: hands out prompts, takes finished groups, forms batches; the ledger behind it survives everything.

`draw` and `claim` are long polls: they hold until something changes, their own time is over or the caller's deadline is
near. `groups.py` decides and never waits. While a disk refuses to be written, draws and claims find no work and other
calls raise DiskRefused, which callers repeat; then all parts are made from the ledger again, as by the next process.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from ...algos.staleness import Admission
from ...core.actor import MANY_PEERS, ActorContext, PeerEvent
from ...core.changes import Changes
from ...core.daemon_thread import in_daemon_thread
from ...core.errors import (
    BadRequest,
    CallError,
    DataError,
    DiskRefused,
    Draining,
    LedgerError,
    MessageTooLarge,
    UserCodeError,
)
from ...core.files import (
    REFUSED_EVENT,
    WAITS,
    WRITTEN_EVENT,
    FileEntry,
    may_have_room,
    naming_disk,
    pauses,
    refusal,
    refused,
)
from ...core.knobs import KnobValue
from ...core.messages import (
    Assignment,
    BufferStats,
    Claim,
    DrawBlock,
    DrawReply,
    DrawRequest,
    GroupDropped,
    GroupFinished,
    GroupReturned,
    PutResult,
    SamplingParams,
)
from ...core.protocols import PromptData
from ...core.samples import Group, Prompt
from ...core.timeouts import TIMEOUTS
from ..contracts import BufferContract, DataContract
from ..knobs.owner import LOG_LEVEL, OwnsKnobs, catch_up
from ..ledger.file import continue_ledger, copy_ledger
from ..ledger.ledger import Ledger
from ..telemetry import REPORT_S, Reporter
from ..weights.engine_versions import ALWAYS_NEWEST, ServedWeights
from .cursor import Sources
from .filters import GroupFilters
from .finished_groups import FinishedGroups, SampleLog
from .groups import Groups
from .knobs import BufferKnobs, BufferLimits, BufferValues

DEADLINE_SHARE = 0.9
"""A long poll ends after this share of the caller's time, so that the answer arrives before the caller gives up."""
RECORDED = "recorded"
"""Who has groups that are answered here."""
RECALLED_GROUPS = 16
"""At a time: other calls are answered in between."""
MAX_SAMPLES = 8192
"""In one message, which holds at most 65,536 arrays."""


@dataclass(eq=False, kw_only=True)
class Buffer(OwnsKnobs, DataContract, BufferContract):
    """Prompt cursor, ledger, finished groups, admission; and the held-out prompts."""

    mailbox_size = MANY_PEERS  # every rollout actor may have a draw here all the time

    source: PromptData
    ledger_path: Path
    run: str
    admission: Admission
    num_samples: int
    sampling: SamplingParams
    group_filter: GroupFilters
    limits: BufferLimits = field(default_factory=BufferLimits)
    """Within which knobs change what the run file says."""
    resume_from: Path | None = None
    """Ledger of an earlier run that this one continues, copied to `ledger_path` unless that exists already."""

    def __post_init__(self) -> None:
        self._values = BufferValues.first(
            self.admission,
            self.sampling,
            self.num_samples,
            self.group_filter.chosen,
            Sources(self.source).weights,
            self.limits.difficulty,
        )
        self.recorded: Callable[[Assignment], Group] | None = None
        """Where no rollout actor takes part: gives the group that answers a draw. Raises DataError."""
        self._opened: Groups | None = None
        """All that is made from the ledger, each time that it is opened; None: before the start, and while the disk
        refuses."""
        self._refused: DiskRefused | None = None
        self._last_stats = BufferStats(
            states={}, drawn=0, trained=0, dropped={}, slots_total=0, slots_used=0, max_staleness=0, policy=""
        )
        self._draw_wait_s = 0.0
        self._claim_wait_s = 0.0

    async def on_start(self) -> None:
        """Open the ledger. Raises LedgerError if it is in use, damaged or of another run or dataset, CallError when the
        coordinator of a running run does not say which knobs are in force."""
        has_begun = self.ledger_path.exists()
        if self.resume_from is not None:
            continue_ledger(self.resume_from, self.ledger_path, self.run)
        clock = self.ctx.clock
        report = Reporter.begin(self.ctx)
        self._meter, self._telemetry, self._tell = report.meter, report.telemetry, report.tell
        self._draws, self._claims = LongPolls(self.ctx), LongPolls(self.ctx)
        self._finished = FinishedGroups(self.limits.pass_reward, has_rewards=self.limits.has_rewards)
        self._samples = SampleLog(self._telemetry, clock, self.limits.samples_per_step)
        is_new = not self.ledger_path.exists()
        try:
            await self._begin(waits=has_begun)
        except LedgerError as error:
            if is_new or refusal(error) is None:
                raise
            self._close_for(refused(self.ledger_path, error))
        self.ctx.watch("rollout/")
        self.ctx.spawn(self._gauge_forever(), name="buffer-gauges")

    async def _begin(self, *, waits: bool) -> None:
        """Open the ledger, make what is made from it, use it once the knobs are known; where that fails, close it."""
        clock, limits = self.ctx.clock, self.limits
        ledger = Ledger(self.ledger_path, run=self.run, fingerprint=self.source.fingerprint, wall=clock.wall)
        try:
            knobs = BufferKnobs(
                self.ctx.name, ledger, copy.deepcopy(self.admission), self._values, self.sampling,
                filters=tuple(self.group_filter.by_name), limits=limits, telemetry=self._telemetry,
            )  # fmt: skip
            opened = Groups(
                self.source, knobs, self.group_filter, limits,
                finished=self._finished, tell=self._tell, log=self.ctx.log, started_s=clock.monotonic(),
            )  # fmt: skip
            knobs.use = partial(self._retune, opened)
            knobs.on_pause = self._book_waiting
            knobs.add((LOG_LEVEL,))
            await catch_up(self.ctx, knobs, waits=waits)
        except BaseException:
            ledger.close()
            raise
        self._opened, self._refused = opened, None
        self._book_waiting()

    async def on_stop(self, why: str) -> None:
        if self._opened is not None:
            self._groups.ledger.close()

    async def on_peer(self, event: PeerEvent) -> None:
        """Its groups are requeued. While the disk refuses, its next incarnation's first draw says what it holds."""
        with suppress(DiskRefused):
            if event.kind == "down":
                await self.rollout_gone(event.name, event.epoch)
            elif event.kind == "restarted":
                await self.rollout_gone(event.name, event.epoch - 1)

    @property
    def _groups(self) -> Groups:
        """Raises DiskRefused while the ledger is closed."""
        if self._opened is None:
            raise self._refused or Draining(f"{self.ctx.name} was not started")
        return self._opened

    @property
    def knob_owner(self) -> BufferKnobs:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._groups.knobs

    def _close_for(self, why: DiskRefused) -> None:
        """The ledger is closed until it can be written again. Nothing of what failed was written."""
        if self._opened is not None:
            self._last_stats = self._opened.stats()
            self._opened.ledger.close()
        self._opened, self._refused = None, why
        self._tell(REFUSED_EVENT, str(why))
        self._meter.switch(*WAITS)
        self._ring()
        self.ctx.spawn(self._reopen(), name="reopen-ledger")

    async def _reopen(self) -> None:
        for pause_s in pauses():
            await asyncio.sleep(pause_s)
            if not may_have_room(self.ledger_path.parent):
                continue
            try:
                await self._begin(waits=True)
            except CallError as error:  # the coordinator is away too
                self.ctx.log.warning("the ledger can be written again, but %s", error)
                continue
            except LedgerError as error:
                if refusal(error) is None:
                    self.ctx.fail(error)
                    return
                self._refused = refused(self.ledger_path, error)
                continue
            self._tell(WRITTEN_EVENT, f"{self.ledger_path} can be written again; the run continues")
            return

    async def draw(self, request: DrawRequest) -> DrawReply:
        if request.version < 0:
            raise BadRequest(
                f"{request.rollout} draws for version {request.version}", remedy="draw once the engine serves a version"
            )
        until_s = self._draws.until_s(request.wait_s)
        try:
            with self._at_work("draw"):
                self._groups.note_report(request)
                self._end_if_starved()
            return await self._answer(request, until_s)
        except DiskRefused:
            if request.blocked_by == "disk":
                while self._opened is None and await self._draws.wait(until_s) is not None:
                    pass
            return DrawReply(blocked_by="disk")
        finally:
            if self._opened is not None:
                self._groups.shares.leaves(request.rollout)

    async def _answer(self, request: DrawRequest, until_s: float) -> DrawReply:
        opened = self._opened
        while True:
            if self._opened is not opened:  # the actor must report again which groups it holds
                return DrawReply(blocked_by="disk")
            assignments, blocked_by = self._draw_now(request)
            is_news = request.blocked_by is not None and blocked_by != request.blocked_by
            if assignments or is_news or blocked_by == "finished" or request.max_groups < 1:
                return DrawReply(assignments=tuple(assignments), blocked_by=blocked_by)
            self._groups.waits(request, blocked_by)
            waited_s = await self._draws.wait(until_s, is_urgent=self._groups.cursor.is_searching)
            self._draw_wait_s += waited_s or 0.0
            if waited_s is None:
                return DrawReply(blocked_by=blocked_by)

    def _draw_now(self, request: DrawRequest) -> tuple[list[Assignment], DrawBlock]:
        started_s, wall_s = self.ctx.clock.monotonic(), self.ctx.clock.wall()
        with self._at_work("draw"):
            assignments, blocked_by = self._groups.draw(request, started_s)
        if assignments:
            ids = [assignment.prompt.group_id for assignment in assignments]
            self._telemetry.hop("dispatch", ids, wall_s, self.ctx.clock.monotonic() - started_s)
        return assignments, blocked_by

    async def put_groups(self, finished: tuple[GroupFinished, ...], rollout: str) -> tuple[PutResult, ...]:
        with self._changing("put"), self._groups.ledger.together():
            results = [self._groups.put(entry.group, entry.attempt, rollout) for entry in finished]
        for result, group in results:
            if result.outcome in ("duplicate", "stale-attempt"):
                self.ctx.log.info("group %d from %s: %s, %s", group.group_id, rollout, result.outcome, result.reason)
            if result.outcome == "filtered":
                self._samples.left_out(group, self._groups.ledger.next_step, result.reason, rollout)
        return tuple(result for result, _ in results)

    async def adopted(self, rollout: str, epoch: int, version: int, lineage: int) -> None:
        if self._opened is None:
            return
        if self._groups.versions.reported(rollout, epoch, ServedWeights(lineage, version)):
            self._ring()

    async def drop_group(self, dropped: GroupDropped) -> None:
        with self._changing("drop"):
            is_done = self._groups.give_up(dropped)
        if is_done:
            self.ctx.log.warning("group %d dropped by %s: %s", dropped.group_id, dropped.rollout, dropped.detail)

    def _end_if_starved(self) -> None:
        if (error := self._groups.starvation.verdict) is not None:
            self.ctx.fail(error)

    async def return_group(self, returned: GroupReturned) -> int:
        was_suspect = self._groups.poison.must_be_alone(returned.group_id)
        with self._at_work("return"):
            self._groups.take_back(returned, self.ctx.clock.monotonic())
        self._end_if_starved()
        if was_suspect or not returned.goes_on:  # else no actor may get more than before
            self._ring()
        return len(self.ctx.peers("rollout/"))

    async def rollout_gone(self, rollout: str, epoch: int) -> int:
        with self._changing("gone"):
            num_groups = self._groups.forget_actor(rollout, epoch)
        if num_groups:
            self._tell("groups-requeued", f"{rollout} (epoch {epoch}) is gone: {num_groups} groups go elsewhere")
        return num_groups

    async def claim(self, step: int, wait_s: float, blocked_by: str | None = None) -> Claim:
        until_s = self._claims.until_s(wait_s)
        while True:
            has_more = False
            try:
                has_more = await self._recall()
                claim = self._claim_now(step)
            except DiskRefused:
                claim = Claim(step=step, blocked_by="disk")
            is_news = blocked_by is not None and claim.blocked_by != blocked_by
            if claim.groups or claim.finished or is_news:
                return claim
            waited_s = await self._claims.wait(until_s, is_urgent=has_more)
            self._claim_wait_s += waited_s or 0.0
            if waited_s is None:
                return claim

    async def _recall(self) -> bool:
        """The next prompts are answered by the groups that are recorded of them; False: none may be drawn now."""
        if self.recorded is None:
            return False
        request = DrawRequest(rollout=RECORDED, epoch=0, version=ALWAYS_NEWEST, max_groups=RECALLED_GROUPS, wait_s=0)
        assignments, _ = self._draw_now(request)
        with self._at_work("recall"):
            groups = tuple(GroupFinished(group=self.recorded(work), attempt=work.attempt) for work in assignments)
        if groups:
            await self.put_groups(groups, RECORDED)
        return bool(assignments)

    def _claim_now(self, step: int) -> Claim:
        started_s, wall_s = self.ctx.clock.monotonic(), self.ctx.clock.wall()
        is_new = not self._groups.ledger.claim_of(step)
        if is_new and not self._groups.knobs.serves(step):
            return Claim(step=step, blocked_by="paused")
        with self._at_work("claim"):
            groups = self._groups.claim(step)
        if groups:
            ids = list(groups)
            self._telemetry.hop("claim", ids, wall_s, self.ctx.clock.monotonic() - started_s)
            self._ring()
            bound = self._groups.admission.max_staleness
            if not is_new:  # chosen under a bound that may have been another
                bound = max(bound, *(step - oldest for oldest in groups.values() if oldest >= 0), 0)
            return Claim(step=step, groups=groups, max_staleness=bound)
        if not self._groups.is_finished:
            return Claim(step=step, blocked_by="wait-data")
        reason = self._groups.inventory()
        self._tell("data-finished", f"no whole batch is left for step {step}: {reason}")
        self._ring()
        return Claim(step=step, finished=True, reason=reason)

    async def fetch(self, group_ids: tuple[int, ...]) -> tuple[Group, ...]:
        with self._at_work("fetch"):
            groups = tuple(map(self._groups.ledger.group, group_ids))
        num_samples = sum(len(group.samples) for group in groups)
        if num_samples > MAX_SAMPLES and len(groups) > 1:
            raise MessageTooLarge(f"a reply of {num_samples} samples is over the limit", remedy="ask for fewer groups")
        return groups

    async def trained(self, step: int) -> None:
        with self._changing("trained"):
            groups = self._groups
            batch = [row.group_id for row in groups.ledger.claim_of(step)]
            if groups.trained(step):
                with suppress(LedgerError):  # damaged: nothing that training depends on is looked at here
                    shown = map(groups.ledger.group, batch[: self._samples.num_wanted(step)])
                    self._samples.trained(list(shown), step)
                if metrics := self._finished.take_step():
                    self._telemetry.metric(step + 1, metrics)

    async def durable(self, version: int, oldest: int | None = None) -> None:
        with self._at_work("durable"):
            self._groups.ledger.durable(version, oldest)

    async def snapshot(self, path: str, version: int) -> FileEntry:
        newest = self._groups.ledger.newest_version
        if newest < version:
            raise LedgerError(f"the ledger is asked for as of version {version}, but is at {newest}")
        with naming_disk(Path(path)):
            return await in_daemon_thread(lambda: copy_ledger(self.ledger_path, Path(path)), "copy ledger")

    async def rewind(self, version: int, lineage: int) -> int:
        with self._changing("rewind"):
            num_groups = self._groups.rewind(version, lineage)
        self._tell("rewind", f"training continues from version {version}; {num_groups} groups are ready again")
        return num_groups

    def _retune(self, groups: Groups, values: Mapping[str, KnobValue], epoch: int) -> None:
        with self._at_work("retune"):
            num_dropped = groups.retune(values, epoch)
        changes = ", ".join(f"{name} {value}" for name, value in values.items())
        self._tell("retuned", f"{changes}; {num_dropped} groups dropped")
        self._ring()

    def _ring(self) -> None:
        """Those that wait look again."""
        self._draws.ring()
        self._claims.ring()

    def _book_waiting(self) -> None:
        """What a pause, or its end, changes for the meter and for those who wait."""
        if self._opened is None:
            return
        self._ring()
        is_going = self._groups.knobs.serves(self._groups.ledger.next_step)
        self._meter.switch(*(("wait-data", "messages") if is_going else ("paused", "paused")))

    async def stats(self) -> BufferStats:
        if self._refused is None:
            return self._groups.stats()
        why = str(self._refused)
        return msgspec.structs.replace(self._last_stats, complaint=why, disk=why)

    async def num_held_out(self, name: str = "") -> int:
        return self.source.num_held_out(name)

    async def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return self.source.eval_prompts(max(limit, 0), name)

    @contextmanager
    def _at_work(self, name: str) -> Generator[None]:
        """Account for the time; an error that no retry can mend ends the run with its own cause, not the caller's."""
        with self._meter.working(name):
            try:
                yield
            except (DataError, UserCodeError) as error:
                self.ctx.fail(error)
                raise
            except LedgerError as error:
                if self._opened is not None and refusal(error) is not None:
                    self._close_for(why := refused(self.ledger_path, error))
                    raise why from error
                if self._opened is not None and not self._groups.ledger.is_broken:
                    raise
                self.ctx.fail(error)
                # Nothing was written, and the next buffer can. An actor that takes this for a refusal would drop the
                # finished group.
                raise Draining(f"{self.ctx.name} ends: {error.message}", remedy=error.remedy) from error

    @contextmanager
    def _changing(self, name: str) -> Generator[None]:
        """The same, of a call after which those that wait look again."""
        with self._at_work(name):
            yield
        self._end_if_starved()
        self._ring()

    async def _gauge_forever(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            if self._opened is None:
                continue
            self._book_waiting()
            values = self._groups.gauges()
            values |= {"buffer/draw_wait_s": self._draw_wait_s, "buffer/claim_wait_s": self._claim_wait_s}
            self._telemetry.metric(-1, values)


class LongPolls:
    """Waiting calls of one actor, on its loop."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._changes = Changes()
        self.ring = self._changes.tell

    def until_s(self, wait_s: float) -> float:
        """When the call that is being handled has to answer, on the actor's clock, if it would wait `wait_s`."""
        left_s = self._ctx.deadline()
        limit_s = TIMEOUTS.buffer.longest_poll_s if left_s is None else left_s * DEADLINE_SHARE
        wanted_s = wait_s if wait_s > 0 else 0.0  # NaN and negative: do not wait
        return self._ctx.clock.monotonic() + min(wanted_s, limit_s)

    async def wait(self, until_s: float, *, is_urgent: bool = False) -> float | None:
        """Seconds waited until a change; None: the time was over. `is_urgent`: only until others had their turn."""
        started_s = self._ctx.clock.monotonic()
        if started_s >= until_s:
            return None
        if is_urgent:
            await asyncio.sleep(0)
            return 0.0
        has_changed = await self._changes.next(until_s - started_s)
        return self._ctx.clock.monotonic() - started_s if has_changed else None
