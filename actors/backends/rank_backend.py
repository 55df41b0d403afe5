"""What both trainers share: the settings of a rank, and every call in phases, so that an error names a rank that hangs.

A backend builds its parts in `setup`; each call of `core.protocols.TrainBackend` then goes to the right part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from ...core.clock import Clock, SystemClock
from ...core.config import AlgoConfig, CriticConfig, LoraConfig, OptimizerConfig, TrainerConfig
from ...core.device_memory import AssetStore
from ...core.errors import ConfigError, MyxaError, TrainError
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray, PendingSave, StepStats
from ...core.samples import TrainShard
from ..models.adapters import adapter_facts, file_name, write_adapter
from ..models.hf_folder import export_dtype, read_eos_token_ids, write_folder
from ..models.model_config import ROUTER_BIAS, ModelConfig
from ..models.tokenizer_files import read_hf_tokenizer
from .checkpoint import TrainingState
from .offload import RankOffload
from .packed_attention import avoid_plans
from .step import Stepper
from .torch_backend.accounting import Loaded, StepSettings, called
from .torch_backend.tensors import DTYPE_OF, NAME_OF, raw_bytes
from .torch_backend.world import Gang, World


def named_array(name: str, tensor: Tensor, offset: int = 0) -> NamedArray:
    """A CPU tensor as raw bytes; a view of its memory when it is contiguous."""
    raw = raw_bytes(tensor.contiguous())
    spec = TensorSpec(
        name=name, dtype=NAME_OF[tensor.dtype], shape=tuple(tensor.shape), offset=offset, num_bytes=raw.nbytes
    )
    return NamedArray(spec=spec, data=raw)


def named_arrays(tensors: Iterable[tuple[str, Tensor]]) -> list[NamedArray]:
    """The same of several, one behind the other."""
    arrays: list[NamedArray] = []
    offset = 0
    for name, tensor in tensors:
        arrays.append(named_array(name, tensor, offset))
        offset += arrays[-1].spec.num_bytes
    return arrays


def sent_type(name: str, dtype: torch.dtype, config: ModelConfig) -> torch.dtype:
    """The number type of a weight that leaves as `dtype`: a router's correction stays float32. It can be large beside
    its differences, and experts are chosen by these. So does what the folder of a foreign model says."""
    return torch.float32 if name.endswith(ROUTER_BIAS) or name in config.exact else dtype


def written_config(config: ModelConfig, dtype: str, model_path: str | Path) -> dict[str, Any]:
    """`config.json` of weights of that type that come from the model in `model_path`."""
    facts = {**config.source, "dtype": dtype, "torch_dtype": dtype}
    if config.is_scorer:  # transformers scores a text at its last token that is not this one
        tokenizer = read_hf_tokenizer(model_path)
        pad = tokenizer.pad_token_id if facts.get("pad_token_id") is None else facts["pad_token_id"]
        facts["pad_token_id"] = None if pad in (tokenizer.eos_token_id, *read_eos_token_ids(model_path)) else pad
    return facts


WholeTensors = Callable[[bool], Iterator[tuple[str, Tensor]]]
"""(to all ranks?) -> (HuggingFace name, whole tensor on the device), in a fixed order. Collective: every rank must go
through it to its end; it yields on sending ranks only, or all of them on every rank."""


@dataclass(frozen=True, slots=True)
class ExportTypes:
    """Number types of what leaves."""

    host: torch.dtype
    device: torch.dtype
    folder: torch.dtype


@dataclass(slots=True)
class Exporter:
    """Gathers a model's weights. Rank 0 sends; under a pipeline each stage has a sender, which holds its layers' whole
    tensors one after another. For channels of the host all of them come to rank 0."""

    world: World
    config: ModelConfig
    types: ExportTypes
    model_path: str
    tensors: WholeTensors
    lora: Mapping[str, Any]
    """`adapter_facts`; with `export`: what `write` writes."""
    adapters: Callable[[], Iterator[tuple[str, Tensor]]]
    """(a trainer's name, whole float32 tensor) on rank 0 at least. Collective."""
    has_stages: bool = False
    """Some weights are not on rank 0."""
    _buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def on_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, whole tensor) on its sending rank, in a fixed order; nothing elsewhere. With `to_all` all
        on every rank. Collective: every rank must go through it to its end. Live parameters where they are whole and
        of the serving type already."""
        for name, tensor in self.tensors(to_all):
            yield name, tensor.detach().to(sent_type(name, self.types.device, self.config))

    def on_host(self) -> list[NamedArray]:
        """All weights on rank 0 in the order of the model's own list, one behind the other (`offset`); empty on other
        ranks. Collective. From a GPU the bytes lie in buffers that the next export overwrites; on the CPU they may be
        the live parameters: they hold until the next training step or load."""
        return self._arrays(self.types.host, self._buffers)

    def adapters_on_host(self, dtype: torch.dtype) -> list[NamedArray]:
        """The adapters alone, as PEFT names them, on rank 0 at least. Collective."""
        return named_arrays((file_name(name), tensor.to("cpu", dtype)) for name, tensor in self.adapters())

    def write(self, folder: str) -> None:
        """Write a HuggingFace folder, tokenizer files included, or an adapter folder. Collective; raises on every rank
        if rank 0 fails."""
        dtype, is_adapter = self.types.folder, self.lora.get("export") == "adapter"
        if is_adapter:
            tensors = self.adapters_on_host(torch.float32)
        else:
            tensors = self._arrays(dtype, {})
        failure: Exception | None = None
        if self.world.rank == 0:
            try:
                if is_adapter:
                    write_adapter(folder, self.model_path, self.lora, tensors)
                else:
                    facts = written_config(self.config, NAME_OF[dtype], self.model_path)
                    write_folder(folder, facts, tensors, tokenizer_from=self.model_path)
            except (MyxaError, OSError) as error:
                failure = error
        self.world.agree(failure, f"exporting to {folder}")

    def _arrays(self, dtype: torch.dtype, buffers: dict[str, Tensor]) -> list[NamedArray]:
        on_host: dict[str, Tensor] = {}
        for name, weight in self.tensors(self.has_stages):
            if self.world.rank != 0:
                continue
            tensor = weight.detach().to(sent_type(name, dtype, self.config))
            if tensor.device.type == "cpu":
                on_host[name] = tensor
                continue
            if name not in buffers:
                buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            on_host[name] = buffers[name].copy_(tensor, non_blocking=True)
        if self.world.rank != 0:
            return []
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # copies to pinned memory are under way until now
        return named_arrays((name, on_host[name]) for name in self.config.tensor_shapes())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Everything a rank needs to know, whatever trains."""

    model_path: str
    """HuggingFace folder with the initial weights."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
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

    @property
    def reference_path(self) -> str:
        """HuggingFace folder of the reference model, if there is a KL term."""
        return self.algo.ref_path or self.model_path

    @property
    def total_updates(self) -> int:
        """Optimizer updates of the policy in the whole run; 0 = unknown."""
        return max(0, self.num_steps - self.critic.warmup_steps) * self.algo.updates_per_step

    def export_types(self, model: ModelConfig) -> ExportTypes:
        trained = self.trainer.dtype
        return ExportTypes(
            host=DTYPE_OF[trained],
            device=DTYPE_OF[self.serving_dtype or trained],
            folder=DTYPE_OF[export_dtype(self.trainer.export_dtype, model, trained)],
        )

    def lora_facts(self) -> dict[str, Any]:
        """`adapter_facts`, and what an export is; empty: all weights are trained."""
        facts = adapter_facts(self.lora, self.model_path)
        return {**facts, "export": self.lora.export} if facts else {}

    def step_settings(self, functions: Loaded) -> StepSettings:
        return StepSettings(
            algo=self.algo,
            optimizer=self.optimizer,
            max_new_tokens=self.max_new_tokens,
            total_updates=self.total_updates,
            functions=called(functions),
        )


@dataclass(frozen=True, slots=True)
class RankParts:
    """What exists after set-up."""

    world: World
    stepper: Stepper
    exporter: Exporter
    state: TrainingState


C = TypeVar("C", bound=RankSettings)
M = TypeVar("M", bound=RankOffload)


class RankBackend(Generic[C, M]):
    """One trainer rank; `setup`, which the trainer at hand brings, sets `_parts`."""

    def __init__(self, config: C, clock: Clock | None = None, *, offload: M | None = None) -> None:
        """`offload`: where parameters, gradients and optimizer lie if they can leave the device."""
        self._config = config
        self._clock = clock or SystemClock()
        self._parts: RankParts | None = None
        self._offload = offload

    def _reference_written(self) -> None:
        if self._offload is not None:
            self._offload.reference_written()

    def _device(self) -> torch.device:
        """This rank's; from now on torch's own too. Raises ConfigError where there is none."""
        if self._config.device == "cpu":
            return torch.device("cpu")
        gang, count = self._config.gang, torch.cuda.device_count() if torch.cuda.is_available() else 0
        if gang.local_rank >= count:
            raise ConfigError(
                f"trainer rank {gang.rank} wants GPU {gang.local_rank} of this host, but {count} are visible",
                remedy='set roles.trainer.devices, or "cpu"',
            )
        device = torch.device("cuda", gang.local_rank)
        torch.cuda.set_device(device)
        avoid_plans()
        return device

    def _set_up(self) -> RankParts:
        if self._parts is None:
            raise TrainError(f"trainer rank {self._config.gang.rank} is not set up", remedy="call setup() first")
        return self._parts

    def _ready(self) -> RankParts:
        parts = self._set_up()
        if self._offload is not None:
            self._offload.ready()
        return parts

    def _ready_with_optimizer(self) -> RankParts:
        if self._offload is not None:
            self._offload.arrived()
        return self._ready()

    def train(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        parts = self._ready()
        settings = parts.stepper.settings_for(knobs)
        if self._config.trainer.impl == "own":
            longest = max((len(sample.prompt_ids) + len(sample.response_ids) for sample in shard.samples), default=0)
            parts.exporter.config.require_window(f"trainer rank {self._config.gang.rank}", max(longest, 1))
        with parts.world.phase(f"train step {shard.step}"):
            return parts.stepper.train(shard, settings)

    def judge_knobs(self, knobs: dict[str, float]) -> str:
        if self._parts is None:
            return "the trainer is still setting up"
        try:
            self._parts.stepper.settings_for(knobs)
        except ConfigError as error:
            return str(error)
        return ""

    def export_weights(self) -> list[NamedArray]:
        """HF-named whole tensors on rank 0, or adapters alone; see the exporter for how long the bytes hold."""
        parts = self._ready()
        with parts.world.phase("export weights"):
            if self._config.lora.rollout == "adapter":
                return parts.exporter.adapters_on_host(parts.exporter.types.host)
            return parts.exporter.on_host()

    def export_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor on this rank's device, in the serving type) on sending ranks, in a fixed order;
        nothing elsewhere. `to_all`: the whole model on every rank. Collective: every rank goes through it to its
        end."""
        parts = self._ready()
        with parts.world.phase("export weights on the device"):
            yield from parts.exporter.on_device(to_all=to_all)

    def begin_save(self, folder: str, extra: dict[str, Any]) -> PendingSave:
        """A checkpoint of `folder`, copied away now (collective), written by `write` while training continues, and
        complete, on all ranks at once, after `finish` on every rank. `extra` must be JSON. Each raises TrainError, the
        collective ones on every rank if any fails; an older checkpoint there then stays."""
        parts = self._ready_with_optimizer()
        with parts.world.phase("copy a checkpoint"):
            return parts.state.begin_save(folder, extra)

    def load(self, folder: str) -> dict[str, Any]:
        parts = self._ready_with_optimizer()
        with parts.world.phase("load a checkpoint"):
            extra = parts.state.load(folder)
        if self._offload is not None:
            self._offload.written()
        return extra

    def exchange(self, text: str) -> tuple[str, ...]:
        """What every rank says, in the order of ranks, on every rank. Collective."""
        world = self._set_up().world
        with world.phase("agree with the other ranks"):
            return world.exchange(text)

    def memory(self) -> AssetStore | None:
        return self._offload

    def export_hf(self, folder: str) -> None:
        parts = self._ready()
        with parts.world.phase("export the model"):
            parts.exporter.write(folder)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.world.close()
            self._parts = None
        if self._offload is not None:
            self._offload.close()
