"""Brings engines to new weight versions, some at a time, as `adoption.py` decides; fences those that cannot follow.

    prepare -> commit    each has a deadline, and a shorter one for standing still: who stands is asked how far it is
    refused, and whole   it goes on with what it served, and is asked again: what cannot be read is not its fault
    anything else        it is named, fenced and built anew; the others go on

Knows contracts. Part of the coordinator.

Has an adoption stood still for too long? Pure: what the engine says and the time are passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import ActorContext
from ...core.chaos import reached
from ...core.clock import Clock
from ...core.errors import CallError, Draining, EngineError, MyxaError, NoSuchActor, PeerDied, RemoteError
from ...core.messages import WeightAck, WeightChannel
from ...core.refs import with_deadline
from ...core.weight_channel import SENT_CHANNELS, WeightProgress
from ..contracts.roles import RolloutContract, TrainerContract
from .adoption import Adopt, Adoption

LOOK_S = 1.0
"""Between two questions how far an engine is, and two looks for engines that may begin."""
MAX_REFUSALS = 5
"""In a row; after the next one it is fenced, if others could take what it refuses; else it is asked again as before,
but nobody waits for it any more. A trainer that is away is not held against the engine."""
RETRY_S = 1.0
"""Before an engine that refused is asked again, doubled each time up to `RETRY_LIMIT_S`; and before anything that was
not heard is told again."""
RETRY_LIMIT_S = 4.0

RELEASE_S = 10.0
"""For the trainer to hear that a version may go."""

Phase = Literal["prepare", "commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionLimits:
    """Deadlines of one engine's adoption."""

    prepare_s: float
    commit_s: float
    """Where the engine reads the bytes."""
    sent_commit_s: float = 0.0
    """Where they are sent meanwhile; 0: as long as that."""
    stall_s: float = 20.0
    """Without any progress; 0: the phases' deadlines only."""

    def commit_by(self, channel: WeightChannel) -> float:
        """How long a commit may take whose bytes come by that channel."""
        return self.sent_commit_s or self.commit_s if channel in SENT_CHANNELS else self.commit_s


class StandsStill(Exception):
    """An engine made no progress for too long; says where it stands."""


