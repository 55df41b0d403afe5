"""The plain torch trainer: one rank of a gang, on CPU (gloo) or CUDA (NCCL), replicated or sharded.

Composition only: `world` meets the other ranks, `model` computes, `parallel` shares gradients, `step` trains,
`export` and `checkpoint` write. Fulfils `core.protocols.TrainBackend`; every method blocks and must be called in the
same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ....core.clock import Clock, SystemClock
from ....core.config import AlgoConfig, OptimizerConfig, TrainerConfig
from ....core.errors import ConfigError, TrainError
from ....core.protocols import NamedArray, StepStats
from ....core.samples import F32, TrainSample, TrainShard
from ...models.hf_folder import ModelConfig, read_config
from .adamw import AdamW
from .checkpoint import TrainingState, load_checkpoint, save_checkpoint
from .export import Exporter
from .microbatch import Cutting
from .model import CausalLM, linear_cost, load_weights
from .parallel import Replica
from .schedule import check_schedule
from .settings import StepSettings
from .step import Stepper
from .tensors import DTYPE_OF
from .world import Gang, World


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBackendConfig:
    """Everything a rank needs to know."""

    model_path: str
    """HuggingFace folder with the initial weights (and the reference model's, if there is a KL term)."""
    algo: AlgoConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig
    temperature: float = 1.0
    """Sampling temperature of the rollouts."""
    max_new_tokens: int = 1
    """Longest answer; the divisor per sample of reduction "constant"."""
    num_steps: int = 0
    """Steps of the whole run, for schedules that end with it; 0 = unknown."""
    seed: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    num_threads: int = 1
    """Threads of torch on a CPU; 0 = leave torch's own number."""
    gang: Gang = field(default_factory=Gang)
    serving_dtype: str = ""
    """Number type of weights that go from device to device; empty: that of training."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What exists after set-up."""

    world: World
    state: TrainingState
    stepper: Stepper
    exporter: Exporter


class TorchBackend:
    """One trainer rank."""

    def __init__(self, config: TorchBackendConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._parts: _Parts | None = None

    def setup(self) -> dict[str, Any]:
        """Join the gang, build model, reference and optimizer; returns facts for the log.

        Raises ModelError for a bad folder, LaunchError if the gang does not meet, ConfigError for settings that do not
        go together.
        """
        config = self._config
        total_updates = config.num_steps * config.algo.minibatches
        check_schedule(config.optimizer, total_updates)
        if config.temperature <= 0:
            raise ConfigError(
                f"temperature = {config.temperature} gives no log-probs to train on", remedy="use 1.0, or above 0"
            )
        model_config = read_config(config.model_path)
        model_config.require_plain("the torch trainer")
        device = self._device()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.default_generator.manual_seed(config.seed + config.gang.rank)
        world = World.join(config.gang, device)
        with world.phase("set up"):
            replica = self._replica(model_config, world, is_trained=True)
            reference = self._replica(model_config, world, is_trained=False) if config.algo.kl_coef > 0 else None
            optimizer = AdamW(replica.parameters(), config.optimizer.betas, config.optimizer.eps)
        stepper = Stepper(
            replica,
            reference,
            optimizer,
            StepSettings(
                algo=config.algo,
                optimizer=config.optimizer,
                temperature=config.temperature,
                max_new_tokens=config.max_new_tokens,
                total_updates=total_updates,
            ),
            Cutting(linear_cost(model_config, device), device, model_config.vocab_size, skips_neutral=False),
            self._clock,
        )
        dtype = DTYPE_OF[config.trainer.dtype]
        serving_dtype = DTYPE_OF[config.serving_dtype or config.trainer.dtype]
        exporter = Exporter(replica, model_config, dtype, config.model_path, serving_dtype)
        self._parts = _Parts(world, TrainingState(replica, optimizer, model_config), stepper, exporter)
        return {
            "backend": "torch",
            "model": model_config.model_type,
            "num_parameters": model_config.num_parameters,
            "dtype": config.trainer.dtype,
            "device": str(device),
            "world_size": world.size,
            "strategy": config.trainer.strategy if world.size > 1 else "alone",
            "has_reference": reference is not None,
        }

    def train(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        """One optimizer update per mini-batch; see `Stepper.train`."""
        parts = self._ready()
        settings = parts.stepper.settings_for(knobs)
        with parts.world.phase(f"train step {shard.step}"):
            metrics = parts.stepper.train(shard, settings)
        return StepStats(metrics=metrics)

    def score(self, samples: Sequence[TrainSample]) -> list[F32]:
        """Log-probs of the loss tokens under the current weights, float32 [R] each, 0 where the mask is 0."""
        parts = self._ready()
        with parts.world.phase("score samples"):
            return parts.stepper.score(samples, self._config.trainer.max_tokens_per_microbatch)

    def score_shard(self, shard: TrainShard) -> list[F32]:
        """The same for a shard's samples, bit for bit what `train` computes of them; see `Stepper.score_shard`."""
        parts = self._ready()
        with parts.world.phase(f"score step {shard.step}"):
            return parts.stepper.score_shard(shard)

    def export_weights(self) -> list[NamedArray]:
        """HF-named whole tensors on rank 0; see `export.py` for how long the bytes hold."""
        parts = self._ready()
        with parts.world.phase("export weights"):
            return parts.exporter.tensors()

    def export_device(self) -> Iterator[tuple[str, Tensor]]:
        """HF-named whole tensors on rank 0's device; see `Exporter.device_tensors`."""
        parts = self._ready()
        with parts.world.phase("export weights"):
            yield from parts.exporter.device_tensors()

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint; see `save_checkpoint`."""
        parts = self._ready()
        with parts.world.phase("save a checkpoint"):
            save_checkpoint(folder, parts.state, extra)

    def load(self, folder: str) -> dict[str, Any]:
        """Restore a checkpoint folder, or the newest one in a folder of them or a run directory."""
        parts = self._ready()
        with parts.world.phase("load a checkpoint"):
            return load_checkpoint(folder, parts.state)

    def export_hf(self, folder: str) -> None:
        """Write a HuggingFace folder (rank 0 writes)."""
        parts = self._ready()
        with parts.world.phase("export the model"):
            parts.exporter.write(folder)

    def close(self) -> None:
        """Leave the process group; never raises."""
        if self._parts is not None:
            self._parts.world.close()
            self._parts = None

    def _ready(self) -> _Parts:
        if self._parts is None:
            raise TrainError(f"trainer rank {self._config.gang.rank} is not set up", remedy="call setup() first")
        return self._parts

    def _device(self) -> torch.device:
        if self._config.device == "cpu":
            return torch.device("cpu")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local_rank = self._config.gang.local_rank
        if local_rank >= count:
            raise ConfigError(
                f"trainer rank {self._config.gang.rank} wants GPU {local_rank} of this host, but {count} are visible",
                remedy='set roles.trainer.devices, or "cpu"',
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def _replica(self, model_config: ModelConfig, world: World, *, is_trained: bool) -> Replica:
        trainer = self._config.trainer
        module = CausalLM(
            model_config,
            dtype=DTYPE_OF[trainer.dtype],
            recomputes=is_trained and trainer.activation_checkpointing,
        )
        load_weights(module, self._config.model_path, model_config)
        return Replica(module.to(world.device), world, trainer.strategy, is_trained=is_trained)
