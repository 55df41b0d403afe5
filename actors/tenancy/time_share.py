"""Trainer and engines on the same devices, in turns, as the leader asks for it: one lease for each change of hands.

    set_up    the trainer's gang may load
    take      the trainer has the device: engines are stopped, their requests wait with the tokens they have
    offer     the engines' weights have room again, engines that were not loaded yet load; nothing generates
    give      the engines have the device: requests continue

Between `offer` and `give` the weights are handed over on the device as in any other run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ...core.actor import PeerEvent
from ...core.device_memory import OPTIMIZER_PARTS, LeaseRequest, Tag, wholes
from ...core.errors import CallError, LeaseRefused
from ...core.refs import together, with_deadline
from ...core.timeouts import TIMEOUTS
from ..contracts import MemoryContract, RolloutContract
from ..telemetry import Reporter

ATTEMPTS = 3
"""At one lease, before its refusal ends the gang."""
TRAINER, ROLLOUT = "trainer", "rollout"
TRAINER_TAGS: tuple[Tag, ...] = ("params", "grads", "masters", *OPTIMIZER_PARTS, "frozen", "workspace", "nccl")
ROLLOUT_TAGS: tuple[Tag, ...] = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class TimeShareOptions:
    """Plain settings."""

    manager: str
    """Actor name of the memory manager."""
    trainers: tuple[str, ...]
    rollouts: tuple[str, ...]
    switch_s: float
    """How long one lease may take."""
    start_s: float


class TimeShare:
    """See the module's head. One per leader."""

    def __init__(self, report: Reporter, options: TimeShareOptions) -> None:
        self._report, self._ctx, self._meter, self._clock = report, report.ctx, report.meter, report.clock
        self._options = options
        self._manager = with_deadline(self._ctx.ref(MemoryContract, options.manager), options.switch_s + 10.0)
        self._rollouts = {name: self._ctx.ref(RolloutContract, name) for name in options.rollouts}
        self._num_asked = 0
        self._loaded: set[tuple[str, int]] = set()
        """Rollout actors, with their process's epoch, whose engines were ordered to load. A tenant's state does not say
        so: room may have been granted to one that has not loaded."""
        self.has_newcomers = False
        self._switch_s = 0.0
        self._copied_bytes = 0
        self._exposed_s = 0.0
        self._idle_since: float | None = None

    async def set_up(self) -> None:
        """Room for the trainer; to be called before anything is loaded."""
        await self._ctx.wait_for(self._options.manager, *self._options.trainers, timeout_s=self._options.start_s)
        await self._insist(lambda: self._lease(TRAINER, TRAINER_TAGS, is_active=True, quiet=()))

    async def take(self) -> None:
        """The trainer's turn. An engine that did not stop in time resumes when the lease is refused, and is asked
        again; an absent engine delays nothing."""
        self._idles()
        await self._insist(lambda: self._lease(TRAINER, TRAINER_TAGS, is_active=True, quiet=(ROLLOUT,)))
        self._works()

    def trained(self) -> None:
        """The trainer is done: until `give` nothing computes."""
        self._idles()

    async def offer(self) -> None:
        """Room for the engines' weights, on top of what the trainer still holds if that fits. Engines that were not
        loaded yet need all of their room at once, and load. One that dies meanwhile is waited for."""
        await self._insist(self._offer, needs_engines=True)

    async def give(self) -> None:
        """The engines' turn. One that died since the offer is waited for: it has no weights until the next."""
        await self._insist(
            lambda: self._lease(ROLLOUT, ROLLOUT_TAGS, is_active=True, quiet=(TRAINER,)), needs_engines=True
        )
        self._works()

    async def _insist(self, ask: Callable[[], Awaitable[None]], *, needs_engines: bool = False) -> None:
        """Ask (with `needs_engines` once all of them are there), and again when one left or the lease was refused."""
        for attempt in range(ATTEMPTS):
            if needs_engines:
                await self._ctx.wait_for(*self._options.rollouts, timeout_s=self._options.start_s)
            try:
                await ask()
            except (CallError, LeaseRefused) as err:
                if attempt + 1 == ATTEMPTS:
                    raise
                self._ctx.log.warning("a change of turns: %s; trying again", err)
                await asyncio.sleep(TIMEOUTS.memory.again_s)
            else:
                return

    async def _offer(self) -> None:
        self.has_newcomers = False  # before looking: who comes later sets it again
        reports = await together({name: ref.memory_report() for name, ref in self._rollouts.items()})
        empty = {
            name: report.epoch
            for name, report in reports.items()
            if report is not None and (name, report.epoch) not in self._loaded
        }
        tags = ROLLOUT_TAGS if empty else ("weights",)
        await self._lease(ROLLOUT, tags, is_active=False, quiet=(TRAINER,))
        if empty:
            with self._meter.during("wait-memory", "engines load"):
                refs = {name: with_deadline(self._rollouts[name], self._options.start_s) for name in empty}
                await together({name: ref.load_engine() for name, ref in refs.items()})
            self._loaded |= set(empty.items())

    def on_peer(self, event: PeerEvent) -> None:
        """A rollout actor that was started again has an engine to load and weights to be given."""
        if event.kind in ("up", "restarted") and event.name in self._options.rollouts:
            self.has_newcomers = True

    async def _lease(self, gang: str, tags: tuple[Tag, ...], *, is_active: bool, quiet: tuple[str, ...]) -> None:
        self._num_asked += 1
        request = LeaseRequest(
            gang=gang,
            tags=tags,
            is_active=is_active,
            quiet=quiet,
            deadline_s=self._options.switch_s,
            request_id=f"{self._ctx.name}.{self._ctx.epoch}.{self._num_asked}",
        )
        started = self._clock.monotonic()
        with self._meter.during("wait-memory", f"lease {gang}"):
            reply = await self._report.ask(self._options.manager, lambda: self._manager.lease(request))
        self._switch_s += self._clock.monotonic() - started
        self._copied_bytes += reply.copied_bytes
        if not reply.granted:
            self._report.telemetry.event("lease-refused", f"{gang}: {reply.reason}")
            raise LeaseRefused(
                f"{gang} cannot have {wholes(tags)}: {reply.reason}",
                remedy="see `myxa mem`; lower what the engine or the trainer takes, or free the device",
            )

    def _idles(self) -> None:
        if self._idle_since is None:
            self._idle_since = self._clock.monotonic()

    def _works(self) -> None:
        if self._idle_since is not None:
            self._exposed_s += self._clock.monotonic() - self._idle_since
            self._idle_since = None

    def metrics(self) -> dict[str, float]:
        """Of the time since the last call: in leases, idle, and bytes copied between device and host."""
        values = {
            "memory/switch_s": self._switch_s,
            "memory/exposed_s": self._exposed_s,
            "memory/copied_bytes": float(self._copied_bytes),
        }
        self._switch_s, self._exposed_s, self._copied_bytes = 0.0, 0.0, 0
        return values
