"""The buffer role: hands out prompts, takes finished groups, forms batches; the ledger behind it survives everything.

Who waits for whom: `draw` and `claim` are long polls that hold until something changes, until their own time is over
or shortly before the caller's deadline; everything else answers at once. Decisions are made in `buffer_store.py`,
which never waits. Knows contracts, ledger and admission; knows no concrete dataset, engine or trainer, and no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from ..algos.staleness import Admission
from ..core.activity import ActivityMeter, TelemetryBuffer
from ..core.actor import MailboxPolicy, PeerEvent
from ..core.errors import BadRequest, DataError, LedgerError, UserCodeError
from ..core.messages import (
    Assignment,
    BufferStats,
    Claim,
    DrawReply,
    DrawRequest,
    GroupDropped,
    GroupReturned,
    PutResult,
    SamplingParams,
)
from ..core.protocols import PromptSource
from ..core.samples import Group, Prompt
from .buffer_store import BufferStore
from .contracts import BufferContract, DataContract, MonitorContract
from .ledger import Ledger
from .ledger_resume import continue_ledger
from .ledger_states import State
from .telemetry import report_forever

REPORT_S = 1.0
CANARY_ID = -1_000_000
"""Group id of the first canary prompt; the others follow downwards, far from held-out prompts."""
LONGEST_WAIT_S = 600.0
DEADLINE_SHARE = 0.9
"""A long poll ends after this share of the caller's time, so that the answer arrives before the caller gives up."""


