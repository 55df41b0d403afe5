"""A rollout actor whose engine shares its device in turns with a trainer.

    (room is made) -> load -> loaded -> (weights handed over) -> (its turn) -> (the trainer's turn) -> ...

    quiesce   the gate closes -> what runs is aborted, its tokens stay with the episodes that asked -> engine parked
    resume    engine unparked -> the gate opens -> those episodes continue from prompt and tokens, others begin

`EngineTurn` is the gate, and the engine's memory as an `AssetStore`: its calls come in a thread, the engine's own
belong to the loop. `RolloutTenant` obeys the memory manager and says when the engine may load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from msgspec.structs import replace

from ...core.daemon_thread import in_daemon_thread
from ...core.device_memory import Tag, TagReport
from ...core.errors import EngineError, MemoryFault, MyxaError
from ...core.protocols import Delta, Engine, GenerateRequest, ReleasesMemory
from ...core.timeouts import TIMEOUTS
from ..contracts import CoordinatorContract
from ..telemetry import Reporter
from ..tenancy.tenant import Tenant, TenantOptions
from ..tenancy.time_share import ROLLOUT
from ..workflows.episode import NOTHING


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Where the engine's memory lies."""

    memory: ReleasesMemory
    devices: tuple[str, ...]
    node: int


class RolloutTenant(Tenant):
    """See the module's head. To be made on the actor's loop."""

    def __init__(
        self, report: Reporter, engine: Engine, tenancy: Tenancy, *, on_change: Callable[[bool], None]
    ) -> None:
        """`on_change(has_turn)`: the device was given to, or taken from, this engine."""
        ctx = report.ctx
        self._report = report
        self.may_load = asyncio.Event()
        """The leader says that the engine may load."""
        self.has_joined = asyncio.Event()
        self.has_weights = False
        """Whether the version that the engine was given last is on its device."""
        self.turn = EngineTurn(engine, tenancy.memory, on_weights_lost=self._tell_loss, on_change=on_change)
        options = TenantOptions(
            name=ctx.name,
            epoch=ctx.epoch,
            gang=ROLLOUT,
            devices=tenancy.devices,
            node=tenancy.node,
            planned={r.tag: (r.num_bytes, r.policy) for r in tenancy.memory.memory_tags()},
        )
        super().__init__(
            options=options,
            gate=self.turn,
            in_thread=lambda work: in_daemon_thread(work, "engine memory"),
            clock=report.clock,
            pids=tenancy.memory.memory_pids,
            telemetry=report.telemetry,
        )

    def set_up(self) -> None:
        """The engine holds its memory now."""
        self.turn.started()
        self.loaded((self.turn,))

    async def _tell_loss(self) -> None:
        self.has_weights = False
        ctx = self._report.ctx
        coordinator = ctx.ref(CoordinatorContract, "coordinator")
        await self._report.ask("coordinator", lambda: coordinator.weights_lost(ctx.name, ctx.epoch))


def require(tenant: RolloutTenant | None, name: str) -> RolloutTenant:
    """Raises EngineError for an actor that takes no turns."""
    if tenant is None:
        raise EngineError(f"{name} has its device for itself", remedy='set memory.share = "switch"')
    return tenant


@dataclass(eq=False)
class EngineTurn:
    """The gate of an engine that has its device in turns; closed until `resume`. Made on the engine's loop."""

    engine: Engine
    memory: ReleasesMemory
    _: KW_ONLY
    on_weights_lost: Callable[[], Awaitable[None]]
    """The memory of the weights came back without contents."""
    on_change: Callable[[bool], None] = lambda _: None
    """Called with `has_turn`: the gate moved."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0
        self._is_started = False
        self._is_ending = False
        self._owes_loss = False
        """Weights came back without contents, which was not reported yet."""
        self._tags: tuple[TagReport, ...] = ()

    @property
    def has_turn(self) -> bool:
        return self._gate.is_set() and not self._is_ending

    def started(self) -> None:
        """The engine is loaded: from here on it can be parked."""
        self._is_started = True
        self._tags = self.memory.memory_tags()

    def end(self) -> None:
        """The actor leaves: requests that wait at the gate, or come to it, end with finish "abort"."""
        self._is_ending = True
        self._gate.set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        while not self.has_turn and not self._is_ending:  # it may be closed again before this wakes up
            await self._gate.wait()
        if self._is_ending:
            yield replace(NOTHING, finish="abort")
            return
        self._num_inside += 1
        self._empty.clear()
        try:
            stream = cast("AsyncGenerator[Delta, None]", self.engine.generate(request))
            async with aclosing(stream):
                async for delta in stream:
                    yield delta
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    # -- the gate that a tenant closes and opens

    async def quiesce(self) -> None:
        """Admit nothing, end what runs (its tokens stay with those who asked), wait until the engine is idle."""
        if not self._is_ending:
            self._gate.clear()
        self.on_change(self.has_turn)
        if not self._is_started:
            return
        while self._num_inside:
            await self.engine.abort()
            try:
                async with asyncio.timeout(TIMEOUTS.rollout.abort_every_s):
                    await self._empty.wait()
            except TimeoutError:
                continue
        await self.memory.park(TIMEOUTS.rollout.park_s)

    async def resume(self) -> None:
        if self._owes_loss:
            raise EngineError("the engine's weights have no contents", remedy="a version has to be given to it first")
        if self._is_started:
            await self.memory.unpark()
        self._gate.set()
        self.on_change(self.has_turn)

    # -- the engine's memory, from a thread

    def report(self) -> tuple[TagReport, ...]:
        """As after the last call that changed it."""
        return self._tags

    def release(self, tags: Collection[Tag]) -> int:
        """Have them leave; nothing is copied. Blocks; never on the loop."""
        self._on_loop(self._release(tags))
        return 0

    def restore(self, tags: Collection[Tag]) -> int:
        """Have them back. Blocks; never on the loop."""
        self._on_loop(self._restore(tags))
        return 0

    async def _release(self, tags: Collection[Tag]) -> None:
        try:
            await self.memory.release_memory(self._known(tags))
        finally:
            self._tags = self.memory.memory_tags()

    async def _restore(self, tags: Collection[Tag]) -> None:
        away = {report.tag for report in self._tags if report.backing == "discarded"}
        try:
            await self.memory.restore_memory(self._known(tags))
        finally:
            self._tags = self.memory.memory_tags()
        self._owes_loss = self._owes_loss or ("weights" in away and "weights" in tags)
        if self._owes_loss:
            await self.on_weights_lost()
            self._owes_loss = False

    def _known(self, tags: Collection[Tag]) -> list[Tag]:
        return [report.tag for report in self._tags if report.tag in tags]

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            future.result(TIMEOUTS.rollout.call_s)
        except MyxaError as err:
            raise MemoryFault(err.message, remedy=err.remedy) from err
        except TimeoutError as err:
            future.cancel()
            raise MemoryFault(
                f"the engine did not answer within {TIMEOUTS.rollout.call_s:g} s", remedy="see its log"
            ) from err
