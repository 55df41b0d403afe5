"""The plain torch trainer: one rank of a gang, on CPU (gloo) or CUDA (NCCL), replicated or sharded.

Composition only: `world` meets the other ranks, `model` computes, `parallel` shares gradients, `step` trains,
`export` and `checkpoint` write. Fulfils `core.protocols.TrainBackend`; every method blocks and must be called in the
same order on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....core.clock import Clock
from ....core.errors import ConfigError
from ...models.hf_folder import ModelConfig, export_dtype, read_config
from ...models.second_model import check_reference, critic_config
from ..rank_backend import RankBackend, RankSettings
from .adamw import AdamW
from .checkpoint import PendingCheckpoint, TrainingState, load_checkpoint
from .critic import Critic, ValueModel, load_value_model
from .export import TorchExporter
from .microbatch import Cutting
from .model import CausalLM, linear_cost, load_weights
from .offload import TorchOffload
from .parallel import Replica
from .settings import check_schedule
from .step import Stepper
from .tensors import DTYPE_OF
from .token_functions import agree_on_source, load_functions
from .world import World


@dataclass(frozen=True, slots=True)
class _Parts:
    world: World
    state: TrainingState
    stepper: Stepper
    exporter: TorchExporter

    def begin_save(self, folder: str, extra: dict[str, Any]) -> PendingCheckpoint:
        return PendingCheckpoint(folder, self.state, extra)

    def load(self, folder: str) -> dict[str, Any]:
        return load_checkpoint(folder, self.state)


class TorchBackend(RankBackend[RankSettings, _Parts]):
    """One trainer rank."""

    def __init__(
        self, config: RankSettings, clock: Clock | None = None, *, offload: TorchOffload | None = None
    ) -> None:
        """`offload`: where parameters, gradients and moments lie if they can leave the device."""
        super().__init__(config, clock, offload)
        self._offload = offload

    def setup(self) -> dict[str, Any]:
        """Join the gang, build model, reference and optimizer; returns facts for the log. Raises ModelError for a bad
        folder, LaunchError if the gang does not meet, ConfigError for settings that do not go together, UserCodeError
        for a function that cannot be imported."""
        config = self._config
        check_schedule(config.optimizer, config.total_updates)
        functions = load_functions(config.algo)
        settings = config.step_settings(functions)
        model_config = read_config(config.model_path)
        model_config.require_plain("the torch trainer")
        reference_config = check_reference(config.algo, model_config, is_any_shape=True)
        layers = critic_config(config.critic, model_config) if config.critic.enabled else None
        device = self._device()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.default_generator.manual_seed(config.seed + config.gang.rank)
        world = World.join(config.gang, device)
        with world.phase("set up"):
            agree_on_source(world, functions)
            replica = self._replica(model_config, world, is_trained=True)
            reference = (
                self._replica(reference_config, world, is_trained=False) if config.algo.keeps_reference else None
            )
            values = self._value_replica(layers, world) if layers is not None else None
            if self._offload is not None:
                trained = replica.parameters() + (values.parameters() if values else [])
                self._offload.house("params", [p for _, p in trained])
                self._offload.house("frozen", [p for _, p in reference.parameters()] if reference else [])
            optimizer = self._adamw(replica)
            critic = Critic(values, self._adamw(values), config.critic, layers) if values and layers else None
        stepper = Stepper(
            replica,
            reference,
            optimizer,
            settings,
            Cutting(linear_cost(model_config, device), device, model_config.vocab_size, skips_neutral=False),
            self._clock,
            critic,
        )
        dtype = DTYPE_OF[config.trainer.dtype]
        serving_dtype = DTYPE_OF[config.serving_dtype or config.trainer.dtype]
        folder_dtype = DTYPE_OF[export_dtype(config.trainer.export_dtype, model_config, config.trainer.dtype)]
        exporter = TorchExporter(replica, model_config, dtype, config.model_path, serving_dtype, folder_dtype)
        self._parts = _Parts(world, TrainingState(replica, optimizer, model_config, critic), stepper, exporter)
        return {
            "backend": "torch",
            "model": model_config.model_type,
            "num_parameters": model_config.num_parameters,
            "num_frozen": sum(not p.requires_grad for _, p in replica.parameters()),
            "dtype": config.trainer.dtype,
            "device": str(device),
            "world_size": world.size,
            "strategy": config.trainer.strategy if world.size > 1 else "alone",
            "has_reference": reference is not None,
            "has_critic": critic is not None,
        }

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
            model_config, dtype=DTYPE_OF[trainer.dtype], recomputes=is_trained and trainer.activation_checkpointing
        )
        load_weights(module, self._config.model_path if is_trained else self._config.reference_path, model_config)
        freeze = trainer.freeze if is_trained else ()
        return Replica(module.to(world.device), world, trainer.strategy, is_trained=is_trained, freeze=freeze)

    def _value_replica(self, layers: ModelConfig, world: World) -> Replica:
        trainer = self._config.trainer
        module = ValueModel(layers, dtype=DTYPE_OF[trainer.dtype], recomputes=trainer.activation_checkpointing)
        load_value_model(module, self._config.critic.path or self._config.model_path, layers)
        return Replica(module.to(world.device), world, trainer.strategy)

    def _adamw(self, replica: Replica) -> AdamW:
        return AdamW(replica.trained(), self._config.optimizer.betas, self._config.optimizer.eps, self._offload)
