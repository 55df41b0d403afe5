"""What each role answers to: the typed handlers other roles may call. References are typed by these classes.

A contract only declares; the role class derives from it and implements every handler. Deadlines are defaults and may be
shortened per call with `with_deadline(ref, seconds)`.
"""

from __future__ import annotations

from ..core.actor import Actor
from ..core.device_memory import LeaseReply, LeaseRequest, MemoryCommand, MemoryReply, MemoryView, TenantReport
from ..core.files import FileEntry
from ..core.handlers import call
from ..core.knobs import (
    ChangeReply,
    ChangeRequest,
    KnobSheet,
    KnobTable,
    KnobValue,
    KnobVerdict,
    LiveKnobs,
    Operator,
    PauseVerb,
)
from ..core.messages import (
    BufferStats,
    Claim,
    DrawReply,
    DrawRequest,
    EngineStatus,
    EvalRequest,
    EvalResult,
    GatewayPlace,
    GroupDropped,
    GroupFinished,
    GroupReturned,
    PutResult,
    RolloutNow,
    RunStatus,
    StepReport,
    Telemetry,
    WeightAck,
    WeightManifest,
)
from ..core.protocols import Delta, GenerateRequest, StepStats
from ..core.samples import Group, Prompt, TrainShard
from ..core.weight_channel import AnyAnswer, AnyOrder, WeightProgress


class KnobsContract(Actor):
    """An actor with live knobs: buffer, rollout actors, trainer ranks (rank 0 speaks for all), the coordinator."""

    @call(deadline=10, reentrant=True)
    async def knobs(self) -> KnobSheet:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def judge_knobs(self, values: dict[str, KnobValue], at: int) -> KnobVerdict:
        """Whether the owner can use these values, which are within their ranges, from number `at` on."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def knobs_decided(self, epoch: int) -> None:
        """Decisions up to `epoch` are there; answered once the owner uses them, or is sure to at their number."""
        raise NotImplementedError


class ConductContract(Actor):
    """The coordinator as the operator sees it."""

    @call(deadline=60, reentrant=True)
    async def change_knobs(self, request: ChangeRequest) -> ChangeReply:
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def knob_table(self) -> KnobTable:
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def undo(self, who: Operator, reason: str, epoch: int = 0) -> ChangeReply:
        """Take back the newest change, or that of `epoch`. Refused where a knob was changed again since."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def set_pause(self, verb: PauseVerb, who: Operator, reason: str, num_steps: int = 0) -> int:
        """pause: no new work and no new step; the current step ends. step: train so many steps, then pause. resume:
        continue. Returns the version that the trainer will rest at, or for resume the first step without a claim."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True, cancellable=False)
    async def checkpoint_now(self, export: bool) -> str:
        """A checkpoint at the next step boundary, or with `export` a HuggingFace folder; returns the folder."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True, cancellable=False)
    async def evaluate_now(self, name: str) -> EvalResult:
        """Held-out reward now, beside training; `name`: of one evaluation set, else all of them."""
        raise NotImplementedError


