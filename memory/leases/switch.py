"""Leases of a run, one at a time: trainer and engines share all devices. A `Site` carries the ledger's plans out.

    survey    every tenant is asked for a report, the devices are measured: a refusal here disturbs no tenant
    forward   a plan is carried out; if memory that should be free is not, more tags leave, if there are more
    back      tags restored for the lease leave again, tags that left for it come back, tenants that ran resume

A tenant answers a survey once no earlier command is being carried out, and then obeys no command of an older epoch: its
answer is the truth, and nothing has to be remembered between two leases. Epochs of a restarted manager are above all of
its predecessors. A tenant that is there and does not answer gets no commands in this lease, and counts as holding all
that it ever reported; while one never reported to this manager, which may carry out a command of the last one, nothing
is granted. What the processes of one that is gone still hold is in the measurement.

A plan has the steps drain, release, verify, restore, commit; each ends when all its tenants answered. Going forward,
one refusal or missed deadline ends the plan, early enough to leave time for the way back; there, a tenant that does not
answer is skipped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from ...core.clock import Clock
from ...core.device_memory import (
    CommandKind,
    DeviceReading,
    DeviceUse,
    LeaseReply,
    LeaseRequest,
    MemoryCommand,
    MemoryReply,
    Tag,
    TenantReport,
    wholes,
)
from ...core.errors import CallError, MyxaError
from .lease_ledger import LeaseLedger, Shortage, SwitchPlan, asked_bytes, build, can_leave, is_mapped


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Limits and times of one manager."""

    reserve_bytes: int = 1 << 30
    """Of each device, never promised."""
    margin_bytes: int = 64 << 20
    """Free on a device beyond what is asked."""
    survey_s: float = 5.0
    """For a tenant's answer to a survey."""
    still_s: float = 1.0
    """A shortage that did not shrink for so long is none that passes: released memory may show late."""
    resend_s: float = 5.0
    """A command that was not answered is repeated, under the same id."""
    settle_s: float = 15.0
    """A shortage that may pass is looked at again for so long before a tenant is disturbed or the lease refused: after
    a death memory is about to become free."""


EPOCHS_PER_MANAGER = 1 << 32
MAX_ANSWERS = 256
MAX_PLANS = 4
"""Of one lease: the first, and further ones when the measurement shows that more has to leave."""
FORWARD_SHARE = 0.7
"""Of a lease's time; the rest is kept for the way back."""
_AGAIN_S = 0.2
"""Before a command or a measurement that failed is repeated."""
_SURVEY_PAUSE_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4


class Site(Protocol):
    """The tenants and devices of a run."""

    def is_there(self, tenant: str) -> bool:
        """Whether an actor of that name is registered."""
        ...

    async def command(self, tenant: str, command: MemoryCommand, within_s: float) -> MemoryReply:
        """Raises CallError."""
        ...

    async def measure(self, uses: Mapping[int, Iterable[DeviceUse]]) -> dict[str, DeviceReading]:
        """`uses`: by node. Raises MyxaError naming what gave no reading."""
        ...

    def note(self, device: str, tenant: str, kind: str, text: str) -> None:
        """For the timeline and the event log."""

    def spent(self, switch: str, phase: str, started_s: float, ended_s: float, devices: Iterable[str]) -> None:
        """A stretch of a switch, for the trace."""

    def spawn(self, work: Coroutine[Any, Any, LeaseReply], name: str) -> asyncio.Task[LeaseReply]: ...


