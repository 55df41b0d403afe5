"""Plain settings of the leader's loop, and the live knobs that follow from them. Must not know ranks or messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...core.knobs import KnobValue
from ...core.messages import WeightChannel
from .canary import CanaryOptions
from .checkpoints import CheckpointOptions
from .knobs import TrainerKnobs
from .standby import StandbyOptions
from .step_plan import PlanOptions


@dataclass(frozen=True, slots=True)
class LeaderOptions:
    """Plain settings of the loop."""

    world_size: int
    num_steps: int
    """0: until the data ends or the run is stopped. A live knob."""
    plan: PlanOptions
    publishes: bool
    """False when no engine wants weights (supervised runs)."""
    run_dir: str
    checkpoints: CheckpointOptions
    export_at_end: bool = True
    setup_timeout_s: float = 300.0
    step_timeout_s: float = 1800.0
    """A call to all ranks (a step, a publication, a checkpoint) that takes longer hangs."""
    refused_channels: Mapping[WeightChannel, str] = field(default_factory=dict[WeightChannel, str])
    """Those that the run's shape does not allow, and why."""
    shard_of_rank: tuple[int, ...] = ()
    """Number of the shard that each rank trains, where ranks share one; empty: each its own."""
    guard: CanaryOptions = field(default_factory=lambda: CanaryOptions(every=0, bound=0.0))
    channel: WeightChannel = "shm"
    """By which weights are published. A live knob, where engines have devices of their own."""
    standby: StandbyOptions = field(default_factory=StandbyOptions)
    step_values: Mapping[str, KnobValue] = field(default_factory=dict[str, KnobValue])
    """What the run file says of the knobs that ranks use; see `trainer_knobs.step_values`."""

    def knobs(self, *, takes_turns: bool) -> TrainerKnobs:
        """The live knobs of a run with these settings. `takes_turns`: with engines on the same devices, which are then
        given every version, since they lose their weights in between, by the channel that a turn's memory was counted
        with."""
        first: dict[str, KnobValue] = {
            **self.step_values,
            "num_steps": self.num_steps,
            "max_tokens_per_microbatch": self.plan.max_tokens,
            "checkpoint_every": self.checkpoints.every,
            "keep_last": self.checkpoints.keep_last,
        }
        if self.publishes:
            first["guard_every"] = self.guard.every
            first |= {} if takes_turns else {"weights_every": 1, "weight_channel": self.channel}
        return TrainerKnobs(first)
