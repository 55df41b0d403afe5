"""The coordinator role: run state machine, version clock, adoption of weights, evaluation, knobs, the end of the run.

It moves no data and admits no sample: rollout, buffer and trainer work without it, up to the admission limit. The
phases of a run are in `run_state`; the launcher reads them here, and ends the processes of a run that is over.

It may die at any time. What only it knows (the phase) is in its journal before it takes effect; what it decided
about knobs is in the audit log. The trainer's version and the engines' versions are reported to its next incarnation,
which continues in the same phase:
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ...core.actor import PeerEvent
from ...core.errors import CallError, LedgerError, MyxaError, NotReady, TrainError
from ...core.ids import LEADER
from ...core.knobs import (
    ChangeReply,
    ChangeRequest,
    KnobMove,
    KnobSheet,
    KnobState,
    KnobTable,
    KnobValue,
    KnobVerdict,
    LiveKnobs,
    Operator,
    PauseVerb,
)
from ...core.messages import EngineStatus, EvalResult, RunStatus, StepReport, WeightManifest
from ...core.timeouts import TIMEOUTS
from ..contracts import BufferContract, CoordinatorContract, TrainerContract
from ..knobs.owner import LOG_LEVEL, PAUSE_AT, KnobOwner, OwnsKnobs, section_knobs
from ..weights.rollout_update import Adopter, Adoption
from .audit import read_audit
from .evaluator import Evaluator
from .knob_conductor import KnobConductor, Order, restore
from .knob_decisions import ChangeDraft, OwnerStates, draft_change
from .options import COORDINATOR_TUNABLES, CoordinatorOptions
from .run_state import CoordinatorJournal, PhaseMoves, RunContext, RunState

OTHER_OWNERS = ("buffer", LEADER)
"""Owners of knobs beside the rollout actors, which report in."""


class Coordinator(OwnsKnobs, CoordinatorContract):
    """The run state machine and the parts that it is made of."""

    mailbox_size = 4096

    @property
    def _state(self) -> RunState:
        return self._journal.state

    def __init__(self, *, options: CoordinatorOptions) -> None:
        self._options = replace(options)
        self._journal = CoordinatorJournal(options.journal_path, options.launch)
        self._adoption = Adoption(keeps_newest=not options.takes_turns, at_once=options.weights.adopt_at_once)
        self._changed = asyncio.Event()
        self._end_moved = asyncio.Event()
        """`max_wall_s` changed."""
        self._heard: set[str] = set()
        """Trainer and rollout actors that reported in to this incarnation."""
        self._reported = asyncio.Event()
        self._trainer_is_up = asyncio.Event()
        self._restored: LiveKnobs | None = None

    async def on_start(self) -> None:
        """Raises ConfigError for a journal that was damaged, LedgerError for an audit log that cannot be read."""
        self._clock = self.ctx.clock
        is_anew, ignored = self._journal.load()
        run = RunContext.begin(self.ctx, options=self._options, journal=self._journal)
        self.meter, self._telemetry, self._event, self._keep = run.meter, run.telemetry, run.tell, run.keep
        self._phases = PhaseMoves(run, self._changed.set)
        self._make_parts(run)
        self.knob_owner = KnobOwner(
            self.ctx.name,
            (*section_knobs(COORDINATOR_TUNABLES, self._options, self._use_knobs), LOG_LEVEL),
            self._telemetry,
        )
        if is_anew:
            state = self._state
            self._event("coordinator-restarted", f"the run is {state.phase}, version {state.version}")
            if state.has_stale_engines:
                self._adoption.rewound()
        self._take_up_knobs(is_anew=is_anew)
        if ignored:
            self._event("journal-ignored", ignored)
        for prefix in ("rollout/", *OTHER_OWNERS):
            self.ctx.watch(prefix)
        self.ctx.spawn(self._run(is_anew=is_anew), name="coordinator-run")

    def _make_parts(self, run: RunContext) -> None:
        engines = self._adoption.present
        self.conductor = KnobConductor(
            run, own=self, engines=engines, on_broken=self._owner_is_broken, on_decided=lambda: self.control.look()
        )
        self._adopter = Adopter(run, self._adoption, self._options.limits)
        self.evaluator = Evaluator(run, self._adoption, self._adopter)
        self.control = RunControl(run, self.conductor)
        self._leader = LeaderControl(run)

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name.startswith(OTHER_OWNERS):
            if event.kind in ("up", "restarted"):
                self.ctx.spawn(self.conductor.joined(event.name), name=f"knobs-for-{event.name}")
            if event.name == LEADER and event.kind != "up":
                self._adoption.trainer_ended(event.epoch - (event.kind == "restarted"))
        elif event.kind in ("down", "restarted"):  # its next incarnation may have reported in before
            self._adopter.gone(event.name, event.epoch - (event.kind == "restarted"), event.reason)
            self._changed.set()

    async def _run(self, *, is_anew: bool) -> None:
        if is_anew:
            await self._rejoin()
            if self._state.phase == "running":
                self.meter.switch("wait-data", "orders")
        self.control.look()
        self.conductor.begin()
        if self._state.is_over:
            return
        if self._state.phase == "starting":
            await self._keep()
            await self._start_run()
        self.ctx.spawn(self._end_by_time(), name="wall-clock")
        await self._adopt_forever()

    def _use_knobs(self) -> None:
        self._adoption.at_once = self._options.weights.adopt_at_once
        self._end_moved.set()

    def _take_up_knobs(self, *, is_anew: bool) -> None:
        """What an earlier incarnation decided. Raises LedgerError for an audit log that cannot be read."""
        self.conductor.decisions.continue_from(self._state.past_epoch)
        try:
            self.conductor.decisions.replay(read_audit(self._options.audit_path))
        except LedgerError as error:
            if is_anew:
                raise
            self._event("audit-incomplete", str(error))
        self.knob_owner.take(self.conductor.decisions.news(0))

    async def _start_run(self) -> None:
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._trainer_is_up.wait()
                await self._restore_knobs()
                while self._state.phase == "starting" and self._options.has_engines and not self._adoption.serving:
                    self._changed.clear()
                    await self._adopt()
                    if not self._adoption.serving:
                        await self._changed.wait()
        except TimeoutError:
            # Another attempt of this actor would wait as long for the same: the run has failed, not its coordinator.
            is_up = self._trainer_is_up.is_set()
            missing = "no rollout actor had an engine that serves" if is_up else "it was not ready"
            usual = "see its log; a model that does not load or a missing package is the usual cause"
            why = f"{missing} within {self._options.start_timeout_s:g} s -- {usual}"
            await self._actor_failed("rollout" if is_up else LEADER, why)
            return
        self.meter.switch("wait-data", "orders")
        if self._options.eval.at_start and self._state.phase == "starting":
            await self.evaluator.attempt_anew()
        if self._state.phase == "starting":
            self._state.started_wall_s = self._clock.wall()
            if await self._phases.to("running"):
                self._leader.start()

    async def _restore_knobs(self) -> None:
        """Before any engine has weights and draws; with the first of them, which says what knobs such actors have."""
        is_needed = self._options.has_engines or (self._restored is not None and self._restored.knobs)
        while self._state.phase == "starting" and is_needed and not self._adoption.present:
            self._changed.clear()
            await self._changed.wait()
        if self._state.phase == "starting" and not self._state.has_restored:
            self._state.past_epoch = await restore(self.conductor, self._restored, self._state.version, self._event)
            self._state.has_restored = True
            await self._keep()

    def _hears(self, name: str) -> None:
        self._heard.add(name)
        self._reported.set()

    async def _rejoin(self) -> None:
        """Of one that starts again in a run: until that can continue. Actors that died then are not waited for."""
        began_s, limit_s = self._clock.monotonic(), TIMEOUTS.coordinator.rejoin_s
        for name in (name for prefix in OTHER_OWNERS for name in self.ctx.peers(prefix)):
            self.ctx.spawn(self.conductor.joined(name), name=f"knobs-for-{name}")
        try:
            async with asyncio.timeout(limit_s):
                while self._missing() and not self._state.is_over:
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            self._event("coordinator-alone", f"not heard within {limit_s:g} s: {', '.join(self._missing())}")
        took_s = self._clock.monotonic() - began_s
        names = ", ".join(self._adoption.present) or "no rollout actor"
        self._event("coordinator-attached", f"version {self._state.version}, {names}; waited {took_s:.2f} s")

    def _missing(self) -> list[str]:
        expected = [*([LEADER] if self._state.version >= 0 else ()), *sorted(self.ctx.peers("rollout/"))]
        return [name for name in expected if name not in self._heard]

    def _age_s(self) -> float:
        """Since training began, also while the coordinator is away."""
        began_s = self._state.started_wall_s
        return max(self._clock.wall() - began_s, 0.0) if began_s else 0.0

    async def _end_by_time(self) -> None:
        while True:
            seconds = self._options.run.max_wall_s
            self._end_moved.clear()
            try:
                async with asyncio.timeout(seconds - self._age_s() if seconds else None):
                    await self._end_moved.wait()
            except TimeoutError:
                return await self.stop(f"run.max_wall_s = {seconds:g} s is over")

    async def _adopt_forever(self) -> None:
        while self._state.phase in ("running", "draining"):
            self._changed.clear()  # before: what happens meanwhile is looked at again
            await self._adopt()
            if self._state.leader_reason is not None:
                await self._end(self._state.leader_reason)
                return
            await self._changed.wait()

    async def _adopt(self) -> None:
        await self._adopter.adopt_pending()
        if self._state.has_stale_engines and set(self._adoption.serving) <= set(self._adoption.engines_at(None)):
            self._state.has_stale_engines = False
            await self._keep()

    async def rollout_ready(self, status: EngineStatus, epoch: int) -> None:
        name = status.rollout
        if self._adoption.arrived(name, epoch, status.version):  # from here on it hears of every change
            await self.conductor.joined(name)
            if self._adoption.joined(name, epoch):
                self._adopter.look_again()
                self._event("engine-joined", f"{name} (epoch {epoch})")
                self._changed.set()
        self._hears(name)

    async def trainer_ready(
        self,
        version: int,
        manifest: WeightManifest | None,
        facts: dict[str, str],
        live: LiveKnobs | None = None,
        is_leading: bool = False,
    ) -> None:
        is_again = self._trainer_is_up.is_set()
        if is_leading:
            self._state.version = max(self._state.version, version)
            self._event("trainer-ready", f"continues from version {version}")
            # The trainer's loop is running, whatever the journal says: no part of a start is repeated.
            if self._state.phase == "starting":
                self._state.started_wall_s = self._clock.wall()
                await self._phases.to("running")
            self._leader.tell_stop()
        elif self._state.phase == "starting":
            if is_again and version != self._state.version:
                self._rewound()
            self._state.version, self._restored = version, live
            self._event("trainer-ready", f"version {version}", **facts)
        else:
            await self._rewind(version)
        if manifest is not None:
            self._adoption.published(manifest)
        await self._keep()
        self._trainer_is_up.set()
        self._hears(LEADER)
        self._changed.set()
        if self._state.phase == "running" and not is_leading:
            self._leader.start()
        elif self._state.phase == "starting" and self._state.has_restored and is_again:
            self.ctx.spawn(self._adopt(), name="adopt-again")  # the start may wait for engines at its weights

    async def _rewind(self, version: int) -> None:
        """The gang was restarted in mid-run: engines keep their weights until they adopt a version published since."""
        before, self._state.version = self._state.version, version
        self._rewound()
        await self.conductor.rewound(before, version)
        is_back = version != before or self._trainer_is_up.is_set()
        self._event(
            "trainer-restarted" if is_back else "trainer-ready", f"continues from version {version}, was at {before}"
        )

    def _rewound(self) -> None:
        """The trainer returned to an older version; the numbers above it come again with other weights."""
        self._state.has_stale_engines, self._state.eval_version = self._options.has_engines, -1
        self._adoption.rewound()

    async def version_made(self, manifest: WeightManifest | None, report: StepReport) -> None:
        before = self._state.version
        self._state.version = max(before, report.version)
        if manifest is not None:
            self._adoption.published(manifest)
        self._changed.set()
        if report.version <= before:
            return  # a repeated message
        self.control.look()
        if self.conductor.version_made(before, report.version):
            await self._keep()  # what is in force stays so when the trainer is thrown back
        every = self._options.eval.every
        if every and report.version % every == 0 and report.version != self._num_steps():
            self.ctx.spawn(self._evaluate(), name=f"evaluate-{report.version}")

    def _num_steps(self) -> int:
        return int(self.conductor.decisions.latest("num_steps", self._options.run.num_steps))

    async def trainer_finished(self, version: int, reason: str) -> None:
        self._state.leader_reason = reason
        await self._keep()
        self._changed.set()

    async def _actor_failed(self, name: str, error: str) -> None:
        self._state.reason = self._state.error = self._state.error or f"{name}: {error}"
        if not self._state.is_over:
            await self._phases.to("failed")

    async def stop(self, reason: str) -> None:
        self._state.reason = self._state.reason or reason
        if self._state.phase == "starting":
            self._state.leader_reason = reason
            await self._phases.to("draining")
        elif not self._state.is_over:
            self._state.stop_reason = self._state.stop_reason or reason
            try:
                await self._keep()
            finally:  # the caller may be cancelled meanwhile
                self._leader.tell_stop()

    async def _evaluate(self) -> None:
        result = await self.evaluator.attempt_due()
        if result is not None:
            await self._mind_reward(result.mean_reward)

    async def _mind_reward(self, reward: float) -> None:
        target = self._options.run.stop_reward
        if target and reward >= target and self._state.phase == "running":
            await self.stop(f"held-out reward {reward:.3f} reached run.stop_reward = {target:g}")

    async def _owner_is_broken(self, owner: str, why: str) -> None:
        if owner.startswith("rollout/"):
            if (epoch := self._adoption.epoch_of(owner)) >= 0:
                self._adopter.fence(owner, epoch, why)
        else:
            await self._actor_failed(owner, why)

    # -- operators, owners of knobs, engines: answered by the parts

    async def change_knobs(self, request: ChangeRequest) -> ChangeReply:
        with self.meter.during("wait-data", "knobs"):
            return await self.conductor.change(request)

    async def undo(self, who: Operator, reason: str, epoch: int = 0) -> ChangeReply:
        with self.meter.during("wait-data", "knobs"):
            return await self.conductor.undo(who, reason, epoch)

    async def knob_table(self) -> KnobTable:
        return await self.conductor.table()

    async def live_knobs(self) -> LiveKnobs:
        return await self.conductor.live()

    async def knobs_in_force(self, after: int, number: int) -> LiveKnobs:
        return await self.conductor.news(after, number)

    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        limit_s, age_s = float(values.get("max_wall_s", 0.0)), self._age_s()
        refusal = f"max_wall_s = {limit_s:g}: the run is {age_s:.0f} s old and would end at once; `myxa down` ends it"
        return KnobVerdict(refusal=refusal if 0 < limit_s <= age_s else "")

    async def knobs_decided(self, epoch: int) -> None:
        self.knob_owner.take(self.conductor.decisions.news(self.knob_owner.heard))

    async def rollout_leaving(self, rollout: str, reason: str) -> None:
        if self._adoption.gone(rollout, self._adoption.epoch_of(rollout)):
            self._event("engine-left", f"{rollout}: {reason}")
            self._changed.set()

    async def weights_lost(self, rollout: str, epoch: int) -> None:
        self._adoption.lost(rollout, epoch)

    async def weights_offered(self, manifest: WeightManifest) -> None:
        self._adoption.published(manifest)
        self._changed.set()

    async def set_pause(self, verb: PauseVerb, who: Operator, reason: str, num_steps: int = 0) -> int:
        return await self.control.set_pause(verb, who, reason, num_steps)

    async def checkpoint_now(self, export: bool) -> str:
        return await self.control.checkpoint(export=export)

    async def evaluate_now(self, name: str) -> EvalResult:
        if (result := await self.evaluator.evaluate(name)) and not name:
            await self._mind_reward(result.mean_reward)
        return result

    async def _end(self, reason: str) -> None:
        if self._state.phase == "running":
            await self._phases.to("draining")
        self._state.reason = self._state.reason or reason
        await self._adopt()
        await self.evaluator.attempt_anew()
        if self._state.phase == "draining":
            await self._phases.to("finished")

    async def status(self) -> RunStatus:
        engines = self._adoption.statuses()
        return self._state.status(self._options.run.name, self._num_steps(), engines, self.control.paused)


class LeaderControl:
    """Sends start, continue and stop to the trainer's leader; retries until acknowledged. An order to an earlier gang
    is void: the new gang gets the next one when it reports in."""

    def __init__(self, run: RunContext) -> None:
        self._ctx, self._state, self._ask = run.ctx, run.state, run.ask
        self._leader = run.ctx.ref(TrainerContract, LEADER)
        self._starting: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        self._starting = self._ctx.spawn(self._start(), name="run-leader")

    async def _start(self) -> None:
        if (telling := self.tell_stop()) is not None:
            await asyncio.shield(telling)  # before it makes a step too many; its successor gets the order too
        try:
            await self._ask(LEADER, self._run_leader)
        except CallError as error:
            if LEADER in self._ctx.peers(LEADER):
                raise
            self._ctx.log.warning("%s is gone: %s; the next one is started when it reports in", LEADER, error)

    async def _run_leader(self) -> None:
        try:
            await self._leader.run_leader(self._state.version)
        except NotReady as error:
            self._ctx.log.warning("the gang was replaced: %s; the new one is started when it reports in", error)

    def tell_stop(self) -> asyncio.Task[None] | None:
        """If the run is to end, send that to the leader until it acknowledges. None: the run is not to end."""
        if self._state.stop_reason and (self._telling is None or self._telling.done()):
            self._telling = self._ctx.spawn(self._tell_stop(self._state.stop_reason), name="stop-leader")
        return self._telling

    async def _tell_stop(self, reason: str) -> None:
        while self._state.leader_reason is None and not self._state.is_over:
            try:
                return await self._leader.stop_leader(reason)
            except MyxaError as error:
                self._ctx.log.warning("the order to end did not reach %s: %s; it is repeated", LEADER, error)
            await asyncio.sleep(TIMEOUTS.coordinator.tell_again_s)
        return None


_BUFFER = OwnerStates([KnobSheet(owner="buffer", knobs=(KnobState(tunable=PAUSE_AT, value=-1, first=-1),))], {})
"""A pause can be decided while the buffer is away."""


class RunControl:
    """What operators do to a run beside knobs: pause, resume, step, write a checkpoint. A pause is a value of the
    buffer's knob `pause_at`: nothing is drawn or claimed, a claimed step is trained to its end."""

    def __init__(self, run: RunContext, conductor: KnobConductor) -> None:
        self._meter, self._version, self._tell, self._ask = run.meter, run.version, run.tell, run.ask
        self._conductor, self._file = conductor, run.options.file
        self._buffer = run.ctx.ref(BufferContract, "buffer")
        self._leader = run.ctx.ref(TrainerContract, LEADER)
        self._seen: tuple[int, str] | None = None
        """`pause_at` and `paused` at the last look; None: before the first."""

    @property
    def paused(self) -> str:
        """Why the run is paused; empty while it trains, also while it trains up to a version at which it will pause."""
        return self._conductor.decisions.why(PAUSE_AT.name) if 0 <= self._pause_at() <= self._version() else ""

    def _pause_at(self) -> int:
        return int(self._conductor.decisions.latest(PAUSE_AT.name, -1))

    def look(self) -> None:
        """Book and report that the run was paused or continues; what the first look finds is no news."""
        before, self._seen = self._seen, (self._pause_at(), self.paused)
        if before == self._seen:
            return
        (pause_at, paused), reason = self._seen, self._conductor.decisions.why(PAUSE_AT.name)
        if paused:
            self._meter.switch("paused", "paused")
        elif before is not None:
            self._meter.switch("wait-data", "orders")
        if before is None:
            return
        if paused:
            self._tell("run-paused", f"at version {self._version()}: {paused}")
        elif pause_at < 0:
            self._tell("run-resumed", reason or "the pause is over")
        else:
            self._tell("run-stepping", f"to version {pause_at}: {reason}")

    async def set_pause(self, verb: PauseVerb, who: Operator, reason: str, num_steps: int = 0) -> int:
        """Where the trainer rests. Raises LedgerError if not decided, CallError while the buffer has not obeyed."""
        pause_at = {"pause": 0, "resume": -1, "step": self._version() + num_steps}[verb]
        arguments = {"num_steps": num_steps} if verb == "step" else {}
        request = ChangeRequest(values={PAUSE_AT.name: pause_at}, who=who, reason=reason)

        def drafter(roster: OwnerStates) -> ChangeDraft:
            draft = draft_change(request, roster, self._conductor.decisions)
            same = KnobMove(name=PAUSE_AT.name, owner="buffer", old=pause_at, new=pause_at, boundary="now")
            return replace(draft, moves=draft.moves or (same,))

        reply = await self._conductor.make(Order(verb, request, drafter, arguments, roster=_BUFFER))
        if reply.refused:
            raise LedgerError(f"{verb}: {reply.refused}", remedy="nothing was changed; ask again")
        if reply.warnings:
            raise CallError(
                f"{verb} is decided and recorded, but the buffer has not obeyed yet: {'; '.join(reply.warnings)}",
                remedy="it gets the order again until it does; `myxa ps` shows what it waits for",
            )
        stats = await self._ask("buffer", self._buffer.stats)
        return max(stats.next_step, pause_at)

    async def checkpoint(self, *, export: bool) -> str:
        """The folder. Raises TrainError where the run file rules checkpoints out."""
        if not export and self._file is not None and (why := self._file.refusal({"trainer.checkpoint_every": 1})):
            raise TrainError(f"no checkpoint can be written: {why}", remedy="export the model instead")
        return await self._leader.checkpoint_at_boundary(export)
