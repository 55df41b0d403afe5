"""The tenant's side of leases, for any actor that holds device memory: one object that a role hands its commands to.

    drain     the gate closes and what runs is waited for            (never the actor's own business to know why)
    release   communicators first, then the stores' tags, in the thread that the role names
    restore   the stores' tags, then communicators
    commit    the gate opens

Commands may come twice, late, or out of order. Three rules make that harmless: the same id is carried out once and gets
the same reply every time; an epoch older than the newest one seen is answered but not obeyed; one command at a time.
Tags that are planned but not loaded yet are leased like others: their bytes are reserved, and no store is called.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...core.activity import TelemetryBuffer
from ...core.clock import Clock
from ...core.device_memory import (
    AssetStore,
    MemoryCommand,
    MemoryReply,
    MovedMemory,
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
from ...memory.leases.lease_ledger import resting_state

InThread = Callable[[Callable[[], Any]], Awaitable[Any]]

MAX_REPLIES = 256
"""Remembered; a command is repeated within seconds, not after so many others."""
NOTHING_MOVED = MovedMemory()

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


class Tenant:
    """See the module's head. One per actor, made and used on its loop."""

    def __init__(
        self,
        *,
        options: TenantOptions,
        stores: Sequence[AssetStore],
        gate: Gate,
        in_thread: InThread,
        clock: Clock,
        comms: CommResidency | None = None,
        pids: Callable[[], tuple[int, ...]] | None = None,
        telemetry: TelemetryBuffer | None = None,
    ) -> None:
        """`in_thread`: runs blocking work off the loop, one piece at a time. `pids`: whose memory this is, default this
        process."""
        self._options = options
        self._gate = gate
        self._in_thread = in_thread
        self._clock = clock
        self._pids = pids or (lambda: (os.getpid(),))
        self._telemetry = telemetry
        self._assets = TenantAssets(options.planned, stores, comms)
        self.state: TenantState = "cold"
        self._epoch = 0
        """The newest seen."""
        self._running: MemoryCommand | None = None
        self._turn = asyncio.Lock()
        """One command at a time, in the order in which they came."""
        self._tasks: OrderedDict[str, asyncio.Task[MemoryReply]] = OrderedDict()
        """By command, also of those that are over: the same id is carried out once, and answered alike every time."""

    def add_store(self, store: AssetStore) -> None:
        """More memory, found after the tenant was made."""
        self._assets.stores.append(store)

    def add_comms(self, comms: CommResidency) -> None:
        """Communicators that may leave the device, as tag "nccl"."""
        self._assets.comms = comms

    def report(self) -> TenantReport:
        """Its present state. While a command works on the memory: the state before."""
        pids = self._pids() or (os.getpid(),)
        return TenantReport(
            tenant=self._options.name,
            epoch=self._options.epoch,
            gang=self._options.gang,
            devices=self._options.devices,
            pids=pids,
            state=self.state,
            tags=self._assets.tags(is_busy=self._running is not None),
            reserved_bytes=self._assets.reserved_bytes,
            node=self._options.node,
        )

    def loaded(self) -> None:
        """Everything planned is there: from now on the stores' own numbers count."""
        self._assets.planned.clear()
        if self.state == "granted":
            self.state = "quiesced"

    async def command(self, command: MemoryCommand) -> MemoryReply:
        """Obey, answer again, or refuse. A caller that goes away does not end what it began."""
        if command.tenant_epoch not in (0, self._options.epoch):
            reason = f"meant for epoch {command.tenant_epoch} of {self._options.name}, this is {self._options.epoch}"
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
                reason = f"epoch {command.epoch} is over; {self._options.name} has seen {self._epoch}"
                return self._reply(command, reason=reason)
            if self.state == "active" and command.kind in ("release", "restore"):  # memory of what runs
                reason = f"{self._options.name} is {self.state}: {command.kind} is not possible"
                return self._reply(command, reason=reason)
            started, wall_s = self._clock.monotonic(), self._clock.wall()
            self._running = command
            try:
                return await self._carry_out(command)
            finally:
                self._running = None
                self._span(command, wall_s, self._clock.monotonic() - started)

    async def _carry_out(self, command: MemoryCommand) -> MemoryReply:
        try:
            if command.kind == "drain" and self.state == "active":
                return await self._drain(command)
            if command.kind == "commit" and self.state != "active":
                await self._gate.resume()
                self.state = "active"
            moved = NOTHING_MOVED
            if command.kind in ("release", "restore"):
                self.state = "releasing" if command.kind == "release" else "restoring"
                move = self._assets.release if command.kind == "release" else self._assets.restore
                moved = await self._in_thread(lambda: move(command))
            return self._reply(command, moved=moved)
        except MyxaError as error:
            return self._reply(command, reason=str(error))
        except Exception as error:  # noqa: BLE001 -- a store of another's making: the manager must hear of it
            _log.exception("%s: %s", self._options.name, command.command_id)
            return self._reply(command, reason=f"{type(error).__name__}: {error}")

    async def _drain(self, command: MemoryCommand) -> MemoryReply:
        self.state = "draining"
        try:
            async with asyncio.timeout(command.deadline_s):
                await self._gate.quiesce()
        except TimeoutError:
            await self._reopen()
            return self._reply(command, reason=f"what runs did not end within {command.deadline_s:.1f} s")
        except BaseException:
            await self._reopen()
            raise
        self.state = "quiesced"
        return self._reply(command)

    async def _reopen(self) -> None:
        """After a drain that failed: open the gate; if it cannot be, it is closed, and a commit opens it later."""
        try:
            async with asyncio.timeout(TIMEOUTS.memory.reopen_s):
                await self._gate.resume()
        except Exception:  # noqa: BLE001 -- a gate of another's making may raise anything
            _log.exception("%s: the gate does not open", self._options.name)
            self.state = "quiesced"
        else:
            self.state = "active"

    def _reply(self, command: MemoryCommand, *, reason: str = "", moved: MovedMemory = NOTHING_MOVED) -> MemoryReply:
        if self._running is command:
            self._assets.refresh()
            if self.state in ("releasing", "restoring"):
                rested = resting_state(self._assets.tags(is_busy=True))
                self.state = "granted" if rested == "quiesced" and self._assets.is_granted else rested
        return MemoryReply(
            command_id=command.command_id,
            report=self.report(),
            accepted=not reason,
            reason=reason,
            copied_bytes=moved.copied_bytes,
            dropped_bytes=moved.dropped_bytes,
        )

    def _span(self, command: MemoryCommand, wall_s: float, seconds: float) -> None:
        if self._telemetry is not None:
            tags = wholes(command.tags)
            self._telemetry.span(
                command.kind, "wait-memory", wall_s, seconds, track="memory", epoch=command.epoch, tags=tags
            )


