"""The Megatron trainer: one rank of a gang that cuts the model by tensor, pipeline, context and expert parallelism.

Composition only: `world` meets the other ranks, `provider` and `hf_load` make the model, `schedule` runs it, `step`
trains, `export` and `checkpoint` write. Fulfils `core.protocols.TrainBackend`; every method blocks and must be called
in the same order on every rank. Ranks of one replica (same data-parallel rank) are given the same shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....core.clock import Clock, SystemClock
from ....core.errors import TrainError
from ....core.protocols import NamedArray, StepStats
from ....core.samples import F32, TrainSample, TrainShard
from ...models.hf_folder import ModelConfig, read_config
from ..torch_backend.schedule import check_schedule
from ..torch_backend.settings import StepSettings
from ..torch_backend.tensors import DTYPE_OF
from . import mcore
from .batch import Cutting
from .checkpoint import TrainingState, load_checkpoint, save_checkpoint
from .export import Exporter
from .hf_export import iter_hf_tensors
from .hf_load import load_hf_folder
from .optimizer import MegatronAdamW, Precision, wrap_chunks
from .provider import build_model_chunks
from .routing import RoutingReplay
from .schedule import Pipeline
from .settings import MegatronBackendConfig, check_routing, check_settings, checked_fields, model_fields
from .step import MegatronStepper
from .verbatim import OWNED_DDP, OWNED_OPTIMIZER
from .world import MegatronWorld


@dataclass(frozen=True, slots=True)
class _Parts:
    """What exists after set-up."""

    world: MegatronWorld
    model: ModelConfig
    pipeline: Pipeline
    optimizer: MegatronAdamW
    stepper: MegatronStepper
    exporter: Exporter


class MegatronBackend:
    """One trainer rank."""

    def __init__(self, config: MegatronBackendConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or SystemClock()
        self._parts: _Parts | None = None

    def setup(self) -> dict[str, Any]:
        """Join the gang, build model, reference and optimizer; returns facts for the log.

        Raises ModelError for a bad folder, LaunchError if the gang does not meet, ConfigError for settings that do not
        go together or that the installed megatron-core does not know.
        """
        config = self._config
        total_updates = config.num_steps * config.algo.minibatches
        check_schedule(config.optimizer, total_updates)
        check_settings(config)
        model = read_config(config.model_path)
        if config.megatron.routing_replay:
            check_routing(model.num_experts, config.megatron.recompute)
        precision = Precision(DTYPE_OF[config.trainer.dtype], self._device())
        ddp_options = checked_fields(
            "ddp", config.megatron.ddp, mcore.module("distributed").DistributedDataParallelConfig, OWNED_DDP
        )
        optimizer_options = checked_fields(
            "optimizer", config.megatron.optimizer, mcore.module("optimizer").OptimizerConfig, OWNED_OPTIMIZER
        )
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        world = MegatronWorld.enter(config.gang, precision.device, config.layout, config.seed)
        try:
            with world.phase("set up"):
                chunks = self._chunks(model, precision)
                wrapped = wrap_chunks(chunks, _config_of(chunks), config.megatron, ddp_options)
                optimizer = MegatronAdamW(wrapped, config.optimizer, config.megatron, precision, optimizer_options)
                reference = self._reference(model, precision) if config.algo.kl_coef > 0 else None
        except BaseException:
            world.close()
            raise
        routing = RoutingReplay(wrapped) if config.megatron.routing_replay else None
        pipeline = Pipeline(wrapped, _config_of(chunks), model.vocab_size, routing)
        stepper = MegatronStepper(
            pipeline,
            reference,
            optimizer,
            StepSettings(
                algo=config.algo,
                optimizer=config.optimizer,
                temperature=config.temperature,
                max_new_tokens=config.max_new_tokens,
                total_updates=total_updates,
            ),
            self._cutting(model, world),
            world,
            self._clock,
        )
        serving = DTYPE_OF[config.serving_dtype or config.trainer.dtype]
        exporter = Exporter(world, model, precision.params, serving, config.model_path, self._hf_tensors)
        self._parts = _Parts(world, model, pipeline, optimizer, stepper, exporter)
        return self._facts(self._parts)

    def train(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        """One optimizer update per mini-batch; see `MegatronStepper.train`."""
        parts = self._ready()
        settings = parts.stepper.settings_for(knobs)
        with parts.world.phase(f"train step {shard.step}"):
            metrics = parts.stepper.train(shard, settings)
        return StepStats(metrics=metrics)

    def score(self, samples: Sequence[TrainSample]) -> list[F32]:
        """Log-probs of the loss tokens under the current weights, float32 [R] each, 0 where the mask is 0; equal
        on all ranks of a replica, which must give the same samples."""
        parts = self._ready()
        with parts.world.phase("score samples"):
            return parts.stepper.score(samples, self._config.trainer.max_tokens_per_microbatch)

    def score_shard(self, shard: TrainShard) -> list[F32]:
        """The same for a shard's samples, bit for bit what `train` computes of them."""
        parts = self._ready()
        with parts.world.phase(f"score step {shard.step}"):
            return parts.stepper.score_shard(shard)

    def export_weights(self) -> list[NamedArray]:
        """HF-named whole tensors on rank 0; see `export.py` for how long the bytes hold."""
        parts = self._ready()
        with parts.world.phase("export weights"):
            return parts.exporter.on_host()

    def export_device(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor on this rank's device, in the serving type) on the sending rank of every pipeline
        stage, in a fixed order; nothing elsewhere. Collective: every rank goes through it to its end."""
        parts = self._ready()
        with parts.world.phase("export weights on the device"):
            yield from parts.exporter.on_device()

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint; see `save_checkpoint`."""
        parts = self._ready()
        with parts.world.phase("save a checkpoint"):
            save_checkpoint(folder, TrainingState(parts.world, parts.optimizer, parts.model), extra)

    def load(self, folder: str) -> dict[str, Any]:
        """Restore a checkpoint folder, or the newest one in a folder of them or a run directory; any layout."""
        parts = self._ready()
        with parts.world.phase("load a checkpoint"):
            return load_checkpoint(folder, TrainingState(parts.world, parts.optimizer, parts.model))

    def export_hf(self, folder: str) -> None:
        """Write a HuggingFace folder (rank 0 writes)."""
        parts = self._ready()
        with parts.world.phase("export the model"):
            parts.exporter.write(folder)

    def close(self) -> None:
        """Leave the process groups; never raises."""
        if self._parts is not None:
            self._parts.world.close()
            self._parts = None

    # -- set-up

    def _facts(self, parts: _Parts) -> dict[str, Any]:
        layout, world = self._config.layout, parts.world
        return {
            "backend": "megatron",
            "megatron_core": str(mcore.module("package_info").__version__),
            "model": parts.model.model_type,
            "num_parameters": parts.model.num_parameters,
            "num_parameters_here": sum(p.numel() for chunk in parts.pipeline.chunks for p in chunk.parameters()),
            "dtype": self._config.trainer.dtype,
            "device": str(world.device),
            "world_size": world.size,
            "layout": f"dp{world.place.dp_size} tp{layout.tp} pp{layout.pp} vpp{layout.vpp} cp{layout.cp} "
            f"ep{layout.ep} etp{layout.etp}" + (" sp" if layout.sequence_parallel else ""),
            "has_reference": parts.stepper.has_reference,
        }

    def _ready(self) -> _Parts:
        if self._parts is None:
            raise TrainError(f"trainer rank {self._config.gang.rank} is not set up", remedy="call setup() first")
        return self._parts

    def _device(self) -> torch.device:
        if self._config.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", self._config.gang.local_rank % max(1, torch.cuda.device_count()))

    def _chunks(self, model: ModelConfig, precision: Precision) -> list[nn.Module]:
        """This rank's virtual stages with the folder's weights."""
        config = self._config
        chunks = build_model_chunks(
            model,
            config.layout,
            precision.params,
            model_fields(config.megatron),
            transformer_engine=config.megatron.transformer_engine,
        )
        load_hf_folder(chunks, config.model_path, model, config.layout)
        return chunks

    def _reference(self, model: ModelConfig, precision: Precision) -> Pipeline:
        chunks = self._chunks(model, precision)
        for chunk in chunks:
            chunk.requires_grad_(requires_grad=False)
        return Pipeline(chunks, _config_of(chunks), model.vocab_size)

    def _cutting(self, model: ModelConfig, world: MegatronWorld) -> Cutting:
        layout = self._config.layout
        return Cutting(
            device=world.device,
            vocab_size=model.vocab_size,
            num_chunks=2 * layout.cp if layout.cp > 1 else 1,
            pack_multiple=layout.sequence_multiple,
            cp_rank=world.place.cp_rank,
            multiple_of_micros=layout.pp if layout.vpp > 1 else 1,
        )

    def _hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        parts = self._ready()
        parts.optimizer.settle()
        return iter_hf_tensors(parts.pipeline.chunks, parts.model, self._config.layout)


def _config_of(chunks: Sequence[nn.Module]) -> Any:
    return mcore.module("utils").get_model_config(chunks[0])