@dataclass(eq=False)
class Leases:
    """All leases of a run."""

    site: Site
    gangs: Mapping[str, Sequence[str]]
    """Names of each gang's tenants."""
    options: LeaseOptions
    clock: Clock
    _: KW_ONLY
    incarnation: int = 1
    """Number of this manager, above that of all before it."""

    def __post_init__(self) -> None:
        self.epoch = max(self.incarnation - 1, 0) * EPOCHS_PER_MANAGER
        self.switching = ""
        """What is under way, for people."""
        self.reports: dict[str, TenantReport] = {}
        """What each tenant said last."""
        self.readings: dict[str, DeviceReading] = {}
        self._turn = asyncio.Lock()
        self._asked: OrderedDict[str, asyncio.Task[LeaseReply]] = OrderedDict()

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Have tags of a gang mapped; waits its turn. The same id asked again gets the same answer."""
        task = self._asked.get(request.request_id)
        if task is None:
            task = self._asked[request.request_id] = self.site.spawn(self._lease(request), request.request_id)
            while len(self._asked) > MAX_ANSWERS:
                self._asked.popitem(last=False)
        return await asyncio.shield(task)

    def ledger(self) -> LeaseLedger:
        """What is known of the tenants that are there."""
        ledger = LeaseLedger(reserve_bytes=self.options.reserve_bytes, margin_bytes=self.options.margin_bytes)
        ledger.readings = self.readings
        for name, report in self.reports.items():
            if self.site.is_there(name):
                ledger.add(report)
        return ledger

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    async def _lease(self, request: LeaseRequest) -> LeaseReply:
        started = self.clock.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._turn.acquire()
        except TimeoutError:
            waited_s = self.clock.monotonic() - started
            reason = f"refused: {request.gang} waited {waited_s:.1f} s for its turn behind {self.switching}"
            return LeaseReply(granted=False, epoch=self.epoch, reason=reason)
        try:
            self.switching = f"{request.gang}: {wholes(request.tags)}"
            return await Switch(self, request, started + request.deadline_s).run()
        finally:
            self.switching = ""
            self._turn.release()


class _Stopped(Exception):
    """The plan cannot continue, and why."""


class _Lost(Exception):
    """That incarnation of a tenant is gone."""


class Switch:
    """One lease from request to answer."""

    def __init__(self, leases: Leases, request: LeaseRequest, until_s: float) -> None:
        self._leases = leases
        self._site = leases.site
        self._options = leases.options
        self._now = leases.clock.monotonic
        self._request = request
        self._until_s = until_s
        self._step_until_s = until_s
        self._ledger = leases.ledger()
        self._before: dict[str, TenantReport] = {}
        """By tenant, before the first plan; empty: no tenant was disturbed."""
        self._epoch = leases.epoch
        self._seconds: dict[str, float] = {}
        self._copied_bytes = 0
        self._phase = "survey"
        self._phase_started = self._now()
        self._pending: set[str] = set()
        self._unknown: set[str] = set()
        """Tenants that are there, did not answer this manager yet, and may hold anything."""
        self._trouble = ""
        """Why the last measurement brought no readings."""

    async def run(self) -> LeaseReply:
        started, request = self._now(), self._request
        failure = ""
        forward_s = FORWARD_SHARE * (self._until_s - started)
        self._step_until_s = started + forward_s
        try:
            async with asyncio.timeout(forward_s):
                await self._forward()
        except TimeoutError:
            failure = self._late_words()
        except _Stopped as stopped:
            failure = str(stopped)
        if failure and self._before:
            await self._go_back(failure)
        if failure and not failure.startswith("refused"):
            failure = f"refused: {failure}"
        text = f"{request.gang}: {wholes(request.tags)}" + (f": {failure}" if failure else "")
        devices = self._ledger.devices
        for device in devices or ("",):
            self._site.note(device, "", "refused" if failure else "granted", text)
        self._site.spent(request.request_id, "switch", started, self._now(), devices)
        return LeaseReply(
            granted=not failure,
            epoch=self._epoch,
            reason=failure,
            seconds=self._seconds,
            copied_bytes=self._copied_bytes,
        )

    # -- forward

    async def _forward(self) -> None:
        plan = await self._first_plan()
        if not plan.is_empty:
            self._before = {t.name: t.report for t in self._ledger.tenants.values() if not t.silent}
        reason = ""
        for _ in range(MAX_PLANS):
            if plan.is_empty:
                return
            if reason := await self._carry_out(plan):
                self._site.note(min(self._ledger.devices, default=""), "", "short", reason.removeprefix("refused: "))
            # Nothing is missing then, as a rule. But a member may have been restarted, and a measurement may show
            # memory that the books do not have, so that more has to leave.
            following = self._planned()
            if isinstance(following, Shortage):
                raise _Stopped(reason or following.reason)
            plan = following
        if not plan.is_empty:
            raise _Stopped(reason or f"members of {self._request.gang} keep changing")

    async def _first_plan(self) -> SwitchPlan:
        started = self._now()
        patience_s = min(self._options.settle_s, 0.5 * (self._until_s - started))
        names = [name for members in self._leases.gangs.values() for name in members]
        while True:
            await self._survey(names, min(self._options.survey_s, 0.25 * (self._until_s - started)))
            await self._measure(self._ledger.devices)
            plan = self._planned()
            if isinstance(plan, SwitchPlan):
                return plan
            if not plan.may_pass or self._now() >= started + patience_s:
                raise _Stopped(plan.reason)
            await asyncio.sleep(_SURVEY_PAUSE_S)

    def _planned(self) -> SwitchPlan | Shortage:
        names = self._leases.gangs.get(self._request.gang, ())
        missing = {name for name in names if name not in self._ledger.tenants} | self._unknown
        if missing:
            return Shortage(f"{', '.join(sorted(missing))} did not report", may_pass=True)
        return build(self._ledger, self._request)

    async def _carry_out(self, plan: SwitchPlan) -> str:
        """Empty, or in words what was short before anything was restored."""
        self._epoch = self._leases.next_epoch()
        await self._step("drain", dict.fromkeys(plan.drain, ()))
        await self._step("release", plan.release)
        with self._timed("verify"):
            if short := await self._verify(plan.restore, self._options.still_s):
                return short
        await self._step("restore", plan.restore)
        await self._step("commit", dict.fromkeys(plan.commit, ()))
        return ""

    async def _step(self, kind: CommandKind, tags: Mapping[str, tuple[Tag, ...]]) -> None:
        with self._timed(kind):
            try:
                async with asyncio.TaskGroup() as group:
                    for name, some in tags.items():
                        if name in self._ledger.tenants:
                            group.create_task(self._command(kind, name, some))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    def _late_words(self) -> str:
        if self._trouble:
            return self._trouble
        names = ", ".join(sorted(self._pending)) or "no tenant"
        return f"{names} did not {self._phase} within {self._now() - self._phase_started:.1f} s"

    # -- back

    async def _go_back(self, reason: str) -> None:
        first = min(self._ledger.devices, default="")
        self._site.note(first, "", "fallback", f"{self._request.gang}: {reason}")
        self._pending.clear()
        # Each step may use a part of what is left, so that time is left for the last ones.
        await self._survey(self._before, self._left_s() / 3)
        plan = self._way_back()
        self._epoch = self._leases.next_epoch()
        await self._attempt("drain", dict.fromkeys(plan.drain, ()), self._left_s() / 2)
        await self._attempt("release", plan.release, self._left_s() / 2)
        unwilling: set[str] = set()
        try:
            async with asyncio.timeout(self._left_s() / 2):
                with self._timed("fallback_verify"):
                    await self._verify(plan.restore, float("inf"))
        except TimeoutError:
            unwilling.update(plan.restore)  # their memory is not there: they stay quiet
        else:
            unwilling = await self._attempt("restore", plan.restore, self._left_s() / 2)
        commit = [name for name in plan.commit if name not in unwilling]
        await self._attempt("commit", dict.fromkeys(commit, ()), self._left_s())

    def _left_s(self) -> float:
        return max(self._until_s - self._now(), 0.0)

    def _way_back(self) -> SwitchPlan:
        """From what the tenants hold now to what they held before, as far as they still live."""
        drain: list[str] = []
        release: dict[str, tuple[Tag, ...]] = {}
        restore: dict[str, tuple[Tag, ...]] = {}
        commit: list[str] = []
        for name, before in self._before.items():
            tenant = self._ledger.tenants.get(name)
            if tenant is None or tenant.silent or tenant.report.epoch != before.epoch:
                continue
            was_mapped = {tag.tag for tag in before.tags if is_mapped(tag)}
            now = tenant.report
            gone: list[Tag] = [tag.tag for tag in now.tags if tag.tag in was_mapped and not is_mapped(tag)]
            come: list[Tag] = [tag.tag for tag in now.tags if tag.tag not in was_mapped and can_leave(tag)]
            if gone:
                restore[name] = tuple(gone)
            if come:
                release[name] = tuple(come)
            if now.state == "active" and before.state != "active":
                drain.append(name)
            if now.state != "active" and before.state == "active":
                commit.append(name)
        return SwitchPlan(tuple(drain), release, restore, tuple(commit))

    async def _attempt(self, kind: CommandKind, tags: Mapping[str, tuple[Tag, ...]], within_s: float) -> set[str]:
        """The tenants that did not do it."""
        failed: set[str] = set()
        self._step_until_s = self._now() + within_s

        async def attempt(name: str, some: tuple[Tag, ...]) -> None:
            try:
                async with asyncio.timeout(within_s):
                    await self._command(kind, name, some)
            except TimeoutError:
                self._ledger.tenants[name].silent = f"did not answer to {kind}"
                failed.add(name)
            except _Stopped:
                failed.add(name)

        with self._timed(f"fallback_{kind}"):
            names = [name for name in tags if name in self._ledger.tenants and not self._ledger.tenants[name].silent]
            await asyncio.gather(*(attempt(name, tags[name]) for name in names))
        return failed

    # -- tenants

    async def _survey(self, names: Iterable[str], within_s: float) -> None:
        """Have them report, under an epoch of its own."""
        self._epoch = epoch = self._leases.next_epoch()

        async def ask(name: str) -> None:
            self._unknown.discard(name)
            command = MemoryCommand(
                command_id=f"{self._request.request_id}.{epoch}.survey.{name}",
                epoch=epoch,
                kind="survey",
                deadline_s=within_s,
            )
            try:
                async with asyncio.timeout(within_s):
                    await self._answer(name, command)
            except _Lost:
                self._ledger.tenants.pop(name, None)
            except TimeoutError:
                self._ledger.tenants.pop(name, None)
                if (report := self._leases.reports.get(name)) is not None:
                    self._ledger.add(report, f"does not answer (asked for {within_s:.1f} s)")
                else:
                    self._unknown.add(name)

        await asyncio.gather(*map(ask, names))

    async def _command(self, kind: CommandKind, name: str, tags: tuple[Tag, ...]) -> None:
        """Raises _Stopped when it refuses, or is lost before it has its memory."""
        command = MemoryCommand(
            command_id=f"{self._request.request_id}.{self._epoch}.{kind}.{name}",
            epoch=self._epoch,
            kind=kind,
            tags=tags,
            deadline_s=max(self._step_until_s - self._now(), 0.05),
            tenant_epoch=self._ledger.tenants[name].report.epoch,
        )
        self._pending.add(name)
        try:
            reply = await self._answer(name, command)
        except _Lost:
            self._pending.discard(name)
            if not self._site.is_there(name):
                self._ledger.tenants.pop(name, None)
            if kind in ("restore", "commit"):
                raise _Stopped(f"{name} was lost while the switch was in its {kind} step") from None
            return
        self._pending.discard(name)
        self._copied_bytes += reply.copied_bytes
        if not reply.accepted:
            self._site.note(", ".join(reply.report.devices), name, "refused", f"{kind}: {reply.reason}")
            raise _Stopped(f"{name} refused to {kind}: {reply.reason}")

    async def _answer(self, name: str, command: MemoryCommand) -> MemoryReply:
        """Asked for until it comes; the report is in the books then. Raises _Lost."""
        while True:
            if not self._site.is_there(name):
                raise _Lost
            try:
                reply = await self._site.command(name, command, self._options.resend_s)
                break
            except CallError:
                await asyncio.sleep(_AGAIN_S)
        self._leases.reports[name] = reply.report
        self._ledger.add(reply.report)
        if command.tenant_epoch not in (0, reply.report.epoch):
            raise _Lost
        return reply

    # -- devices

    async def _measure(self, devices: Iterable[str]) -> None:
        """Now; asked for until there are readings."""
        uses = self._ledger.uses(devices)
        names = ", ".join(use.device for some in uses.values() for use in some)
        self._trouble = f"{names} could not be measured in time"
        while True:
            try:
                self._ledger.readings |= await self._site.measure(uses)
            except MyxaError as error:
                self._trouble = f"{names} could not be measured in time: {error}"
                await asyncio.sleep(_AGAIN_S)
            else:
                self._trouble = ""
                return

    async def _verify(self, restore: Mapping[str, tuple[Tag, ...]], still_s: float) -> str:
        """Wait until a measurement shows room. In words what is short, once that did not shrink for `still_s`."""
        needed = asked_bytes(self._ledger, restore)
        least: float = float("inf")
        shrank_at, pause_s = self._now(), _FIRST_PAUSE_S
        while needed:
            await self._measure(sorted(needed))
            short = {d: n - room for d, n in needed.items() if (room := self._ledger.room(d)) < n}
            if not short:
                break
            if sum(short.values()) < least:
                least, shrank_at = sum(short.values()), self._now()
            elif self._now() - shrank_at >= still_s:
                device = max(short, key=lambda d: short[d])
                return self._ledger.short_words(device, short[device])
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return ""

    @contextmanager
    def _timed(self, phase: str) -> Generator[None]:
        self._phase, self._phase_started = phase, self._now()
        try:
            yield
        finally:
            now = self._now()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._phase_started
            self._site.spent(self._request.request_id, phase, self._phase_started, now, self._ledger.devices)