class TenantContract(Actor):
    """An actor with memory on a device that it can give back. Trainer ranks and rollout actors answer to it."""

    @call(deadline=300, reentrant=True)
    async def memory_command(self, command: MemoryCommand) -> MemoryReply:
        """One step of a switch. Idempotent by `command_id`; an older epoch is answered, not obeyed."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def memory_report(self) -> TenantReport | None:
        """Its present state; None: it holds no memory that can be leased."""
        raise NotImplementedError


class MemoryContract(Actor):
    """The memory manager of a run: the ledger of all its shared devices."""

    @call(deadline=600, reentrant=True)
    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Have tags of a gang mapped, making room where there is none; waits its turn, one switch at a time."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def view(self) -> MemoryView:
        raise NotImplementedError


class BufferContract(KnobsContract):
    """Prompt cursor, ledger, finished groups, admission."""

    @call(deadline=60, reentrant=True)
    async def draw(self, request: DrawRequest) -> DrawReply:
        """Long poll for work; admission by the staleness policy happens here."""
        raise NotImplementedError

    @call(deadline=60, cancellable=False)
    async def put_groups(self, finished: tuple[GroupFinished, ...], rollout: str) -> tuple[PutResult, ...]:
        """What became of each, once all are durable. May be repeated until it is answered: the ledger takes a group
        once."""
        raise NotImplementedError

    @call(deadline=10)
    async def adopted(self, rollout: str, epoch: int, version: int, lineage: int) -> None:
        """An engine serves that version of that lineage now; its waiting draw is judged by it."""
        raise NotImplementedError

    @call(deadline=30)
    async def drop_group(self, dropped: GroupDropped) -> None:
        raise NotImplementedError

    @call(deadline=30)
    async def return_group(self, returned: GroupReturned) -> int:
        """Returns how many rollout actors there are: they share the buffer's time."""
        raise NotImplementedError

    @call(deadline=30)
    async def rollout_gone(self, rollout: str, epoch: int) -> int:
        """All groups assigned to that incarnation go back to REQUEUED; returns how many."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def claim(self, step: int, wait_s: float, blocked_by: str | None = None) -> Claim:
        """Long poll for a whole batch to train from version `step`. Claiming a step again returns the same groups.
        `blocked_by`: the reason for having none that the caller knows; another reason is answered at once."""
        raise NotImplementedError

    @call(deadline=60)
    async def fetch(self, group_ids: tuple[int, ...]) -> tuple[Group, ...]:
        """Payloads of claimed groups, in the order asked for. Raises MessageTooLarge where no reply holds them."""
        raise NotImplementedError

    @call(deadline=30)
    async def trained(self, step: int) -> None:
        """The claim of `step` was trained; version `step + 1` exists. Idempotent."""
        raise NotImplementedError

    @call(deadline=30)
    async def durable(self, version: int, oldest: int | None = None) -> None:
        """A checkpoint covers everything trained up to `version`. Training may fall back to version `oldest` (None: to
        the checkpoint before): payloads of what was trained before that may go. Idempotent."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True)
    async def snapshot(self, path: str, version: int) -> FileEntry:
        """Copy the ledger durably, as of one moment, with all trained up to `version`. Name, size, digest."""
        raise NotImplementedError

    @call(deadline=30)
    async def rewind(self, version: int, lineage: int) -> int:
        """The trainer restarted from the checkpoint of `version`, with a leader of the epoch `lineage`: groups trained
        after it are READY again, and versions above it that earlier leaders made are undone."""
        raise NotImplementedError

    @call(deadline=10)
    async def stats(self) -> BufferStats:
        raise NotImplementedError


class CoordinatorContract(KnobsContract, ConductContract):
    """Run state machine, version clock, adoption of weights, evaluation, the end of the run."""

    @call(deadline=60, reentrant=True)
    async def version_made(self, manifest: WeightManifest | None, report: StepReport) -> None:
        """The trainer made a version: adopt it on the engines, one after another."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def rollout_ready(self, status: EngineStatus, epoch: int) -> None:
        """An engine serves and may be given weights."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def weights_lost(self, rollout: str, epoch: int) -> None:
        """The engine is well, but its weights left the device: it is given the next version that is offered."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def weights_offered(self, manifest: WeightManifest) -> None:
        """A version that was made before can be read again, for engines that have none."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def trainer_ready(
        self,
        version: int,
        manifest: WeightManifest | None,
        facts: dict[str, str],
        live: LiveKnobs | None = None,
        is_leading: bool = False,
    ) -> None:
        """The gang is up at `version`. `live`: values that were in force when the checkpoint that it continues from was
        written; they are put into force again before the leader starts. `is_leading`: the leader's loop runs already;
        this call only informs a restarted coordinator."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def live_knobs(self) -> LiveKnobs:
        """What was decided during the run: what a checkpoint holds of the knobs."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def knobs_in_force(self, after: int, number: int) -> LiveKnobs:
        """What was decided after epoch `after`; 0: all of it. `number`: of the boundary that the
        owner is about to pass, for which a change that is undecided is waited for; -1: of none."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def trainer_finished(self, version: int, reason: str) -> None:
        """The leader's loop ended (all steps done, or no more data)."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def rollout_leaving(self, rollout: str, reason: str) -> None:
        """That actor is about to be ended on purpose: no weights and no evaluation go to it any more."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def status(self) -> RunStatus:
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def stop(self, reason: str) -> None:
        """End the run after the current step."""
        raise NotImplementedError


class DataContract(Actor):
    """Anything that hands out held-out prompts (the buffer does)."""

    @call(deadline=30)
    async def num_held_out(self, name: str = "") -> int:
        """Rows of the evaluation set of that name; the only one is called ""."""
        raise NotImplementedError

    @call(deadline=30)
    async def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The evaluation set of that name, at most `limit` prompts; the only one is called ""."""
        raise NotImplementedError