class Adopter:
    """See the module's head."""

    def __init__(
        self,
        ctx: ActorContext,
        adoption: Adoption,
        *,
        limits: AdoptionLimits,
        on_adopted: Callable[[str, int, int], None],
        on_work: Callable[[], None],
        meter: ActivityMeter,
        telemetry: TelemetryBuffer,
        clock: Clock,
    ) -> None:
        """`on_adopted`: an engine serves a version now (name, epoch, version). `on_work`: `adopt_pending` has something
        to do again, of which nobody but the adopter knows."""
        self._ctx = ctx
        self._adoption = adoption
        self._limits = limits
        self._on_adopted = on_adopted
        self._on_work = on_work
        self._meter = meter
        self._telemetry = telemetry
        self._clock = clock
        self._leader = ctx.ref(TrainerContract, "trainer/0")
        self._turn = asyncio.Lock()
        self._under_way: set[asyncio.Task[None]] = set()
        self._adopted = asyncio.Event()
        self._unreleased: set[tuple[int, int]] = set()
        """Lineage and version of what the trainer was not told yet that nobody needs."""
        self._is_releasing = False
        self._to_ask: set[tuple[str, int]] = set()
        """Engines (name, epoch) that refused too often: asked once in every round, so that a round has an end."""

    async def adopt_pending(self) -> None:
        """As many engines at once as may, until all serve the newest version or are fenced; versions that nobody needs
        any more are let go on the way."""
        async with self._turn:
            while self._to_ask:
                self._adoption.ask_again(*self._to_ask.pop())
            while True:
                while (instruction := self._adoption.next()) is not None:
                    name = f"adopt-{instruction.engine}-{instruction.manifest.version}"
                    self._under_way.add(self._ctx.spawn(self._bring(instruction), name=name))
                if not self._under_way:
                    break
                with self._meter.during("wait-weights", f"adopt {self._adoption.newest}"):
                    done, _ = await asyncio.wait(self._under_way, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._under_way -= done
                if done:
                    self._release()
            self._release()

    async def engines_at(self, version: int | None) -> list[str]:
        """Engines that serve exactly that version (None: any). Raises EngineError when none comes to it in time."""
        try:
            async with asyncio.timeout(self._limits.prepare_s + max(self._limits.commit_s, self._limits.sent_commit_s)):
                while not (ready := self._adoption.engines_at(version)):
                    self._adopted.clear()
                    await self._adopted.wait()
        except TimeoutError as err:
            what = "a version" if version is None else f"version {version}"
            raise EngineError(f"no engine came to {what} in time", remedy="see the engines' logs") from err
        return ready

    def look_again(self) -> None:
        """An engine reported in: it may serve already what somebody waits for."""
        self._adopted.set()

    def fence(self, name: str, epoch: int, reason: str) -> None:
        """Have that incarnation of an engine end and be built anew; the others go on, and nobody waits for it."""
        self._adoption.fenced(name, epoch)
        self._telemetry.event("engine-fenced", f"{name}: {reason}")
        self._ctx.log.error("%s (epoch %d) is fenced: %s", name, epoch, reason)
        self._ctx.spawn(self._tell_fenced(name, epoch, reason), name=f"fence-{name}")

    async def _tell_fenced(self, name: str, epoch: int, reason: str) -> None:
        """Until it has heard, or is gone: one that lives on unheard would get no weights ever again."""
        engine = self._ctx.ref(RolloutContract, name)
        while True:
            try:
                await engine.fence(epoch, reason)
            except (Draining, NoSuchActor, PeerDied, RemoteError) as err:
                self._ctx.log.info("%s (epoch %d) ends by itself, or is gone: %s", name, epoch, err)
                return
            except CallError as err:
                self._ctx.log.warning("%s was not told that it is fenced: %s; it is told again", name, err)
                await asyncio.sleep(RETRY_S)
            else:
                return

    # -- one engine

    async def _bring(self, instruction: Adopt) -> None:
        """Prepare and commit one engine; what becomes of it is told to the bookkeeping."""
        name, epoch, version = instruction.engine, instruction.epoch, instruction.manifest.version
        reached("coordinator.adopt")
        started_s = self._clock.monotonic()
        phase: Phase = "prepare"
        engine = self._ctx.ref(RolloutContract, name)
        try:
            prepare = with_deadline(engine, self._limits.prepare_s).prepare_weights(instruction.manifest)
            ack = await self._watched(name, self._limits.prepare_s, prepare)
            if ack.accepted:
                phase = "commit"
                limit_s = self._limits.commit_by(instruction.manifest.channel)
                ack = await self._watched(name, limit_s, with_deadline(engine, limit_s).commit_weights(version))
        except (Draining, NoSuchActor, PeerDied) as err:
            text = f"{name} (epoch {epoch}) left during {phase}: {err.message}"
            self._ctx.log.info("engine-left: %s", text)
            self._telemetry.event("engine-left", text)
            self._adoption.gone(name, epoch)
            return
        except (CallError, StandsStill) as err:
            self.fence(name, epoch, f"{phase} of version {version}: {err}")
            return
        if ack.accepted:
            if not self._adoption.adopted(name, epoch, version):
                return  # that incarnation is over, or was fenced meanwhile
            self._adopted.set()
            self._on_adopted(name, epoch, version)
            self._telemetry.metric(version, {"weights/adopt_s": self._clock.monotonic() - started_s})
        elif ack.is_whole:
            await self._put_off(instruction, f"{phase} of version {version} refused: {ack.reason}")
        else:
            self._doubt(version)
            self.fence(name, epoch, f"{phase} of version {version} refused: {ack.reason}")

    async def _watched(self, name: str, limit_s: float, work: Awaitable[WeightAck]) -> WeightAck:
        """The engine's answer. Raises StandsStill, and what the call raises."""
        stall = StallCheck(self._limits.stall_s, self._clock.monotonic())
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(name, stall))
                try:
                    async with asyncio.timeout(limit_s):
                        ack = await work
                except TimeoutError as err:
                    raise StandsStill(f"was not done after {limit_s:g} s: {stall.at}") from err
                watch.cancel()
                return ack
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch(self, name: str, stall: StallCheck) -> None:
        """Asks how far it is, from time to time. Raises StandsStill."""
        engine = with_deadline(self._ctx.ref(RolloutContract, name), LOOK_S)
        while True:
            await asyncio.sleep(LOOK_S)
            progress: WeightProgress | None = None
            try:
                progress = await engine.weight_progress()
            except CallError as err:
                self._ctx.log.debug("%s does not say how far it is: %s", name, err)
            if stall.heard(progress, self._clock.monotonic()):
                raise StandsStill(f"no progress for {self._limits.stall_s:g} s: {stall.at}")

    async def _put_off(self, instruction: Adopt, reason: str) -> None:
        """Ask again after a while. One that refuses too often what others could take, or serves nothing anyway, is
        fenced; if nobody could take it, it may have been published badly: the trainer is asked to do that anew, and the
        engine to take it, but it is not waited for."""
        name, epoch, version = instruction.engine, instruction.epoch, instruction.manifest.version
        num_refusals = self._adoption.put_off(name, epoch)
        self._telemetry.event("weights-refused", f"{name}: {reason}")
        self._ctx.log.warning("weights-refused: %s: %s", name, reason)
        pause_s = min(RETRY_LIMIT_S, RETRY_S * 2 ** max(num_refusals - 1, 0))
        if num_refusals <= MAX_REFUSALS or not self._ctx.peers("trainer/0"):
            await asyncio.sleep(pause_s)
            self._adoption.ask_again(name, epoch)
            return
        self._doubt(version)
        if name not in self._adoption.serving or self._adoption.engines_at(version):
            self.fence(name, epoch, f"{reason} ({num_refusals} refusals in a row)")
        else:
            self._ctx.spawn(self._ask_later(name, epoch, pause_s), name=f"ask-again-{name}")

    def _doubt(self, version: int) -> None:
        """An engine is given up, or not waited for, over `version`. If none has it, its publication may be at fault."""
        if not self._adoption.engines_at(version):
            self._ctx.spawn(self._have_published_again(version), name=f"publish-again-{version}")

    async def _have_published_again(self, version: int) -> None:
        try:
            await with_deadline(self._leader, RELEASE_S).publish_again(version)
        except MyxaError as err:
            self._ctx.log.warning("the trainer was not asked to publish version %d again: %s", version, err)

    async def _ask_later(self, name: str, epoch: int, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        self._to_ask.add((name, epoch))
        self._on_work()

    def _release(self) -> None:
        """Have the trainer told which versions nobody needs. On the side: one that stands still must not hold up the
        engines."""
        self._unreleased |= {(self._adoption.lineage, version) for version in self._adoption.releasable()}
        if self._unreleased and not self._is_releasing:
            self._is_releasing = True
            self._ctx.spawn(self._tell_released(), name="release-weights")

    async def _tell_released(self) -> None:
        """Until it has heard: it may wait for just this before it makes another version, and then nothing else would
        ever happen that could remind us."""
        pause_s = RETRY_S
        try:
            while self._unreleased:
                of, version = told = min(self._unreleased)
                # Else the trainer went back, and the number may mean other weights; or it was offered again meanwhile.
                if of == self._adoption.lineage and not self._adoption.holds(version):
                    try:
                        await with_deadline(self._leader, RELEASE_S).release_weights(version)
                    except MyxaError as err:
                        self._ctx.log.warning("the trainer was not told that version %d may go: %s", version, err)
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, RETRY_LIMIT_S)
                        continue
                self._unreleased.discard(told)
        finally:
            self._is_releasing = False


SILENT = "it did not say where it is"


class StallCheck:
    """Of one phase of one engine's adoption."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        """`limit_s`: without any movement at most; 0: as long as it likes."""
        self._limit_s = limit_s
        self._moved_s = now_s
        self._last: WeightProgress | None = None
        self._is_silent = False

    @property
    def at(self) -> str:
        """Where it was when it was heard last, for errors."""
        where = self._last.at if self._last is not None else SILENT
        return f"{where}, silent since" if self._is_silent and self._last is not None else where

    def heard(self, progress: WeightProgress | None, now_s: float) -> bool:
        """What the engine answered, None for no answer; whether it stands still for longer than it may.

        An answer that says that nothing can be counted just now is a sign of life: the phase's deadline has the say.
        """
        last, self._last = self._last, progress or self._last
        self._is_silent = progress is None
        if progress is not None:
            is_first = last is None
            if is_first or not progress.is_counted or progress.num_done != last.num_done:
                self._moved_s = now_s
        return bool(self._limit_s) and now_s - self._moved_s > self._limit_s
