"""The Megatron trainer: one rank of a gang that cuts the model by tensor, pipeline, context and expert parallelism.

Composition only: `world` meets the other ranks, `provider` and `hf_weights` make the model, `schedule` runs it,
`../step.py` trains, `checkpoint` writes. Fulfils `core.protocols.TrainBackend`; every method blocks
and must be called in the same order on every rank. Ranks of one replica (same data-parallel rank) are given the same
shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....core.config.learning import MegatronSettings
from ...models.hf_folder import check_second_model, read_config
from ...models.model_config import ModelConfig
from ..adapters import WithoutAdapters
from ..rank_backend import Exporter, RankBackend, RankParts, RankSettings
from ..step import Stepper
from ..torch_backend.accounting import (
    Loaded,
    ReferenceModel,
    StepSettings,
    agree_on_source,
    load_functions,
)
from ..torch_backend.tensors import DTYPE_OF
from . import mcore
from .adapters import MegatronAdapters
from .batch import PackCutting
from .checkpoint import MegatronTrainingState
from .hf_weights import iter_hf_tensors, load_hf_folder
from .layout import ParallelLayout, check_routing
from .offload import MegatronOffload, Part
from .optimizer import MegatronOptimizer, wrap_chunks
from .provider import build_model_chunks, model_fields
from .schedule import MegatronPolicy, Pipeline, RoutingReplay
from .verbatim import check_packages, check_table
from .world import MegatronWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRankSettings(RankSettings):
    """With the `[megatron]` table."""

    megatron: MegatronSettings = field(default_factory=MegatronSettings)

    def step_settings(self, functions: Loaded) -> StepSettings:
        return replace(RankSettings.step_settings(self, functions), mtp=self.megatron.mtp)

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.megatron)


class MegatronBackend(RankBackend[MegatronRankSettings, MegatronOffload]):
    """One trainer rank."""

    def setup(self) -> dict[str, Any]:
        """Join the gang, build model, reference and optimizer; returns facts for the log. Raises ModelError for a bad
        folder, LaunchError if the gang does not meet, ConfigError for settings that do not go together or that the
        installed megatron-core does not know, UserCodeError for a function that cannot be had."""
        config, home = self._config, self._offload
        user = load_functions(config.algo)
        trunk = read_config(config.model_path)
        model = trunk.with_mtp() if config.megatron.mtp else trunk
        model.require_own("the Megatron trainer")
        check_second_model("algo.ref_path", config.algo.ref_path, trunk)
        if config.megatron.routing_replay:
            check_routing(model.num_experts, config.megatron)
        device = self._device()
        _check_tables(config.megatron)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        world = MegatronWorld.enter(config.gang, device, config.layout, config.seed)
        try:
            with world.phase("set up"):
                agree_on_source(world, user)
                if home is not None:
                    home.begin(device.index or 0)
                with self._region("chunks"):
                    chunks = self._chunks(model, config.model_path)
                adapters = MegatronAdapters(config.lora, config.seed, chunks, model) if config.lora.rank else None
                with self._region("buffers"):
                    wrapped = wrap_chunks(chunks, config.megatron)
                if home is not None:
                    home.move_grads(wrapped)
                with self._region("masters"):
                    optimizer = MegatronOptimizer(
                        wrapped, config.optimizer, config.megatron, DTYPE_OF[config.trainer.dtype], device
                    )
                with self._region("moments"):
                    optimizer.make_moments()
                keeps_reference = config.algo.keeps_reference and (adapters is None or bool(config.algo.ref_path))
                reference = self._reference(trunk) if keeps_reference else None
                if home is not None:
                    home.built(optimizer, lambda is_mapped: bool(world.gather(torch.tensor([is_mapped])).any()))
                    optimizer.before_update, optimizer.after_update = home.arrived, home.written
        except BaseException:
            world.close()
            raise
        self._parts = self._assembled(world, model, wrapped, optimizer, reference, user, adapters)
        return self._facts(model, world, wrapped, has_reference=config.algo.keeps_reference)

    def _assembled(
        self,
        world: MegatronWorld,
        model: ModelConfig,
        chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        reference: ReferenceModel[Any] | None,
        user: Loaded,
        adapters: MegatronAdapters | None,
    ) -> RankParts:
        config = self._config
        routing = RoutingReplay(chunks) if config.megatron.routing_replay else None
        policy = MegatronPolicy(chunks, optimizer, self._cutting(world, model), world, model.vocab_size, routing)
        policy.mtp_reaches_trunk = config.megatron.mtp_reaches_trunk

        if adapters is not None and reference is None and config.algo.keeps_reference:
            body = Pipeline(chunks, model.vocab_size)  # which chooses its experts itself
            reference = ReferenceModel(WithoutAdapters(body, adapters), self._reference_written, can_renew=False)

        def whole_tensors(to_all: bool) -> Iterator[tuple[str, Tensor]]:
            optimizer.settle()
            return iter_hf_tensors(
                chunks, model, to_all=to_all, pick=Tensor.detach if adapters is None else adapters.weight_of
            )

        def whole_adapters() -> Iterator[tuple[str, Tensor]]:
            optimizer.settle()
            return iter(()) if adapters is None else adapters.whole(world.sum)

        exporter = Exporter(
            world, model, config.export_types(model), config.model_path, whole_tensors, config.lora_facts(),
            whole_adapters, has_stages=config.layout.pp > 1,
        )  # fmt: skip
        state = MegatronTrainingState(
            world=world, model=model, reference=reference, policy=policy, layout=config.layout, lora=exporter.lora,
            adapters=adapters,
        )  # fmt: skip
        return RankParts(world, Stepper(policy, reference, config.step_settings(user), self._clock), exporter, state)

    def _facts(
        self, model: ModelConfig, world: MegatronWorld, chunks: Sequence[nn.Module], *, has_reference: bool
    ) -> dict[str, Any]:
        layout = self._config.layout
        return {
            "backend": "megatron",
            "megatron_core": str(mcore.module("package_info").__version__),
            "model": model.model_type,
            "num_parameters": model.num_parameters,
            "num_parameters_here": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            "dtype": self._config.trainer.dtype,
            "device": str(world.device),
            "world_size": world.size,
            "layout": f"dp{world.grid.dp.size()} tp{layout.tp} pp{layout.pp} vpp{layout.vpp} cp{layout.cp} "
            f"ep{layout.ep} etp{layout.etp}" + (" sp" if layout.sequence_parallel else ""),
            "has_reference": has_reference,
        }

    def _region(self, part: Part) -> AbstractContextManager[None]:
        return nullcontext() if self._offload is None else self._offload.region(part)

    def _chunks(self, model: ModelConfig, folder: str) -> list[nn.Module]:
        config = self._config
        dtype = DTYPE_OF[config.trainer.dtype]
        chunks = build_model_chunks(model, config.layout, dtype, model_fields(config.megatron))
        load_hf_folder(chunks, folder, model)
        return chunks

    def _reference(self, model: ModelConfig) -> ReferenceModel[Pipeline]:
        with self._region("reference"):
            chunks = self._chunks(model, self._config.reference_path)
        for chunk in chunks:
            chunk.requires_grad_(requires_grad=False)
        pipeline = Pipeline(chunks, model.vocab_size)
        return ReferenceModel(pipeline, self._reference_written, can_renew=not self._config.lora.rank)

    def _cutting(self, world: MegatronWorld, model: ModelConfig) -> PackCutting:
        layout, megatron = self._config.layout, self._config.megatron
        return PackCutting(
            device=world.device,
            num_chunks=2 * layout.cp if layout.cp > 1 else 1,
            pack_multiple=layout.sequence_multiple,
            cp_rank=world.grid.cp.rank(),
            has_mtp=model.has_mtp,
            multiple_of_micros=layout.pp if layout.vpp > 1 else 1,
            choices=model.expert_choices if megatron.routing_replay == "rollout" else None,
            part=(world.grid.tp.rank(), layout.tp) if layout.sequence_parallel else (0, 1),
        )


def _check_tables(settings: MegatronSettings) -> None:
    check_packages({"model": settings.model, "optimizer": settings.optimizer})
    for name, table, record in (
        ("ddp", settings.ddp, mcore.module("distributed").DistributedDataParallelConfig),
        ("optimizer", settings.optimizer, mcore.module("optimizer").OptimizerConfig),
    ):
        check_table(name, table, {entry.name for entry in fields(record)})
