"""How rollout engines come to a new weight version: prepare, commit, and fence the engine that cannot follow.

`Adoption` decides which engine adopts which version when. It is pure. `Adopter` does it, over the contracts of rollout
and trainer. Engines adopt in a rolling fashion, `at_once` of them side by side, each straight to the newest version.

    prepare -> commit    each phase has a deadline, and a shorter one for an engine without progress (`StallCheck`)
    refused, and whole   the engine keeps its version and is asked again, a few times; what a trainer offered that has
                         ended since counts for nothing, and the engine waits for the next trainer's offer
    anything else        the engine is fenced and built again; the other engines are not delayed

    ARRIVED -> JOINED, or SERVING(v) by an earlier coordinator: it has the knobs
    JOINED -> ADOPTING(v) -> SERVING(v) -> ADOPTING(v') -> ...
                 |-> FENCED   it missed a deadline or has torn weights; only a new incarnation comes back
    ADOPTING(v) -> the state before, when the engine refused and its old weights are whole
    SERVING(v) -> JOINED when the engine's weights were taken off its device

Reports of different incarnations may arrive in any order: one of an old incarnation never changes what is known of the
next. A version stays readable while it is the newest one, or while an engine adopts it; older ones are released, oldest
first. A trainer that returns to an older state undoes versions: their numbers come again with other weights. Every
engine is then behind until it adopts a version that was published afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, field
from typing import Literal

from ...core.errors import CallError, Draining, EngineError, MyxaError, NoSuchActor, PeerDied, RemoteError
from ...core.ids import LEADER
from ...core.messages import EngineStatus, WeightAck, WeightChannel, WeightManifest
from ...core.refs import with_deadline
from ...core.timeouts import TIMEOUTS
from ...core.weight_channel import SENT_CHANNELS, WeightProgress
from ..contracts import RolloutContract, TrainerContract
from ..telemetry import Reporter

EngineState = Literal["arrived", "joined", "adopting", "serving", "fenced"]
"""Life of one engine incarnation as adoption sees it."""

_ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    "arrived": frozenset({"joined", "serving", "fenced"}),
    "joined": frozenset({"adopting", "fenced"}),
    "adopting": frozenset({"serving", "joined", "fenced"}),
    "serving": frozenset({"adopting", "joined", "fenced"}),
    "fenced": frozenset(),
}

_UNKNOWN_LINEAGE = -1
MOST_AT_ONCE = 16
"""Where nothing is said: they share the trainer's links, and each has a deadline."""


@dataclass(slots=True)
class _Engine:
    epoch: int
    version: int
    state: EngineState
    lineage: int = _UNKNOWN_LINEAGE
    """Number of rewinds before `version` was published."""
    target: int = -1
    """Version that it is adopting."""
    target_lineage: int = _UNKNOWN_LINEAGE
    refuses_since_s: float | None = None
    """Moment of its first refusal since it adopted last, and since a trainer ended."""
    is_put_off: bool = False
    """It refused its target and is not asked for that one just now."""

    @property
    def takes_part(self) -> bool:
        return self.state not in ("arrived", "fenced")

    def move(self, name: str, to: EngineState) -> None:
        if to not in _ALLOWED[self.state]:
            raise ValueError(f"{name} (epoch {self.epoch}) cannot go from {self.state} to {to}")
        self.state = to


@dataclass(frozen=True, slots=True)
class Adopt:
    """Instruction: bring `engine` (that incarnation) to `manifest`."""

    engine: str
    epoch: int
    manifest: WeightManifest


