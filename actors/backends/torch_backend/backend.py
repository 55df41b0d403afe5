"""The plain torch trainer: one rank of a gang, on CPU (gloo) or CUDA (NCCL), replicated or sharded.

Composition only: `world` meets the other ranks, `model` computes, `parallel` shares gradients, `../step.py` trains,
`checkpoint` writes. Fulfils `core.protocols.TrainBackend`; every method blocks and must be called in
the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....memory.arenas.cuda_memory import vacate
from ...models.hf_folder import check_second_model, critic_layers, read_config
from ...models.model_config import ModelConfig
from ..adapters import TorchAdapters, WithoutAdapters
from ..packed_attention import flash_kernel
from ..rank_backend import Exporter, RankBackend, RankParts, RankSettings
from ..step import Stepper
from .accounting import ReferenceModel, agree_on_source, load_functions
from .checkpoint import TorchState
from .critic import Critic, ScoreModel, ValueModel, load_value_model
from .model import CausalLM, PolicyModel, linear_cost, load_weights
from .offload import TorchOffload
from .parallel import Replica, TorchModel
from .tensors import DTYPE_OF, whole_tensor
from .world import World

WARM_UP_TOKENS = 8192
"""Beyond as many tokens the compiler chooses no other kernels."""


class TorchBackend(RankBackend[RankSettings, TorchOffload]):
    """One trainer rank."""

    def setup(self) -> dict[str, Any]:
        """Join the gang, build model, reference and optimizer; returns facts for the log. Raises ModelError for a bad
        folder, LaunchError if the gang does not meet, ConfigError for settings that do not go together, UserCodeError
        for a function that cannot be imported."""
        config = self._config
        functions = load_functions(config.algo)
        settings = config.step_settings(functions)
        model_config = read_config(config.model_path)
        is_scorer = config.algo.kind == "reward"
        if config.trainer.impl == "own":
            replace(model_config, is_scorer=model_config.is_scorer and not is_scorer).require_plain("the torch trainer")
        model_config = model_config.as_scorer() if is_scorer else model_config
        check_second_model("algo.ref_path", config.algo.ref_path, model_config)
        check_second_model("critic.path", config.critic.path, model_config)
        device = self._device()
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.default_generator.manual_seed(config.seed + config.gang.rank)
        world = World.join(config.gang, device)
        with world.phase("set up"):
            agree_on_source(world, functions)
            policy = self._wrap(self._policy(model_config), world, model_config, config.trainer.freeze)
            critic = None
            reference = self._reference(policy, model_config) if config.algo.keeps_reference else None
            if config.critic.enabled:
                values = self._value_module(critic_layers(model_config))
                critic = Critic(self._wrap(values, world, model_config), config.critic)
            trained = [policy, critic.model] if critic else [policy]
            if self._offload is not None:
                self._offload.house("params", [p for model in trained for _, p in model.parameters()])
                self._offload.house("frozen", [p for _, p in reference.model.parameters()] if reference else [])
            for model in trained:
                model.make_optimizer(config.optimizer, self._offload)
                if device.type == "cuda" and config.trainer.impl == "own" and self._offload is None:
                    model.warm_up(min(config.trainer.max_tokens_per_microbatch, WARM_UP_TOKENS))
                    vacate(str(device))  # an engine on the same GPU measures what is free when it starts
            stepper = Stepper(policy, reference, settings, self._clock, critic)
            stepper.settings_for({})

        lora = config.lora_facts()
        types, tensors = config.export_types(model_config), partial(_whole_tensors, policy)
        self._parts = RankParts(
            world,
            stepper,
            Exporter(world, model_config, types, config.model_path, tensors, lora, partial(_adapters, policy)),
            TorchState(world=world, model=model_config, reference=reference, policy=policy, critic=critic, lora=lora),
        )
        return {
            "backend": "torch",
            "model": model_config.model_type,
            "num_parameters": model_config.num_parameters,
            "num_frozen": sum(not p.requires_grad for _, p in policy.parameters()),
            "dtype": config.trainer.dtype,
            "device": str(device),
            "world_size": world.size,
            "strategy": config.trainer.strategy if world.size > 1 else "alone",
            "has_reference": reference is not None,
            "has_critic": critic is not None,
        }

    def _wrap(self, module: PolicyModel, world: World, model: ModelConfig, freeze: Sequence[str] = ()) -> TorchModel:
        trainer = self._config.trainer
        is_own = trainer.impl == "own"
        return TorchModel(
            module.to(world.device),
            world,
            trainer.strategy,
            vocab_size=model.vocab_size,
            linear_cost=linear_cost(model, world.device) if is_own else None,
            packs_rows=is_own and flash_kernel(world.device, DTYPE_OF[trainer.dtype], model.head_dim) is not None,
            freeze=freeze,
        )

    def _module(self, model_config: ModelConfig, *, is_trained: bool) -> PolicyModel:
        trainer, dtype = self._config.trainer, DTYPE_OF[self._config.trainer.dtype]
        folder = self._config.model_path if is_trained else self._config.reference_path
        recomputes = is_trained and trainer.activation_checkpointing
        if trainer.impl == "hf":
            from .hf_model import TransformersModel  # seconds of import

            return TransformersModel(folder, model_config, dtype=dtype, recomputes=recomputes)
        if model_config.is_scorer:
            scorer = ScoreModel(model_config, dtype=dtype, recomputes=recomputes)
            load_value_model(scorer, folder, critic_layers(model_config))
            return scorer
        has_room = is_trained and not recomputes and self._offload is None  # of a GPU of its own
        module = CausalLM(model_config, dtype=dtype, recomputes=recomputes, keeps_logits=has_room)
        load_weights(module, folder, model_config)
        if self._config.lora.rank and is_trained:  # masters are for what is trained
            module.to(dtype)
        return module

    def _policy(self, model_config: ModelConfig) -> PolicyModel:
        module, lora = self._module(model_config, is_trained=True), self._config.lora
        if lora.rank:
            module.adapters = TorchAdapters(lora, module.body, self._config.seed)
        return module

    def _reference(self, policy: TorchModel, model_config: ModelConfig) -> ReferenceModel[Any]:
        config, adapters = self._config, policy.module.adapters
        if adapters is not None and not config.algo.ref_path:
            return ReferenceModel(WithoutAdapters(policy, adapters), self._reference_written, can_renew=False)
        frozen = self._module(model_config, is_trained=False).to(policy.world.device)
        replica = Replica(frozen, policy.world, config.trainer.strategy, is_trained=False)
        return ReferenceModel(replica, self._reference_written, can_renew=adapters is None)

    def _value_module(self, layers: ModelConfig) -> ValueModel:
        trainer = self._config.trainer
        module = ValueModel(layers, dtype=DTYPE_OF[trainer.dtype], recomputes=trainer.activation_checkpointing)
        load_value_model(module, self._config.critic.path or self._config.model_path, layers)
        return module


def _adapters(policy: TorchModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, whole_tensor(parameter.detach())) for name, parameter in policy.kept())


def _whole_tensors(policy: TorchModel, to_all: bool) -> Iterator[tuple[str, Tensor]]:
    for name, weight in policy.module.for_folder(whole_tensor):
        if to_all or policy.world.rank == 0:
            yield name, weight
