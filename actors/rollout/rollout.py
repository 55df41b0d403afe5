"""The rollout role: pulls groups from the buffer, has them generated and rewarded, and returns them.

An actor serves nothing before its first commit: the coordinator brings every engine to the trainer's version first. It
reports to the coordinator when its engine is up, and again to one that restarted. Generation continues while weights
are prepared and committed. Tokens outlive the engine: a group whose stream broke is returned with its tokens, all
groups before this actor drops its engine, and long groups are copied to the buffer from time to time.

How the time of the actor is booked:

most rollouts wait for something else      wait-env, what most of those wait for: a tool, an agent, function and file
generating                                 compute, "generate"; "generate at limit" while the actor is full
only rewards                               wait-data, "reward"
only handing over                          wait-data, "hand over"
no groups                                  the buffer's last answer: draw (wait-data), staleness (wait-capacity),
                                           weights, paused (also for the ledger's disk), or a suspect group that
                                           must run alone (wait-data)
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from ...core.activity import FlowSampler
from ...core.actor import PeerEvent
from ...core.device_memory import MemoryCommand, MemoryReply, TenantReport
from ...core.errors import CallError, DiskRefused, EngineError, EngineLied, MessageTooLarge, MyxaError, UserCodeError
from ...core.messages import (
    ActivityKind,
    Assignment,
    DrawBlock,
    DrawRequest,
    EngineStatus,
    EngineUsage,
    EvalRequest,
    EvalResult,
    GatewayPlace,
    GroupDropped,
    GroupFinished,
    GroupReturned,
    RolloutNow,
    SamplingParams,
    WeightAck,
    WeightManifest,
)
from ...core.protocols import Engine, TellsLoading, Tokenizer, WeightRebuilder
from ...core.samples import NO_VERSION, Group, Prompt, Sample
from ...core.timeouts import TIMEOUTS
from ...core.weight_channel import WeightProgress
from ..contracts import BufferContract, CoordinatorContract, GatewayContract, RolloutContract
from ..knobs.owner import LOG_LEVEL, KnobOwner, OwnsKnobs, section_knobs
from ..rewards.guard import GroupBudget, Guarded, Reference, Scorer, all_ended
from ..stream_checks import StreamChecks
from ..telemetry import Reporter
from ..weights.engine_versions import ALWAYS_NEWEST
from ..weights.receive import EngineWeights
from ..workflows.episode import Generate, Lasting, ModelAccess, Resizable, Workflow
from ..workflows.timeline import ACTIVITIES, rows
from .evaluation import Evaluation
from .group_runner import GroupLoad, GroupRunner, Partial, Pool, RolloutOptions, RunningGroup, drop_reason, no_engine
from .knobs import TUNABLES
from .other_models import OtherModel
from .tenant import RolloutTenant, Tenancy, require

if TYPE_CHECKING:
    from ..gateway.server import Gateway

COORDINATOR = "coordinator"
GATEWAY = "gateway"
SAVING_SHARE = 0.1
"""Largest share of the buffer's time that goes into saving tokens of all rollout actors: the more tokens and actors
there are, the less often they are saved."""
GROUPS_TRACED_PER_S = 1.0
"""About so many groups have what their rollouts did in the trace."""
PUT_SAMPLES = 1024
"""After which no further group goes with a message."""
DRAW_AT_ONCE = 8
"""Groups taken by one draw: small bites share the slots among engines that ask at the same time."""


COUNTED = ("num_groups", "num_errors", "num_breaks", "num_lies")
"""Groups that were handed over, that failed, that went elsewhere because the engine failed them; streams in which the
engine said what cannot be."""

_BLOCKED: dict[DrawBlock, tuple[ActivityKind, str]] = {
    "": ("wait-data", "draw"),
    "data-exhausted": ("wait-data", "draw"),
    "suspect": ("wait-data", "suspect"),
    "staleness": ("wait-capacity", "draw"),
    "finished": ("wait-capacity", "draw"),
    "weights": ("wait-weights", "adopt"),
    "paused": ("paused", "paused"),
    "disk": ("paused", "disk"),
}

R = TypeVar("R")


@dataclass(slots=True)
class _RunningTask:
    """A group that runs here."""

    assignment: Assignment
    task: asyncio.Task[None]
    num_saved: int
    """Tokens of it that the buffer has."""


@dataclass(eq=False, kw_only=True)
class Rollout(OwnsKnobs, RolloutContract):
    """One engine and the groups that use it. See the module's head."""

    mailbox_size = 4096

    engine: Engine | None
    workflow: Workflow | Pool
    scorer: Scorer
    tokenizer: Tokenizer
    options: RolloutOptions
    tenancy: Tenancy | None = None
    """Where the engine shares its device with a trainer in turns."""
    evaluation: Evaluation | None = None
    reference: Reference | None = None
    rebuilder: WeightRebuilder | None = None

    def __post_init__(self) -> None:
        self.gateway: Gateway | None = None
        """To be set before the start, if it serves agents or people."""
        self.models: Sequence[OtherModel] = ()
        """Of the run's own; set before the start."""
        self._judges = Guarded(self.scorer, *([] if self.reference is None else [self.reference]))
        self.options = options = copy(self.options)
        if self.engine is not None:
            options.rollout = options.rollout.model_copy(update={"pause_mode": self.engine.pause_mode})
        self._version = NO_VERSION
        self._serving = asyncio.Event()
        self._tenant: RolloutTenant | None = None
        self._runner: GroupRunner | None = None
        self._max_running = 0
        self._is_given_up = False
        self._evaluation = self.evaluation or Evaluation()
        self._budget = GroupBudget(options.reward.max_error_rate, options.reward.max_outage_s)
        """Of groups lost to the workflow or the engine."""
        self._tasks: dict[int, _RunningTask] = {}
        self.counts = Counter[str](dict.fromkeys(COUNTED, 0))
        self.is_draining = False
        """Nothing new is taken; there is no way back."""
        self._has_turn = self.tenancy is None
        """The engine has its device now."""
        self._load = GroupLoad()
        self._traced = FlowSampler(GROUPS_TRACED_PER_S)
        self._is_at_work = False
        self._broke: EngineError | None = None
        """What a group was failed with since that was judged last."""
        self._broke_s = -TIMEOUTS.rollout.loss_s
        self._room = asyncio.Event()
        self._blocked_by: DrawBlock = ""

    async def on_start(self) -> None:
        for model in self.models:
            model.join(self.ctx)
        self._report = report = Reporter.begin(self.ctx, self.options.report_s)
        self._meter, self._telemetry, self._tell = report.meter, report.telemetry, report.warn
        self._clock = self.ctx.clock
        self._buffer = self.ctx.ref(BufferContract, "buffer")
        self._coordinator = self.ctx.ref(CoordinatorContract, COORDINATOR)
        self._has_reported = False
        self._batch: tuple[list[GroupFinished], asyncio.Task[None]] | None = None
        """Finished groups that go with the next message, and who sends it."""
        self._putting = asyncio.Lock()
        self.ctx.watch(COORDINATOR)
        self._evaluation.listen(self._telemetry.event, self._telemetry.sample)
        self._checks = StreamChecks(self.ctx.name, may_be_older=self.options.through_router, on_lie=self._on_lie)
        self._weights_turn = asyncio.Lock()
        """A coordinator that died may have left a step of an adoption that still runs when the next one asks."""
        self._weights = EngineWeights(report, self.engine, self._checks, self.rebuilder)
        self._judges.listen(self._tell)
        if self.tenancy is not None and self.engine is not None:  # from the first moment: the leader asks for it
            self._tenant = RolloutTenant(report, self.engine, self.tenancy, on_change=self._note_turn)
        is_used = {
            "pause_mode": self.engine is not None,
            "workers": isinstance(self.workflow, Resizable),
            "eval_requests": self.options.gateway.eval_requests > 0,
        }
        tunables = (tunable for tunable in TUNABLES if is_used.get(tunable.name, True))
        knobs = section_knobs(tunables, self.options, self._apply)
        self.knob_owner = KnobOwner(self.ctx.name, (*knobs, LOG_LEVEL), self._telemetry)
        self.ctx.spawn(self._run(), name="rollout-run")

    def _apply(self) -> None:
        """Put the live values where they act. What runs already runs to its end."""
        options = self.options
        self._budget.lost.max_rate = options.reward.max_error_rate
        self._judges.allow(options.reward.max_error_rate)
        if isinstance(self.workflow, Resizable):
            self.workflow.resize(options.rollout.workers)
        if self.engine is not None:
            self.engine.pause_mode = options.rollout.pause_mode
        self._book()
        self._room.set()

    async def _run(self) -> None:
        vocab_size: int | None = None
        context_length = self.options.context_length or 1 << 30
        generate: Generate = no_engine
        await self._start_workers()
        if self.engine is not None:
            generate = await self._wait_for_room(self.engine)
            if isinstance(self.engine, TellsLoading):
                self.engine.on_loading = self._tell_loading
            with self.ctx.busy(TIMEOUTS.rollout.start_s, "starts its engine"):
                info = await self.engine.start()
            if self._tenant is not None:
                self._tenant.set_up()
            vocab_size = info.vocab_size
            context_length = min(context_length, info.context_length)
            self._max_running, self._checks.vocab_size = info.max_running, info.vocab_size
            generate = self._checks.watch(generate)
            self.ctx.spawn(self._watch(self.engine), name="engine-watch")
        model = ModelAccess(
            generate=generate,
            sampling=SamplingParams(),
            context_length=context_length,
            request_prefix=f"{self.ctx.name}.{self.ctx.epoch}.",
            goes_on=lambda: not self.is_draining,
        )
        self._runner = runner = GroupRunner(
            workflow=self.workflow,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            model=model,
            clock=self._clock,
            options=self.options,
            load=self._load,
            on_load=lambda load: self._book(),
            vocab_size=vocab_size,
            reference=self.reference,
            on_failure=lambda kind, text: self._tell("member-failed", f"{kind}: {text}", failure=kind),
            on_end=self._trace,
        )
        self._telemetry.more_seconds.append(runner.seconds)
        if self.gateway is not None:
            self.gateway.answer_eval(
                self.tokenizer,
                replace(model, sampling=self.options.eval_sampling),
                limit=lambda: self.options.gateway.eval_requests,
                is_serving=lambda: self._serving.is_set() and not self.is_draining,
            )
        if self.engine is None:
            self._version = ALWAYS_NEWEST
            self._serving.set()
        self.ctx.spawn(self._gauge_forever(runner), name="rollout-gauges")
        self._meter.switch("wait-weights", "first weights")
        await self.ctx.wait_for(COORDINATOR, "buffer", timeout_s=TIMEOUTS.rollout.meet_s)
        await self._report_in()
        self._has_reported = True
        if self._tenant is not None:
            self._tenant.has_joined.set()
        await self._serving.wait()
        await self._pull(runner)

    def _tell_loading(self, doing: str) -> None:
        self._telemetry.event("engine-loading", f"{self.ctx.name}: its server {doing}")

    async def gateway_place(self) -> GatewayPlace:
        return GatewayPlace() if self.gateway is None else await self.gateway.served()

    async def _find_gateway(self, gateway: Gateway) -> None:
        """The address of the role, which agents get."""
        ask = self.ctx.ref(GatewayContract, GATEWAY).gateway_place
        place = await self._report.ask(GATEWAY, ask)
        gateway.set_address(place.base_url)

    async def _start_workers(self) -> None:
        if self.gateway is not None:
            await self.gateway.start()
            if self.gateway.is_behind:
                self.ctx.watch(GATEWAY)
                self.ctx.spawn(self._find_gateway(self.gateway), name="find the gateway")
        if isinstance(self.workflow, Lasting):
            await self.workflow.start()

    async def _wait_for_room(self, engine: Engine) -> Generate:
        """How requests reach the engine; where it takes turns, only once there is room for it to load."""
        if self._tenant is None:
            return engine.generate
        self._meter.switch("wait-memory", "room to load")
        await self._tenant.may_load.wait()
        self._meter.switch("other", "start")
        return self._tenant.turn.generate

    async def on_peer(self, event: PeerEvent) -> None:
        if event.name == COORDINATOR and event.kind in ("up", "restarted") and self._has_reported:
            self.ctx.log.info("the coordinator is new (epoch %d): this actor reports in again", event.epoch)
            self.ctx.spawn(self._report_in(), name=f"report in {event.epoch}")
        if event.name == GATEWAY and event.kind in ("up", "restarted") and self.gateway is not None:
            self.ctx.spawn(self._find_gateway(self.gateway), name=f"find gateway {event.epoch}")

    async def on_stop(self, why: str) -> None:
        for task in self._end():
            task.cancel()
        closing = [self._judges.close(), self._evaluation.close(), self._weights.close()]
        closing += [] if self.engine is None else [self.engine.close()]
        closing += [self.workflow.close()] if isinstance(self.workflow, Lasting) else []
        closing += [] if self.gateway is None else [self.gateway.stop()]
        await all_ended(closing)

    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        async with self._weights_turn:
            return await self._weights.prepare(manifest)

    async def commit_weights(self, version: int) -> WeightAck:
        async with self._weights_turn:
            ack = await self._weights.commit(version)
        if not ack.accepted:
            return ack
        self._version = version
        if self._tenant is not None:
            self._tenant.has_weights = True
        self._serving.set()
        self._telemetry.event("weights-adopted", f"serves version {version}", version=version)
        try:
            await self._buffer.adopted(self.ctx.name, self.ctx.epoch, version, self._weights.lineage)
        except CallError as err:
            self.ctx.log.warning("the buffer did not hear of version %d: %s (the next draw reports it)", version, err)
        return ack

    async def weight_progress(self) -> WeightProgress:
        return self._weights.progress()

    async def fence(self, epoch: int, reason: str) -> bool:
        if epoch != self.ctx.epoch:
            return False
        error = EngineError(f"{self.ctx.name} was fenced: {reason}", remedy="it is restarted with new weights")
        self.ctx.spawn(self._give_engine_up(error, is_fenced=True), name="fenced")
        return True

    async def _watch(self, engine: Engine) -> None:
        try:
            await engine.until_lost()
        except EngineError as err:
            await self._give_engine_up(err)

    def _on_lie(self, lie: EngineLied) -> None:
        self.counts["num_lies"] += 1
        self._telemetry.event("engine-lied", lie.message)
        self.ctx.spawn(self._give_engine_up(lie), name="lied")

    async def _give_engine_up(self, error: EngineError, *, is_fenced: bool = False) -> None:
        """Its groups go elsewhere with their tokens; then this actor fails and is restarted."""
        if self._is_given_up:
            return
        self._is_given_up = True
        num_groups = await self._hand_back(None if is_fenced else error)
        self.ctx.log.error("the engine is given up, %d groups go elsewhere: %s", num_groups, error)
        raise error

    async def load_engine(self) -> None:
        tenant = require(self._tenant, self.ctx.name)
        tenant.may_load.set()
        await tenant.has_joined.wait()

    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        return await require(self._tenant, self.ctx.name).command(command)

    async def memory_report(self) -> TenantReport | None:
        return None if self._tenant is None else self._tenant.report()

    async def evaluate(self, request: EvalRequest) -> EvalResult:
        if self._runner is None:
            raise EngineError(f"{self.ctx.name} has no engine yet", remedy="ask again once it serves")
        return await self._evaluation.answer(self._runner, request, self.ctx.name, self._version, log=self.ctx.log)

    async def status(self) -> EngineStatus:
        status = EngineStatus(
            rollout=self.ctx.name, version=self._version, running=0, waiting=0, draining=self.is_draining
        )
        if self.engine is None or not self._serving.is_set():
            return status
        info = await self.engine.info()
        return replace(status, running=info.running, waiting=info.waiting, usage=info.usage)

    async def under_way(self) -> tuple[RolloutNow, ...]:
        return () if self._runner is None else self._runner.under_way(self.ctx.name)

    async def _report_in(self) -> None:
        """Tell the coordinator that this actor serves, and what it must be handed."""

        async def send() -> None:
            status = await self.status()
            if self._tenant is not None and not self._tenant.has_weights:
                status = replace(status, version=NO_VERSION)
            await self._coordinator.rollout_ready(status, self.ctx.epoch)

        await self._report.ask(COORDINATOR, send)

    async def drain(self) -> int:
        tasks = self._end()
        if self.engine is not None and tasks:
            await self.engine.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=30)
        return len(tasks)

    async def _gauge_forever(self, runner: GroupRunner) -> None:
        started_s, usage = self._clock.monotonic(), EngineUsage()
        while True:
            await asyncio.sleep(self.options.report_s)
            elapsed_s = max(self._clock.monotonic() - started_s, 1e-6)
            started_s += elapsed_s
            try:
                load = await self.status()
            except EngineError as err:  # whether it is lost is for `until_lost` to say, and it says why
                self.ctx.log.warning("the engine does not report its load: %s", err)
                continue
            sums = defaultdict[str, float](float, runner.sums)
            runner.sums.clear()
            values = {
                "rollout/tokens_per_s": sums["tokens"] / elapsed_s,
                "rollout/running": float(load.running),
                "rollout/waiting": float(load.waiting),
                "rollout/in_flight": float(len(self._tasks)),
                "rollout/concurrency": float(self.options.rollout.max_groups),
                "rollout/max_running": float(self._max_running),
                **{f"rollout/{name}": float(count) for name, count in self.counts.items()},
                **{name: float(count) for name, count in runner.failures.items()},
                **self._judges.gauges(),
                **load.usage.rates_since(usage),
                **runner.lengths(),
            }
            usage = load.usage
            if num_samples := sums["samples"]:
                values["rollout/truncated_fraction"] = sums["truncated"] / num_samples
            self._telemetry.metric(load.version if self.engine is not None else -1, values)

    # ---- groups

    def _trace(self, group: RunningGroup) -> None:
        wall_s, group_id = self._clock.wall() - self._clock.monotonic(), group.prompt.group_id
        for hop, (began_s, ended_s) in group.hops().items():
            self._telemetry.hop(hop, (group_id,), wall_s + began_s, ended_s - began_s)
        if not self._traced.pick("generate", (group_id,), self._clock.monotonic()):
            return
        for member in group.members:
            ids = {"group": group_id, "member": member.index, "row": group.prompt.row}
            for row in rows(member.timeline.stretches):
                branch, began_s, ended_s = row[0].branch, row[0].began_s, row[-1].ended_s
                parts = [(span.label, ACTIVITIES[span.kind], span.began_s - began_s, span.ended_s - span.began_s,
                          span.turn) for span in row]  # fmt: skip
                self._telemetry.span(
                    f"{group_id}.{member.index}", "other", wall_s + began_s, ended_s - began_s,
                    track="rollout", **ids, branch=branch, parts=parts,
                )  # fmt: skip

    def _note_turn(self, has_turn: bool) -> None:
        """The device was given to, or taken from, the engine."""
        self._has_turn = has_turn
        self._book()

    def _book(self) -> None:
        if self._is_at_work or self._load.generating or self._load.rewarding or self._load.waiting:
            self._meter.switch(*self._state())

    def _state(self) -> tuple[ActivityKind, str]:
        load = self._load
        if not self._has_turn:
            return "wait-memory", "the trainer's turn"
        if load.waiting > load.generating:
            return "wait-env", load.place
        if load.generating:
            is_full = len(self._tasks) >= self.options.rollout.max_groups
            return "compute", "workflow" if self.engine is None else "generate at limit" if is_full else "generate"
        if load.rewarding:
            return "wait-data", "reward"
        if self._tasks:
            return "wait-data", "hand over"
        return ("paused", "drained") if self.is_draining else _BLOCKED[self._blocked_by]

    async def _pull(self, runner: GroupRunner) -> None:
        """Draw and run groups until it has to drain. Never gives up on a buffer that is being restarted."""
        self._is_at_work = True
        self._book()
        if self.engine is not None and self.options.rollout.save_partials_s > 0:
            self.ctx.spawn(self._save_forever(runner), name="save-partials")
        while not self.is_draining:
            while (left_s := self._broke_s + TIMEOUTS.rollout.loss_s - self.ctx.clock.monotonic()) > 0:
                await asyncio.sleep(left_s)
            await self._judge()
            free = self.options.rollout.max_groups - len(self._tasks)
            if free <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            request = DrawRequest(
                rollout=self.ctx.name, epoch=self.ctx.epoch, version=self._version, lineage=self._weights.lineage,
                max_groups=min(free, DRAW_AT_ONCE), room=free, wait_s=TIMEOUTS.rollout.poll_s,
                holding=tuple(self._tasks), blocked_by=self._blocked_by,
            )  # fmt: skip
            try:
                reply = await self._buffer.draw(request)
            except (CallError, DiskRefused) as err:
                self.ctx.log.warning("draw: %s", err)
                await asyncio.sleep(TIMEOUTS.rollout.retry_s)
                continue
            self._blocked_by = reply.blocked_by
            self._book()
            for assignment in reply.assignments:
                await self._take(assignment, runner)
            if reply.blocked_by == "finished":
                await asyncio.sleep(TIMEOUTS.rollout.retry_s)

    async def _judge(self) -> None:
        """An engine survives the failure of some groups; those that fail at the same time count once. One that failed
        too many is at fault, and is given up as one that is lost: with their tokens. Raises why."""
        broke, self._broke = self._broke, None
        if broke is None:
            return
        try:
            self._budget.note(broke)
        except EngineError as err:
            await self._give_engine_up(err)

    async def _take(self, assignment: Assignment, runner: GroupRunner) -> None:
        group_id = assignment.prompt.group_id
        if group_id in self._tasks:
            self.ctx.log.warning("group %d was assigned twice; the second is ignored", group_id)
            return
        if self.is_draining or len(self._tasks) >= self.options.rollout.max_groups:  # it went during the draw
            await self._give_back(assignment, Partial(assignment.partial))
            return
        task = self.ctx.spawn(self._run_group(assignment, runner), name=f"group-{group_id}")
        self._tasks[group_id] = _RunningTask(assignment, task, _num_tokens(assignment.partial))
        self._book()

    async def _run_group(self, assignment: Assignment, runner: GroupRunner) -> None:
        """One group from assignment to the buffer's answer. Only a broken error budget or engine ends the actor."""
        try:
            group = await runner.run(assignment)
            await self._deliver(group, assignment.attempt)
        except Partial as partial:
            # Another actor continues, with the tokens so far. The buffer, which knows the other attempts, judges
            # whether this group breaks engine after engine.
            if partial.cause is not None:
                self._note_break(assignment, partial, partial.cause)
            await self._give_back(assignment, partial)
        except MyxaError as err:
            if isinstance(err, CallError):
                raise
            await self._drop(assignment.prompt, assignment.attempt, err)
        else:
            if text := self._judges.too_many_errors:  # of samples that were masked
                raise UserCodeError(text, remedy="mend the judge; reward.max_error_rate says what a run bears")
        finally:
            self._tasks.pop(assignment.prompt.group_id, None)
            self._book()
            self._room.set()

    async def _hand_back(self, cause: EngineError | None = None) -> int:
        """Return all groups with their tokens, since this actor is about to fail; how many. `cause`: the engine failed.
        Takes `hand_back_s` at most: a group that does not get through continues from the tokens saved before."""
        self.is_draining = True
        num_groups = 0
        try:
            async with asyncio.timeout(TIMEOUTS.rollout.hand_back_s):
                for group_id, running in list(self._tasks.items()):
                    if group_id not in self._tasks or self._runner is None or not self._runner.has(group_id):
                        continue  # it is on its way to the buffer already
                    samples = self._runner.so_far(group_id)
                    running.task.cancel()
                    await self._give_back(running.assignment, Partial(samples, cause))
                    num_groups += 1
                if self._tasks:
                    await asyncio.wait([running.task for running in self._tasks.values()])
        except TimeoutError:
            self.ctx.log.warning("the buffer did not take all groups back in %g s", TIMEOUTS.rollout.hand_back_s)
        return num_groups

    async def _save_forever(self, runner: GroupRunner) -> None:
        """Send the buffer the tokens since the last message; each answer is awaited before the next message."""
        pause_s = self.options.rollout.save_partials_s
        while True:
            await asyncio.sleep(pause_s)
            started_s, num_actors = self.ctx.clock.monotonic(), 1
            for group_id, running in list(self._tasks.items()):
                samples = runner.so_far(group_id)
                num_tokens = _num_tokens(samples)
                if num_tokens <= running.num_saved:
                    continue
                try:
                    returned = self._return_message(running.assignment, samples, goes_on=True)
                    num_actors = await self._buffer.return_group(returned)
                except (CallError, DiskRefused) as err:
                    self.ctx.log.info("tokens of group %d were not saved: %s", group_id, err)
                    break
                running.num_saved = num_tokens
            took_s = self.ctx.clock.monotonic() - started_s
            pause_s = max(self.options.rollout.save_partials_s, took_s * num_actors / SAVING_SHARE)

    def _end(self) -> list[asyncio.Task[None]]:
        self.is_draining = True
        self._book()
        self._room.set()
        if self._tenant is not None:
            self._tenant.turn.end()
        return [running.task for running in self._tasks.values()]

    async def _deliver(self, group: Group, attempt: int) -> None:
        self._budget.note(None)
        if self._batch is None or sum(len(entry.group.samples) for entry in self._batch[0]) >= PUT_SAMPLES:
            batch: list[GroupFinished] = []
            self._batch = batch, self.ctx.spawn(self._put(batch), name="put-groups")
        self._batch[0].append(GroupFinished(group=group, attempt=attempt))
        await asyncio.shield(self._batch[1])
        self.counts["num_groups"] += 1

    async def _put(self, groups: Sequence[GroupFinished]) -> None:
        """One message at a time: what finishes until it leaves goes with it. The buffer tells what becomes of it."""

        async def put(*batch: GroupFinished) -> None:
            await self._ask(lambda: self._buffer.put_groups(batch, self.ctx.name))

        async with self._putting:
            if self._batch is not None and self._batch[0] is groups:
                self._batch = None
            try:
                await put(*groups)
            except MessageTooLarge:
                for entry in groups:
                    try:
                        await put(entry)
                    except MessageTooLarge as error:
                        await self._drop(entry.group.prompt, entry.attempt, error)

    async def _give_back(self, assignment: Assignment, partial: Partial) -> None:
        returned = self._return_message(assignment, partial.samples, has_died=partial.cause is not None)
        try:
            await self._ask(lambda: self._buffer.return_group(returned))
        except MessageTooLarge as error:
            self.ctx.log.warning("group %d starts again from its prompt: %s", returned.group_id, error)
            await self._ask(lambda: self._buffer.return_group(replace(returned, partial=())))

    def _return_message(
        self, assignment: Assignment, samples: tuple[Sample, ...], *, goes_on: bool = False, has_died: bool = False
    ) -> GroupReturned:
        return GroupReturned(
            group_id=assignment.prompt.group_id, attempt=assignment.attempt, rollout=self.ctx.name, partial=samples,
            goes_on=goes_on, has_died=has_died,
        )  # fmt: skip

    def _note_break(self, assignment: Assignment, partial: Partial, cause: EngineError) -> None:
        self._broke, self._broke_s = cause, self.ctx.clock.monotonic()
        self.counts["num_breaks"] += 1
        num_tokens = _num_tokens(partial.samples)
        self._tell(
            "group-broken", f"group {assignment.prompt.group_id} continues elsewhere with {num_tokens} tokens: {cause}"
        )

    async def _drop(self, prompt: Prompt, attempt: int, err: MyxaError) -> None:
        """A group that failed. Raises UserCodeError or what the budget raises when too many did."""
        self.counts["num_errors"] += 1
        self.ctx.log.error("group %d (row %d) dropped: %s", prompt.group_id, prompt.row, err)
        self._telemetry.event("group-dropped", f"group {prompt.group_id}: {err}")
        dropped = GroupDropped(
            group_id=prompt.group_id, attempt=attempt, rollout=self.ctx.name, reason=drop_reason(err),
            detail=str(err)[:2000],
        )  # fmt: skip
        await self._ask(lambda: self._buffer.drop_group(dropped))
        if text := self._judges.too_many_errors:
            raise UserCodeError(text.removesuffix(f" -- {err.remedy}"), remedy=err.remedy)
        self._budget.note(err, self.ctx.clock.monotonic())

    async def _ask(self, send: Callable[[], Awaitable[R]]) -> R:
        """Keyed or idempotent calls, repeated while the buffer is restarting, so that the group is not lost."""
        return await self._report.ask("buffer", send)


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(int(sample.response_ids.size) for sample in samples)