class Buffer(BufferContract, DataContract):
    """Prompt cursor, ledger, finished groups, admission; and the held-out prompts."""

    mailbox = MailboxPolicy(size=4096)

    def __init__(
        self,
        *,
        source: PromptSource,
        ledger_path: Path,
        run: str,
        admission: Admission,
        num_samples: int,
        sampling: SamplingParams,
        group_filter: Callable[[Group], str | None],
        resume_from: Path | None = None,
    ) -> None:
        """`group_filter`: reason to leave a finished group out, or None. `resume_from`: ledger of an earlier run that
        this one goes on from; it is copied to `ledger_path` unless that exists already."""
        self._source = source
        self._ledger_path = ledger_path
        self._run = run
        self._admission = admission
        self._num_samples = num_samples
        self._sampling = sampling
        self._filter = group_filter
        self._resume_from = resume_from
        self._serving: dict[str, tuple[int, int]] = {}
        """rollout -> (epoch, version that it told last)"""
        self._ledger: Ledger | None = None
        self._changed = asyncio.Event()
        self._draw_wait_s = 0.0
        self._claim_wait_s = 0.0

    # ---- life

    async def on_start(self) -> None:
        """Open the ledger. Raises LedgerError if it is in use, damaged or of another run or dataset."""
        clock = self.ctx.clock
        if self._resume_from is not None:
            continue_ledger(self._resume_from, self._ledger_path, self._run)
        self._ledger = Ledger(self._ledger_path, run=self._run, fingerprint=self._source.fingerprint, wall=clock.wall)
        self._store = BufferStore(
            source=self._source,
            ledger=self._ledger,
            admission=self._admission,
            num_samples=self._num_samples,
            sampling=self._sampling,
            group_filter=self._filter,
            log=self.ctx.log,
            started_s=clock.monotonic(),
        )
        self._meter = ActivityMeter(self.ctx.name, clock)
        self._meter.switch("wait-data", "messages")
        self._telemetry = TelemetryBuffer(self.ctx.name, clock, meter=self._meter)
        self.ctx.watch("rollout/")
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self._telemetry, send), name="buffer-telemetry")
        self.ctx.spawn(self._gauge_forever(), name="buffer-gauges")

    async def on_stop(self, why: str) -> None:
        if self._ledger is not None:
            self._ledger.close()

    async def on_peer(self, event: PeerEvent) -> None:
        """The groups of a rollout actor that died go back."""
        if event.kind == "down":
            await self.rollout_gone(event.name, event.epoch)
        elif event.kind == "restarted":
            await self.rollout_gone(event.name, event.epoch - 1)

    # ---- rollout actors

    async def draw(self, request: DrawRequest) -> DrawReply:
        if request.version < 0:
            raise BadRequest(
                f"{request.rollout} draws for version {request.version}", remedy="draw once the engine serves a version"
            )
        with self._at_work("draw"):
            self._store.hear(request)
        until_s = self._wait_until_s(request.wait_s)
        while True:
            assignments, blocked_by = self._draw_now(request)
            if assignments or blocked_by == "finished" or request.max_groups < 1:
                return DrawReply(assignments=tuple(assignments), blocked_by=blocked_by)
            waited_s = await self._wait_for_change(until_s)
            self._draw_wait_s += waited_s or 0.0
            if waited_s is None:
                return DrawReply(blocked_by=blocked_by)

    def _draw_now(
        self, request: DrawRequest
    ) -> tuple[list[Assignment], Literal["", "staleness", "data-exhausted", "paused", "finished"]]:
        store = self._store
        if store.is_finished:
            return [], "finished"
        if store.settings.is_paused:
            return [], "paused"
        with self._at_work("draw"):
            epoch, told = self._serving.get(request.rollout, (-1, -1))
            version = max(request.version, told) if epoch == request.epoch else request.version
            assignments = store.draw(request, version, self.ctx.clock.monotonic())
            if assignments or request.max_groups < 1:
                return assignments, ""
            has_work = store.may_draw or store.ledger.rows(State.REQUEUED)
        return [], "staleness" if has_work else "data-exhausted"

    async def put_group(self, group: Group, attempt: int, rollout: str) -> PutResult:
        with self._at_work("put"):
            result = self._store.put(group, attempt, rollout)
        if result.outcome in ("duplicate", "stale-attempt"):
            self.ctx.log.info("group %d from %s: %s, %s", group.group_id, rollout, result.outcome, result.reason)
        self._mind_drought()
        self._ring()
        return result

    async def adopted(self, rollout: str, epoch: int, version: int) -> None:
        if (epoch, version) > self._serving.get(rollout, (-1, -1)):
            self._serving[rollout] = (epoch, version)
            self._ring()

    async def drop_group(self, dropped: GroupDropped) -> None:
        with self._at_work("drop"):
            is_done = self._store.give_up(
                dropped.group_id, dropped.attempt, dropped.rollout, dropped.reason, dropped.detail
            )
        if is_done:
            self.ctx.log.warning("group %d dropped by %s: %s", dropped.group_id, dropped.rollout, dropped.detail)
        self._mind_drought()
        self._ring()

    def _mind_drought(self) -> None:
        drought = self._store.drought
        if (error := drought.verdict) is not None:
            self.ctx.fail(error)
        elif text := drought.news():
            self._tell("all-left-out", text)

    async def return_group(self, returned: GroupReturned) -> None:
        with self._at_work("return"):
            self._store.take_back(returned.group_id, returned.attempt, returned.rollout, returned.partial)
        self._ring()

    async def rollout_gone(self, rollout: str, epoch: int) -> int:
        with self._at_work("gone"):
            num_groups = self._store.gone(rollout, epoch)
        if num_groups:
            self._tell("groups-requeued", f"{rollout} (epoch {epoch}) is gone: {num_groups} groups go elsewhere")
        self._ring()
        return num_groups

    # ---- the trainer

    async def claim(self, step: int, wait_s: float) -> Claim:
        until_s = self._wait_until_s(wait_s)
        while True:
            if self._store.settings.is_paused and not self._store.ledger.claim_of(step):
                blocked_by = "paused"
            else:
                blocked_by = "wait-data"
                with self._at_work("claim"):
                    groups = self._store.claim(step)
                if groups is not None:
                    self._ring()
                    return Claim(step=step, groups=groups)
                if self._store.is_finished:
                    reason = self._store.inventory()
                    self._tell("data-finished", f"no whole batch is left for step {step}: {reason}")
                    self._ring()
                    return Claim(step=step, finished=True, reason=reason)
            waited_s = await self._wait_for_change(until_s)
            self._claim_wait_s += waited_s or 0.0
            if waited_s is None:
                return Claim(step=step, blocked_by=blocked_by)

    async def fetch(self, group_ids: tuple[int, ...]) -> tuple[Group, ...]:
        with self._at_work("fetch"):
            return self._store.fetch(group_ids)

    async def trained(self, step: int) -> None:
        with self._at_work("trained"):
            self._store.trained(step)
        self._ring()

    async def durable(self, version: int) -> None:
        with self._at_work("durable"):
            self._store.ledger.durable(version)

    async def rewind(self, version: int) -> int:
        with self._at_work("rewind"):
            num_groups = self._store.rewind(version)
        self._tell("rewind", f"training goes on from version {version}; {num_groups} groups are ready again")
        self._ring()
        return num_groups

    # ---- the operator

    async def set_admission(self, max_staleness: int | None = None, policy: str | None = None) -> BufferStats:
        with self._at_work("retune"):
            overdue = self._store.retune(max_staleness, policy)
        stats = self._store.stats()
        self._tell(
            "admission", f"max_staleness {stats.max_staleness}, policy {stats.policy}; {len(overdue)} groups dropped"
        )
        self._ring()
        return stats

    async def set_paused(self, is_paused: bool) -> None:
        self._store.settings.pause(is_paused)
        self._ring()

    async def stop_drawing(self) -> None:
        self._store.settings.stop()
        self._ring()

    async def stats(self) -> BufferStats:
        return self._store.stats()

    async def eval_prompts(self, limit: int) -> tuple[Prompt, ...]:
        return self._source.eval_prompts(max(limit, 0))

    async def canary_prompts(self, limit: int) -> tuple[Prompt, ...]:
        drawn = (self._source.prompt(draw) for draw in range(max(limit, 0)))
        return tuple(
            msgspec.structs.replace(prompt, group_id=CANARY_ID - draw)
            for draw, prompt in enumerate(drawn)
            if prompt is not None
        )

    # ---- waiting

    def _ring(self) -> None:
        """Wake everybody who waits: each looks again for itself."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _wait_until_s(self, wait_s: float) -> float:
        """When a long poll has to answer, on the actor's clock."""
        left_s = self.ctx.deadline()
        limit_s = LONGEST_WAIT_S if left_s is None else left_s * DEADLINE_SHARE
        wanted_s = wait_s if wait_s > 0 else 0.0  # NaN and negative: do not wait
        return self.ctx.clock.monotonic() + min(wanted_s, limit_s)

    async def _wait_for_change(self, until_s: float) -> float | None:
        """Seconds waited until something changed; None if the time was over first."""
        started_s = self.ctx.clock.monotonic()
        if started_s >= until_s:
            return None
        try:
            async with asyncio.timeout(until_s - started_s):
                await self._changed.wait()
        except TimeoutError:
            return None
        return self.ctx.clock.monotonic() - started_s

    # ---- telling

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
                if self._store.ledger.is_broken:
                    self.ctx.fail(error)
                raise

    def _tell(self, kind: str, text: str) -> None:
        self.ctx.log.info("%s: %s", kind, text)
        self._telemetry.event(kind, text)

    async def _gauge_forever(self) -> None:
        """What the monitor shows, once a second."""
        while True:
            await asyncio.sleep(REPORT_S)
            admission, stats = self._store.admission, self._store.stats()
            values = {
                "buffer/ready": float(admission.num_ready),
                "buffer/under_way": float(stats.states.get(State.DISPATCHED, 0)),
                "buffer/requeued": float(stats.states.get(State.REQUEUED, 0)),
                "buffer/slots_used": float(stats.slots_used),
                "buffer/slots_total": float(stats.slots_total),
                "buffer/drawn": float(stats.drawn),
                "buffer/draw_wait_s": self._draw_wait_s,
                "buffer/claim_wait_s": self._claim_wait_s,
            }
            values |= {f"buffer/dropped/{reason}": float(count) for reason, count in stats.dropped.items()}
            values |= {f"buffer/mean_tokens/{name}": mean for name, mean in stats.mean_tokens.items()}
            self._telemetry.metric(-1, values)
