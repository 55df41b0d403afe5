"""Weights on their way out: HuggingFace names, whole tensors, raw bytes on rank 0 or on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.errors import MyxaError
from ...core.messages import TensorSpec
from ...core.protocols import NamedArray
from ..models.hf_folder import write_folder
from ..models.model_config import ModelConfig
from .torch_backend.tensors import NAME_OF, raw_bytes
from .torch_backend.world import World


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
    has_stages: bool = False
    """Some weights are not on rank 0."""
    _buffers: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def on_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, whole tensor) on its sending rank, in a fixed order; nothing elsewhere. With `to_all` all
        on every rank. Collective: every rank must go through it to its end. Live parameters where they are whole and
        of the serving type already."""
        for name, tensor in self.tensors(to_all):
            yield name, tensor.detach().to(self.types.device)

    def on_host(self) -> list[NamedArray]:
        """All weights on rank 0 in the order of the model's own list, one behind the other (`offset`); empty on other
        ranks. Collective. From a GPU the bytes lie in buffers that the next export overwrites; on the CPU they may be
        the live parameters: they hold until the next training step or load."""
        return self._arrays(self.types.host, self._buffers)

    def write(self, folder: str) -> None:
        """Write a HuggingFace folder, tokenizer files included. Collective; raises on every rank if rank 0 fails."""
        dtype = self.types.folder
        tensors = self._arrays(dtype, {})
        failure: Exception | None = None
        if self.world.rank == 0:
            try:
                facts = {**self.config.source, "dtype": NAME_OF[dtype], "torch_dtype": NAME_OF[dtype]}
                write_folder(folder, facts, tensors, tokenizer_from=self.model_path)
            except (MyxaError, OSError) as error:
                failure = error
        self.world.agree(failure, f"exporting to {folder}")

    def _arrays(self, dtype: torch.dtype, buffers: dict[str, Tensor]) -> list[NamedArray]:
        found: dict[str, Tensor] = {}
        for name, whole in self.tensors(self.has_stages):
            if self.world.rank != 0:
                continue
            tensor = whole.detach().to(dtype)
            if tensor.device.type == "cpu":
                found[name] = tensor
                continue
            if name not in buffers:
                buffers[name] = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=True)
            found[name] = buffers[name].copy_(tensor, non_blocking=True)
        if self.world.rank != 0:
            return []
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # copies to pinned memory are under way until now
        return named_arrays((name, found[name]) for name in self.config.tensor_shapes())