class MonitorContract(Actor):
    """Sinks for metrics, events and spans. Lossy: training never waits for it."""

    @call(deadline=10)
    async def telemetry(self, bundle: Telemetry) -> None:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def snapshot(self) -> dict[str, dict[str, float]]:
        """Latest values per source, and time shares per actor under `time/<actor>`."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def shares(self, window_s: float) -> dict[str, dict[str, float]]:
        """Actor -> kind of activity, or "kind/name", -> share of its time over the last `window_s` seconds."""
        raise NotImplementedError


class GatewayContract(Actor):
    """What serves agents and people by HTTP: each rollout actor, and the gateway role in front of them."""

    @call(deadline=10, reentrant=True)
    async def gateway_place(self) -> GatewayPlace:
        """Once it serves."""
        raise NotImplementedError


class RolloutContract(TenantContract, KnobsContract, GatewayContract):
    """One engine and the workflows that use it."""

    @call(deadline=120, reentrant=True)
    async def prepare_weights(self, manifest: WeightManifest) -> WeightAck:
        """Phase 1 of adoption: bytes arrive beside the old weights."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def commit_weights(self, version: int) -> WeightAck:
        """Phase 2: the next token is stamped with `version`."""
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def weight_progress(self) -> WeightProgress:
        """How far an adoption that is under way is."""
        raise NotImplementedError

    @call(deadline=600, reentrant=True)
    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Answer held-out prompts; does not touch the ledger."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def status(self) -> EngineStatus:
        raise NotImplementedError

    @call(deadline=5, reentrant=True)
    async def under_way(self) -> tuple[RolloutNow, ...]:
        """Rollouts of this actor, at most a hundred: first those that wait longest for other than the engine."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def fence(self, epoch: int, reason: str) -> bool:
        """The engine is late or wrong: the actor fails and is restarted. False: that was another incarnation."""
        raise NotImplementedError

    @call(deadline=900, reentrant=True)
    async def load_engine(self) -> None:
        """Where engines and trainer take turns: the engine may load. Returns once it has joined the run."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def drain(self) -> int:
        """Abort what runs, return it with its tokens to the buffer; returns the number of groups returned."""
        raise NotImplementedError


class ModelContract(Actor):
    """A model of the run's own beside the policy: one engine whose weights stay as they are."""

    @call(deadline=600, reentrant=True)
    async def answer(self, request: GenerateRequest) -> Delta:
        """The whole answer; waits while the engine loads. Its stop strings end it. It may be repeated."""
        raise NotImplementedError


class TrainerContract(TenantContract, KnobsContract):
    """One rank of the trainer gang; rank 0 leads."""

    @call(deadline=600)
    async def train_shard(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        """This rank's part of one step; returns the metrics (reduced over ranks), and its scores of what is shown."""
        raise NotImplementedError

    @call(deadline=600)
    async def publish(self, version: int, unreleased: tuple[int, ...]) -> WeightManifest | None:
        """Gather and write the weights, drop others than `unreleased`. A manifest from every rank that publishes."""
        raise NotImplementedError

    @call(deadline=1800)
    async def begin_checkpoint(self, folder: str, live: LiveKnobs) -> None:
        """Collective: copy what a checkpoint holds, live knobs too, and begin to write it; training may continue."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True)
    async def checkpoint_written(self) -> None:
        """Answered once this rank's files of it are written."""
        raise NotImplementedError

    @call(deadline=600)
    async def finish_checkpoint(self) -> None:
        """Collective, after all ranks have written: the checkpoint is there."""
        raise NotImplementedError

    @call(deadline=1800)
    async def export_hf(self, folder: str) -> None:
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def release_weights(self, version: int) -> None:
        """No engine reads that version any more. The leader passes this on to the other ranks that sent it."""
        raise NotImplementedError

    @call(deadline=300, reentrant=True)
    async def ask_sender(self, order: AnyOrder) -> AnyAnswer:
        """What an engine asks of a rank that sends weights, beside training."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def run_leader(self, start_version: int) -> None:
        """Leader only: start the loop claim -> train -> publish from that version."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def stop_leader(self, reason: str) -> None:
        """Leader only: end the loop after the current step, then save and export as configured."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True)
    async def evaluate(self, request: EvalRequest) -> EvalResult:
        """Leader only: compare held-out pairs under the newest weights, between two steps; their reward is the share of
        pairs that are ranked rightly. Raises the error of the first pair if none can be compared."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True)
    async def checkpoint_at_boundary(self, export: bool) -> str:
        """Leader only: write a checkpoint, or with `export` a HuggingFace folder, at the next boundary; its folder."""
        raise NotImplementedError