class Adoption:
    """See the module's head. Methods raise ValueError for moves that the table does not allow."""

    def __init__(self, *, keeps_newest: bool = True, at_once: int = 0) -> None:
        """`keeps_newest` False: the newest version too is released once every engine serves it, since the trainer's
        memory is wanted; an engine that comes later has to wait until it is published again. `at_once`: engines that
        may be in the middle of adopting at the same time; 0: one in eight, at most MOST_AT_ONCE."""
        self._keeps_newest = keeps_newest
        self.at_once = at_once
        """May be changed at any time; engines that adopt already are left to it."""
        self._engines: dict[str, _Engine] = {}
        self._manifests: dict[int, WeightManifest] = {}
        self._ended_trainer = -1
        """Epoch of the last leader that ended."""
        self.lineage = 0

    @property
    def newest(self) -> int:
        """Newest published version, -1 before the first, and after a rewind before the next."""
        return max(self._manifests, default=-1)

    @property
    def present(self) -> Collection[str]:
        """Every engine that is there; a view, which changes with them."""
        return self._engines.keys()

    def statuses(self) -> tuple[EngineStatus, ...]:
        return tuple(
            EngineStatus(rollout=name, version=e.version, running=0, waiting=0) for name, e in self._engines.items()
        )

    @property
    def serving(self) -> dict[str, int]:
        """Engine -> version, for engines that serve (an adopting engine serves its old version); after a rewind that
        may be a version that was undone."""
        return {name: e.version for name, e in self._engines.items() if e.takes_part and e.version >= 0}

    @property
    def adopting(self) -> tuple[str, ...]:
        return tuple(sorted(n for n, e in self._engines.items() if e.state == "adopting"))

    def engines_at(self, version: int | None) -> list[str]:
        """Engines that serve that version of the trainer as it is now, not an undone one; None: any of its versions."""
        return [
            name
            for name, served in self.serving.items()
            if version in (None, served) and self._engines[name].lineage == self.lineage
        ]

    def published(self, manifest: WeightManifest) -> None:
        """A new version can be read. An older one is ignored."""
        if manifest.version >= self.newest:
            self._manifests[manifest.version] = manifest

    def holds(self, version: int) -> bool:
        """Whether that version was published and can still be read."""
        return version in self._manifests

    def rewound(self) -> None:
        """The trainer continues from an older state, in a new process: versions published before cannot be read any
        more and are forgotten, not released. Every engine is behind from now on; engines that serve keep serving."""
        self.lineage += 1
        self._manifests.clear()

    def arrived(self, name: str, epoch: int, version: int = -1) -> bool:
        """An engine reported in; False: its successor was faster. `version` >= 0: it serves that already, by an earlier
        coordinator. An older incarnation of the name is forgotten."""
        if self.epoch_of(name) > epoch:
            return False
        if self.epoch_of(name) < epoch:
            self._engines[name] = _Engine(epoch, version, "arrived")
        return True

    def joined(self, name: str, epoch: int) -> bool:
        """It may adopt from now on, and does so again if what it serves is newer than what the trainer has or there was
        a rewind. False: it ended meanwhile."""
        engine = self._alive(name, epoch)
        if engine is not None and engine.state == "arrived":
            engine.move(name, "joined" if engine.version < 0 else "serving")
            engine.lineage = 0 if engine.version >= 0 and self.lineage == 0 else _UNKNOWN_LINEAGE
        return engine is not None

    def gone(self, name: str, epoch: int) -> bool:
        """That incarnation ended, or an earlier one; whether the engine was there and is not any more."""
        is_known = name in self._engines and self.epoch_of(name) <= epoch
        if is_known:
            del self._engines[name]
        return is_known

    def epoch_of(self, name: str) -> int:
        """Of the incarnation that is there; -1: there is none."""
        engine = self._engines.get(name)
        return engine.epoch if engine is not None else -1

    def next(self) -> Adopt | None:
        """The engine that is furthest behind and may adopt now, or None. Marks it ADOPTING."""
        newest = self.newest
        if newest < 0 or len(self.adopting) >= (self.at_once or min(MOST_AT_ONCE, -(-len(self._engines) // 8))):
            return None
        behind = [
            (e.lineage if e.version >= 0 else _UNKNOWN_LINEAGE - 1, e.version, name)
            for name, e in self._engines.items()
            if e.state in ("joined", "serving")
            and self._is_behind(e)
            and not (e.is_put_off and (e.target_lineage, e.target) == (self.lineage, self.newest))
        ]
        if not behind:
            return None
        name = min(behind)[-1]
        engine = self._engines[name]
        engine.move(name, "adopting")
        engine.target, engine.target_lineage, engine.is_put_off = newest, self.lineage, False
        return Adopt(engine=name, epoch=engine.epoch, manifest=self._manifests[newest])

    def adopted(self, name: str, epoch: int, version: int) -> bool:
        """The engine serves `version`. The word of a dead or fenced incarnation has no effect: False."""
        engine = self._alive(name, epoch)
        if engine is not None:
            engine.move(name, "serving")
            engine.version, engine.lineage, engine.refuses_since_s = version, engine.target_lineage, None
        return engine is not None

    def trainer_ended(self, epoch: int) -> None:
        """The leader with that epoch is gone, so no engine is at fault that cannot take what it published."""
        self._ended_trainer = max(self._ended_trainer, epoch)
        for engine in self._engines.values():
            engine.refuses_since_s = None

    def put_off(self, instruction: Adopt, now_s: float) -> float:
        """The engine refused and keeps what it served; it gets nothing until `ask_again` or a newer version. Returns
        for how many seconds it has refused; 0 for a dead or fenced incarnation, or what an ended trainer published."""
        engine = self._alive(instruction.engine, instruction.epoch)
        if engine is None:
            return 0.0
        engine.move(instruction.engine, "serving" if engine.version >= 0 else "joined")
        engine.is_put_off = True
        if instruction.manifest.lineage <= self._ended_trainer:
            return 0.0
        if engine.refuses_since_s is None:
            engine.refuses_since_s = now_s
        return now_s - engine.refuses_since_s

    def ask_again(self, name: str, epoch: int) -> None:
        """An engine that was put off may be given what it refused."""
        if (engine := self._alive(name, epoch)) is not None:
            engine.is_put_off = False

    def lost(self, name: str, epoch: int) -> None:
        engine = self._alive(name, epoch)
        if engine is not None and engine.state == "serving":
            engine.move(name, "joined")
            engine.version = -1

    def fenced(self, name: str, epoch: int) -> None:
        """The engine missed a deadline or refused: it gets nothing more."""
        if (engine := self._alive(name, epoch)) is not None:
            engine.move(name, "fenced")

    def releasable(self) -> tuple[int, ...]:
        """Versions that no engine will read again, oldest first; they are forgotten by this call."""
        engines = self._engines.values()
        keep = {e.target for e in engines if e.state == "adopting" and e.target_lineage == self.lineage}
        if self._keeps_newest or any(self._is_behind(e) for e in engines if e.takes_part):
            keep.add(self.newest)
        free = tuple(sorted(v for v in self._manifests if v not in keep))
        for version in free:
            del self._manifests[version]
        return free

    def _alive(self, name: str, epoch: int) -> _Engine | None:
        """That incarnation; None: it is dead or fenced."""
        engine = self._engines.get(name)
        return engine if engine and engine.epoch == epoch and engine.state != "fenced" else None

    def _is_behind(self, engine: _Engine) -> bool:
        """Or ahead: a number that the trainer does not have is one of weights that were undone."""
        return engine.lineage != self.lineage or engine.version != self.newest


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


class NoProgress(Exception):
    """An engine made no progress for too long; says where it is."""


@dataclass(slots=True)
class Adopter:
    """See the module's head."""

    report: Reporter
    adoption: Adoption
    limits: AdoptionLimits
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _under_way: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _adopted: asyncio.Event = field(default_factory=asyncio.Event)
    _unreleased: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Lineage and version of releases that the trainer has not acknowledged yet."""
    _is_releasing: bool = False
    _refusals: dict[str, str] = field(default_factory=dict[str, str])
    """Reason that each engine gave last; the same one again is not told."""

    async def ready_engines(self) -> list[str]:
        """Engines that serve any version. Raises EngineError when none comes to one in time."""
        try:
            async with asyncio.timeout(self.limits.prepare_s + max(self.limits.commit_s, self.limits.sent_commit_s)):
                while not (ready := self.adoption.engines_at(None)):
                    self._adopted.clear()
                    await self._adopted.wait()
        except TimeoutError as err:
            raise EngineError("no engine came to a version in time", remedy="see the engines' logs") from err
        return ready

    def look_again(self) -> None:
        """An engine reported in: it may already serve what `ready_engines` waits for."""
        self._adopted.set()

    async def adopt_pending(self) -> None:
        """Adopt, as many engines at once as allowed, until all serve the newest version or are fenced. Versions that
        no engine needs any more are released on the way."""
        async with self._turn:
            while True:
                while (instruction := self.adoption.next()) is not None:
                    name = f"adopt-{instruction.engine}-{instruction.manifest.version}"
                    self._under_way.add(self.report.ctx.spawn(self._bring(instruction), name=name))
                if not self._under_way:
                    break
                with self.report.meter.during("wait-weights", f"adopt {self.adoption.newest}"):
                    done, _ = await asyncio.wait(
                        self._under_way, timeout=TIMEOUTS.coordinator.progress_s, return_when=asyncio.FIRST_COMPLETED
                    )
                self._under_way -= done
                if done:
                    self._release()
            self._release()

    async def _bring(self, instruction: Adopt) -> None:
        """Prepare and commit one engine, and report the result to the bookkeeping."""
        name, epoch, version = instruction.engine, instruction.epoch, instruction.manifest.version
        started_s = self.report.clock.monotonic()
        phase: Phase = "prepare"
        engine = self.report.ctx.ref(RolloutContract, name)
        try:
            prepare = with_deadline(engine, self.limits.prepare_s).prepare_weights(instruction.manifest)
            ack = await self._watched(name, self.limits.prepare_s, prepare)
            if ack.accepted:
                phase = "commit"
                limit_s = self.limits.commit_by(instruction.manifest.channel)
                ack = await self._watched(name, limit_s, with_deadline(engine, limit_s).commit_weights(version))
        except Draining:
            self.adoption.fenced(name, epoch)  # it tells its end itself
            return
        except (NoSuchActor, PeerDied) as err:
            self.gone(name, epoch, f"during {phase} of version {version}: {err.message}")
            return
        except (CallError, NoProgress) as err:
            self.fence(name, epoch, f"{phase} of version {version}: {err}")
            return
        if ack.accepted:
            if not self.adoption.adopted(name, epoch, version):
                return  # that incarnation is over, or was fenced meanwhile
            self._adopted.set()
            adopt_s = self.report.clock.monotonic() - started_s
            self.report.telemetry.metric(version, {"weights/adopt_s": adopt_s})
        elif ack.is_whole:
            await self._put_off(instruction, f"{phase} of version {version} refused: {ack.reason}")
        else:
            self.fence(name, epoch, f"{phase} of version {version} refused: {ack.reason}")

    def gone(self, name: str, epoch: int, reason: str) -> None:
        """That incarnation has ended, or an earlier one. The event comes once, however many notice it."""
        if self.adoption.gone(name, epoch):
            self.report.tell("engine-gone", f"{name} (epoch {epoch}): {reason}")

    async def _watched(self, name: str, limit_s: float, work: Awaitable[WeightAck]) -> WeightAck:
        """The engine's answer. Raises NoProgress, and what the call raises."""
        stall = StallCheck(self.limits.stall_s, self.report.clock.monotonic())
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(name, stall))
                try:
                    async with asyncio.timeout(limit_s):
                        ack = await work
                except TimeoutError as err:
                    raise NoProgress(f"was not done after {limit_s:g} s: {stall.position}") from err
                watch.cancel()
                return ack
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch(self, name: str, stall: StallCheck) -> None:
        """Asks how far it is, from time to time. Raises NoProgress."""
        engine = with_deadline(self.report.ctx.ref(RolloutContract, name), TIMEOUTS.coordinator.progress_s)
        while True:
            await asyncio.sleep(TIMEOUTS.coordinator.progress_s)
            progress: WeightProgress | None = None
            try:
                progress = await engine.weight_progress()
            except CallError as err:
                self.report.ctx.log.debug("%s does not say how far it is: %s", name, err)
            if stall.is_over_limit(progress, self.report.clock.monotonic()):
                raise NoProgress(f"no progress for {self.limits.stall_s:g} s: {stall.position}")

    async def _put_off(self, instruction: Adopt, reason: str) -> None:
        """Ask again after a while. An engine that refuses for too long is fenced."""
        name, epoch, limits = instruction.engine, instruction.epoch, TIMEOUTS.coordinator
        refuses_s = self.adoption.put_off(instruction, self.report.clock.monotonic())
        if self._refusals.get(name) != reason:
            self._refusals[name] = reason
            self.report.warn("weights-refused", f"{name}: {reason}")
        if refuses_s >= limits.refuses_s:
            self.fence(name, epoch, f"{reason} (it has refused for {refuses_s:.0f} s)")
            return
        await asyncio.sleep(min(limits.longest_repeat_s, max(limits.first_repeat_s, refuses_s)))
        self.adoption.ask_again(name, epoch)

    def fence(self, name: str, epoch: int, reason: str) -> None:
        self.adoption.fenced(name, epoch)
        self.report.telemetry.event("engine-fenced", f"{name}: {reason}")
        self.report.ctx.log.error("%s (epoch %d) is fenced: %s", name, epoch, reason)
        self.report.ctx.spawn(self._tell_fenced(name, epoch, reason), name=f"fence-{name}")

    async def _tell_fenced(self, name: str, epoch: int, reason: str) -> None:
        """Until it has heard, or is gone: an actor that never heard of it would wait for weights without end."""
        engine = self.report.ctx.ref(RolloutContract, name)
        while True:
            try:
                await engine.fence(epoch, reason)
            except (Draining, NoSuchActor, PeerDied, RemoteError) as err:
                self.report.ctx.log.info("%s (epoch %d) ends by itself, or is gone: %s", name, epoch, err)
                return
            except CallError as err:
                self.report.ctx.log.warning("the fence did not reach %s: %s; it is repeated", name, err)
                await asyncio.sleep(TIMEOUTS.coordinator.first_repeat_s)
            else:
                return

    def _release(self) -> None:
        """Tell the trainer which versions no engine needs. In its own task: a trainer that hangs must not delay
        the engines."""
        self._unreleased |= {(self.adoption.lineage, version) for version in self.adoption.releasable()}
        if self._unreleased and not self._is_releasing:
            self._is_releasing = True
            self.report.ctx.spawn(self._tell_released(), name="release-weights")

    async def _tell_released(self) -> None:
        """Until it has heard: it may wait for just this before another version, and nothing else would remind us."""
        pause_s = TIMEOUTS.coordinator.first_repeat_s
        try:
            while self._unreleased:
                lineage, version = oldest = min(self._unreleased)
                # Else the trainer went back, and the number may mean other weights; or it was offered again meanwhile.
                if lineage == self.adoption.lineage and not self.adoption.holds(version):
                    try:
                        await with_deadline(
                            self.report.ctx.ref(TrainerContract, LEADER), TIMEOUTS.coordinator.release_s
                        ).release_weights(version)
                    except MyxaError as err:
                        self.report.ctx.log.warning("the trainer did not hear that version %d may go: %s", version, err)
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, TIMEOUTS.coordinator.longest_repeat_s)
                        continue
                self._unreleased.discard(oldest)
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
    def position(self) -> str:
        """Where it was when it was heard last, for errors."""
        if self._last is None:
            return SILENT
        return f"{self._last.at}, silent since" if self._is_silent else self._last.at

    def is_over_limit(self, progress: WeightProgress | None, now_s: float) -> bool:
        """What the engine answered, None for no answer; whether it made no progress for longer than it may. An answer
        that nothing can be counted just now counts as progress: then only the phase's deadline counts."""
        last, self._last = self._last, progress or self._last
        self._is_silent = progress is None
        if progress is not None and (last is None or not progress.is_counted or progress.num_done != last.num_done):
            self._moved_s = now_s
        return bool(self._limit_s) and now_s - self._moved_s > self._limit_s
