"""The tenant's side of leases, for any actor that holds device memory: one object that a role hands its commands to.

    drain     the gate closes and what runs is waited for
    release   communicators first, then the stores' tags, in the thread that the role names
    restore   the stores' tags, then communicators
    commit    the gate opens

Commands may come twice, late, or out of order: the same id is carried out once and gets the same reply every time; an
epoch older than the newest one seen is answered but not obeyed; one command at a time. Tags that are planned but not
loaded yet are leased as room that is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.device_memory import (
    AssetStore,
    MemoryCommand,
    MemoryReply,
    Tag,
    TagPolicy,
    TagReport,
    TenantReport,
    TenantState,
    wholes,
)
from ...core.errors import MyxaError
from ...core.timeouts import TIMEOUTS
from ...memory.communicators.residency import Absent, CommResidency

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]

MAX_REPLIES = 256
"""Remembered; a command is repeated within seconds, not after so many others."""

_log = logging.getLogger(__name__)


class Gate(Protocol):
    """What stops an actor's use of its device, and lets it continue. Both may be called again in the same position."""

    async def quiesce(self) -> None:
        """Admit nothing, finish what runs, synchronise. Cancelled at the deadline; then `resume` is called."""
        ...

    async def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOptions:
    """Who it is."""

    name: str
    epoch: int
    """Of the process incarnation."""
    gang: str
    devices: tuple[str, ...]
    """UUIDs of the GPUs, or "host:<n>"; with several, each tag is on all of them or on none."""
    node: int = 0
    planned: dict[Tag, tuple[int, TagPolicy]] = field(default_factory=dict[Tag, tuple[int, TagPolicy]])
    """Bytes and policy of tags that are going to be loaded: estimates, until `loaded`."""


@dataclass(eq=False, kw_only=True)
class Tenant:
    """See the module's head. One per actor, made and used on its loop."""

    options: TenantOptions
    gate: Gate
    in_thread: InThread
    """Runs blocking work off the loop, one piece at a time."""
    clock: Clock
    pids: Callable[[], tuple[int, ...]] = lambda: (os.getpid(),)
    """Whose memory this is."""
    telemetry: TelemetryBuffer | None = None

    def __post_init__(self) -> None:
        self._assets = TenantAssets([CountedRoom(self.options.planned)], None)
        self.state: TenantState = "quiet"
        self._epoch = 0
        """The newest seen."""
        self._running: MemoryCommand | None = None
        self._turn = asyncio.Lock()
        """One command at a time, in the order in which they came."""
        self._tasks: OrderedDict[str, asyncio.Task[MemoryReply]] = OrderedDict()
        """By command, also of those that are over: the same id is carried out once, and answered alike every time."""

    def report(self) -> TenantReport:
        """Its present state. While a command works on the memory: the state before."""
        pids = self.pids() or (os.getpid(),)
        return TenantReport(
            tenant=self.options.name,
            epoch=self.options.epoch,
            gang=self.options.gang,
            devices=self.options.devices,
            pids=pids,
            state=self.state,
            tags=self._assets.tags(is_busy=self._running is not None),
            reserved_bytes=self._assets.untaken_bytes(),
            node=self.options.node,
        )

    def loaded(self, stores: Sequence[AssetStore], comms: CommResidency | None = None) -> None:
        """Everything planned is there: the stores' numbers count now. `comms`: may leave as tag "nccl"."""
        self._assets = TenantAssets(stores, comms)

    async def command(self, command: MemoryCommand) -> MemoryReply:
        """Obey, answer again, or refuse. A caller that goes away does not end what it began."""
        if command.tenant_epoch not in (0, self.options.epoch):
            reason = f"meant for epoch {command.tenant_epoch} of {self.options.name}, this is {self.options.epoch}"
            return self._reply(command, reason=reason)
        task = self._tasks.get(command.command_id)
        if task is None:
            # A command belongs to the tenant, not to the call that brought it: it is kept here when that is over.
            task = asyncio.ensure_future(self._obey(command))  # noqa: TID251
            self._tasks[command.command_id] = task
            while len(self._tasks) > MAX_REPLIES:
                self._tasks.popitem(last=False)
        return await asyncio.shield(task)

    async def _obey(self, command: MemoryCommand) -> MemoryReply:
        self._epoch = max(self._epoch, command.epoch)
        async with self._turn:
            if command.epoch < self._epoch:
                reason = f"epoch {command.epoch} is over; {self.options.name} has seen {self._epoch}"
                return self._reply(command, reason=reason)
            if self.state == "active" and command.kind in ("release", "restore"):  # memory of what runs
                reason = f"{self.options.name} is {self.state}: {command.kind} is not possible"
                return self._reply(command, reason=reason)
            started, wall_s = self.clock.monotonic(), self.clock.wall()
            self._running = command
            try:
                return await self._carry_out(command)
            finally:
                self._running = None
                self._span(command, wall_s, self.clock.monotonic() - started)

    async def _carry_out(self, command: MemoryCommand) -> MemoryReply:
        try:
            if command.kind == "drain" and self.state == "active":
                return await self._drain(command)
            if command.kind == "commit" and self.state != "active":
                await self.gate.resume()
                self.state = "active"
            copied_bytes = 0
            if command.kind in ("release", "restore"):
                self.state = "moving"
                move = self._assets.release if command.kind == "release" else self._assets.restore
                copied_bytes = await self.in_thread(lambda: move(command))
            return self._reply(command, copied_bytes=copied_bytes)
        except MyxaError as error:
            return self._reply(command, reason=str(error))
        except Exception as error:  # noqa: BLE001 -- a store of another's making: the manager must hear of it
            _log.exception("%s: %s", self.options.name, command.command_id)
            return self._reply(command, reason=f"{type(error).__name__}: {error}")

    async def _drain(self, command: MemoryCommand) -> MemoryReply:
        self.state = "draining"
        try:
            async with asyncio.timeout(command.deadline_s):
                await self.gate.quiesce()
        except TimeoutError:
            await self._reopen()
            return self._reply(command, reason=f"what runs did not end within {command.deadline_s:.1f} s")
        except BaseException:
            await self._reopen()
            raise
        self.state = "quiet"
        return self._reply(command)

    async def _reopen(self) -> None:
        """After a drain that failed: open the gate; if it cannot be, it is closed, and a commit opens it later."""
        try:
            async with asyncio.timeout(TIMEOUTS.memory.reopen_s):
                await self.gate.resume()
        except Exception:  # noqa: BLE001 -- a gate of another's making may raise anything
            _log.exception("%s: the gate does not open", self.options.name)
            self.state = "quiet"
        else:
            self.state = "active"

    def _reply(self, command: MemoryCommand, *, reason: str = "", copied_bytes: int = 0) -> MemoryReply:
        if self._running is command:
            self._assets.refresh()
            if self.state == "moving":
                self.state = "quiet"
        return MemoryReply(
            command_id=command.command_id,
            report=self.report(),
            accepted=not reason,
            reason=reason,
            copied_bytes=copied_bytes,
        )

    def _span(self, command: MemoryCommand, wall_s: float, seconds: float) -> None:
        if self.telemetry is not None:
            tags = wholes(command.tags)
            self.telemetry.span(
                command.kind, "wait-memory", wall_s, seconds, track="memory", epoch=command.epoch, tags=tags
            )