COMMS: Tag = "nccl"


class TenantAssets:
    """What a tenant holds, as one list of tags: stores, communicators (tag "nccl"), and what is planned. `release` and
    `restore` block and belong into the tenant's thread. The loop may ask for `tags` at any time: while a command works
    it answers with the state before, because a store at work does not answer."""

    def __init__(
        self, planned: Mapping[Tag, tuple[int, TagPolicy]], stores: Sequence[AssetStore], comms: CommResidency | None
    ) -> None:
        self.planned = dict(planned)
        self.stores = list(stores)
        self.comms = comms
        self._granted: set[Tag] = set()
        self._are_comms_away = False
        self._last: tuple[TagReport, ...] | None = None

    # -- asked from the loop

    def tags(self, *, is_busy: bool) -> tuple[TagReport, ...]:
        """Every tag once. A tag that is planned and in a store already counts with the larger number."""
        if not is_busy or self._last is None:
            self._last = self._look()
        return self._last

    def refresh(self) -> None:
        """The work of a command is over: look again."""
        self._last = self._look()

    @property
    def reserved_bytes(self) -> int:
        """Of the planned tags that were granted: not in any store yet."""
        stored = self._stored()
        return sum(
            max(0, num_bytes - (stored[tag].num_bytes if tag in stored else 0))
            for tag, (num_bytes, _) in self.planned.items()
            if tag in self._granted
        )

    @property
    def is_granted(self) -> bool:
        """Something planned may be loaded."""
        return any(tag in self._granted for tag in self.planned)

    def _stored(self) -> dict[Tag, TagReport]:
        return {tag.tag: tag for store in self.stores for tag in store.report()}

    def _look(self) -> tuple[TagReport, ...]:
        found = self._stored()
        for tag, (num_bytes, policy) in self.planned.items():
            known = found.get(tag)
            backing = "mapped_dirty" if tag in self._granted else "discarded"
            if known is None or (known.num_bytes < num_bytes and tag in self._granted):
                found[tag] = TagReport(tag, num_bytes, policy, backing)
        if self.comms is not None and not self.planned:  # their size is not known: the measurement sees it
            found[COMMS] = TagReport(COMMS, 0, "rematerialise", "discarded" if self._are_comms_away else "mapped_dirty")
        return tuple(found.values())

    # -- done in the tenant's thread

    def release(self, command: MemoryCommand) -> MovedMemory:
        """Communicators first: nothing may be in flight on memory that leaves."""
        if COMMS in command.tags:
            self._release_comms(command)
        moved = [store.release(tags) for store in self.stores if (tags := self._known(store, command.tags))]
        stored = self._stored()
        for tag in command.tags:
            if tag in self.planned and tag in self._granted and tag not in stored:
                self._granted.discard(tag)
                moved.append(MovedMemory(dropped_bytes=self.planned[tag][0]))
        return sum(moved, NOTHING_MOVED)

    def restore(self, command: MemoryCommand) -> MovedMemory:
        """Communicators last: they find the device as it will be."""
        moved = [store.restore(tags) for store in self.stores if (tags := self._known(store, command.tags))]
        self._granted.update(tag for tag in command.tags if tag in self.planned)
        if COMMS in command.tags:
            self._restore_comms(command)
        return sum(moved, NOTHING_MOVED)

    def _known(self, store: AssetStore, tags: Sequence[Tag]) -> list[Tag]:
        have = {tag.tag for tag in store.report()}
        return [tag for tag in tags if tag in have]

    def _release_comms(self, command: MemoryCommand) -> None:
        if self.comms is None or self._are_comms_away:
            return
        try:
            self.comms.release(command.epoch, command.deadline_s)
        except Absent:
            raise  # no memory was released
        except MyxaError:
            self.comms.abort()
            self._are_comms_away = True
            raise
        self._are_comms_away = True

    def _restore_comms(self, command: MemoryCommand) -> None:
        if self.comms is None or not self._are_comms_away:
            return
        try:
            self.comms.restore(command.epoch, command.deadline_s)
        except MyxaError:
            self.comms.abort()
            raise
        self._are_comms_away = False


WORKSPACE: Tag = "workspace"


class WorkspaceRoom:
    """Room on a device that a tenant needs in its turn and that is not allocated ahead: activations, logits. An
    `AssetStore` of so many bytes that are only counted, so that the engine leaves as much as the trainer's step will
    take. But torch keeps what a step took: `vacate` gives back the unused part when the room is given up."""

    def __init__(self, num_bytes: int, vacate: Callable[[], None]) -> None:
        self._num_bytes = num_bytes
        self._vacate = vacate
        self._is_held = True

    def report(self) -> tuple[TagReport, ...]:
        backing = "mapped_dirty" if self._is_held else "discarded"
        return (TagReport(tag=WORKSPACE, num_bytes=self._num_bytes, policy="discard", backing=backing),)

    def release(self, tags: Collection[Tag]) -> MovedMemory:
        left, self._is_held = self._is_held and WORKSPACE in tags, self._is_held and WORKSPACE not in tags
        if left:
            self._vacate()
        return MovedMemory(dropped_bytes=self._num_bytes if left else 0)

    def restore(self, tags: Collection[Tag]) -> MovedMemory:
        self._is_held = self._is_held or WORKSPACE in tags
        return MovedMemory()
