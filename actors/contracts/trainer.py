"""What one rank of the trainer gang answers to. See `roles.py` for the others."""

from __future__ import annotations

from ...core.handlers import call
from ...core.knobs import LiveKnobs
from ...core.messages import Scores, WeightChannel, WeightManifest
from ...core.protocols import StepStats
from ...core.samples import TrainSample, TrainShard
from ...core.weight_channel import (
    JoinOffer,
    JoinRequest,
    PlanReply,
    PlanRequest,
    SampleReply,
    SampleRequest,
    SendOrder,
    SendReport,
    ShareReply,
    ShareRequest,
)
from .knobs import KnobsContract
from .memory import TenantContract


class TrainerContract(TenantContract, KnobsContract):
    """One rank of the trainer gang; rank 0 leads."""

    @call(deadline=600)
    async def train_shard(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        """This rank's part of one step; returns the metrics (reduced over ranks), and its scores of what is shown."""
        raise NotImplementedError

    @call(deadline=600)
    async def score(self, samples: tuple[TrainSample, ...]) -> Scores:
        """Log-probs of the samples' response tokens under the current weights. Collective, the same on every rank."""
        raise NotImplementedError

    @call(deadline=600)
    async def publish(self, version: int, channel: WeightChannel) -> WeightManifest | None:
        """Gather and write the weights for that channel, the same on every rank; a manifest of its part from every rank
        that publishes, None from the others."""
        raise NotImplementedError

    @call(deadline=1800)
    async def save_checkpoint(self, folder: str, live: LiveKnobs) -> None:
        """Collective checkpoint of all ranks; the live knobs are kept with it."""
        raise NotImplementedError

    @call(deadline=1800)
    async def begin_checkpoint(self, folder: str, live: LiveKnobs) -> None:
        """Collective: copy what a checkpoint holds and begin to write it; training may go on."""
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
        """Collective export to a HuggingFace folder."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def release_weights(self, version: int) -> None:
        """No engine reads that version any more. The leader tells the other ranks that sent it."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def publish_again(self, version: int) -> None:
        """Leader only: no engine can take that version as it was published. If it is still the newest one, its bytes
        are written anew as soon as the trainer waits for data."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def weight_plan(self, request: PlanRequest) -> PlanReply:
        """How a version that this rank sends is cut into buckets."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def join_channel(self, request: JoinRequest) -> JoinOffer:
        """Open the meeting place of a channel."""
        raise NotImplementedError

    @call(deadline=300, reentrant=True)
    async def send_weights(self, order: SendOrder) -> SendReport:
        """Broadcast a version into a channel, while training goes on."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def leave_channel(self, channel: str, reason: str) -> None:
        """Give a channel up; a broadcast into it ends with an error."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def share_weights(self, request: ShareRequest) -> ShareReply:
        """Handles of a version's memory, for an engine on the same GPUs."""
        raise NotImplementedError

    @call(deadline=60, reentrant=True)
    async def sample_weights(self, request: SampleRequest) -> SampleReply:
        """A few values of a version that this rank sends."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def run_leader(self, start_version: int) -> None:
        """Leader only: start the loop claim -> train -> publish from that version."""
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def stop_leader(self, reason: str) -> None:
        """Leader only: end the loop after the step in hand, then save and export as configured."""
        raise NotImplementedError

    @call(deadline=1800, reentrant=True)
    async def checkpoint_at_boundary(self, export: bool) -> str:
        """Leader only: at the next step boundary write a whole checkpoint, or with `export` a HuggingFace folder.
        Answered with the folder once it is written, also while the run is paused."""
        raise NotImplementedError