COMMS: Tag = "nccl"


class TenantAssets:
    """What a tenant holds, as one list of tags: stores, and communicators (tag "nccl"). `release` and `restore` block
    and belong into the tenant's thread; meanwhile `tags` answers with the state before."""

    def __init__(self, stores: Sequence[AssetStore], comms: CommResidency | None) -> None:
        self._stores = tuple(stores)
        self._comms = comms
        self._are_comms_away = False
        self.refresh()

    def tags(self, *, is_busy: bool) -> tuple[TagReport, ...]:
        if not is_busy:
            self.refresh()
        return self._last

    def untaken_bytes(self) -> int:
        """Of what counts as mapped: not on the device yet."""
        return sum(store.untaken_bytes() for store in self._stores if isinstance(store, CountedRoom))

    def refresh(self) -> None:
        """The work of a command is over: look again."""
        reports = [tag for store in self._stores for tag in store.report()]
        if self._comms is not None:  # their size is not known: the measurement sees it
            backing = "discarded" if self._are_comms_away else "mapped_dirty"
            reports.append(TagReport(COMMS, 0, "rematerialise", backing))
        self._last = tuple(reports)

    # -- done in the tenant's thread; both return the bytes that are copied

    def release(self, command: MemoryCommand) -> int:
        """Communicators first: nothing may be in flight on memory that leaves."""
        if COMMS in command.tags and self._comms is not None and not self._are_comms_away:
            try:
                self._comms.release(command.epoch, command.deadline_s)
            except Absent:
                raise  # no memory was released
            except MyxaError:
                self._comms.abort()
                self._are_comms_away = True
                raise
            self._are_comms_away = True
        return sum(store.release(tags) for store in self._stores if (tags := _tags_of(store, command.tags)))

    def restore(self, command: MemoryCommand) -> int:
        """Communicators last: they find the device as it will be."""
        copied_bytes = sum(store.restore(tags) for store in self._stores if (tags := _tags_of(store, command.tags)))
        if COMMS in command.tags and self._comms is not None and self._are_comms_away:
            try:
                self._comms.restore(command.epoch, command.deadline_s)
            except MyxaError:
                self._comms.abort()
                raise
            self._are_comms_away = False
        return copied_bytes


def _tags_of(store: AssetStore, tags: Sequence[Tag]) -> list[Tag]:
    have = {tag.tag for tag in store.report()}
    return [tag for tag in tags if tag in have]


WORKSPACE: Tag = "workspace"


@dataclass(eq=False)
class CountedRoom:
    """Room on a device that is only counted: of what is going to be loaded; for a tenant's turn, of what is not
    allocated ahead (activations, logits). torch keeps what a step took: `taken` says how many bytes, `vacate` gives
    back the unused part."""

    sizes: Mapping[Tag, tuple[int, TagPolicy]]
    _: KW_ONLY
    is_held: bool = False
    taken: Callable[[], int] = int
    vacate: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._held = set(self.sizes) if self.is_held else set[Tag]()

    @property
    def held_bytes(self) -> int:
        return sum(self.sizes[tag][0] for tag in self._held)

    def untaken_bytes(self) -> int:
        """Of the held ones: not on the device yet, but may be at any moment."""
        return max(self.held_bytes - self.taken(), 0) if self._held else 0

    def report(self) -> tuple[TagReport, ...]:
        return tuple(
            TagReport(tag, num_bytes, policy, "mapped_dirty" if tag in self._held else "discarded")
            for tag, (num_bytes, policy) in self.sizes.items()
        )

    def release(self, tags: Collection[Tag]) -> int:
        if leaving := self._held.intersection(tags):
            self._held -= leaving
            self.vacate()
        return 0

    def restore(self, tags: Collection[Tag]) -> int:
        self._held.update(tag for tag in tags if tag in self.sizes)
        return 0
