"""Weights on their way out: HuggingFace names, whole tensors, raw bytes on rank 0.

On one CPU rank, or replicated ones, in float32 the bytes are the live parameters themselves (no copy): they hold until
the next training step or load. Otherwise they lie in buffers that the next export overwrites.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from ....core.errors import MyxaError
from ....core.messages import TensorSpec
from ....core.protocols import NamedArray
from ...models.hf_folder import ModelConfig, write_folder
from .parallel import Replica
from .tensors import NAME_OF, from_bytes, largest_beyond, raw_bytes, whole_tensor
from .world import World

_log = logging.getLogger("myxa.backends")


def named_array(name: str, tensor: Tensor, offset: int = 0) -> NamedArray:
    """A CPU tensor as raw bytes; a view of its memory when it is contiguous."""
    raw = raw_bytes(tensor.contiguous())
    spec = TensorSpec(
        name=name, dtype=NAME_OF[tensor.dtype], shape=tuple(tensor.shape), offset=offset, num_bytes=raw.nbytes
    )
    return NamedArray(spec=spec, data=raw)


def gathered_as(folder_dtype: torch.dtype) -> torch.dtype:
    """The type that weights are gathered in for a folder of that type: what `for_folder` can still look at."""
    return torch.float32 if folder_dtype == torch.float16 else folder_dtype


def for_folder(arrays: list[NamedArray], dtype: torch.dtype) -> tuple[list[NamedArray], torch.dtype]:
    """Weights, gathered as `gathered_as` says, in the type of a folder; in float32 if one would become infinite. Then
    the log says so: a run that ends writes its model all the same."""
    if gathered_as(dtype) == dtype:
        return arrays, dtype
    narrow: list[NamedArray] = []
    offset = 0
    for array in arrays:
        tensor = from_bytes(array)
        if largest := largest_beyond(tensor, dtype):
            _log.warning(
                "weight %s holds %g, which float16 has not: the folder is written in float32 -- set "
                'trainer.export_dtype = "bfloat16"',
                array.spec.name, largest,
            )  # fmt: skip
            return arrays, torch.float32
        narrow.append(named_array(array.spec.name, tensor.to(dtype), offset))
        offset += narrow[-1].spec.num_bytes
    return narrow, dtype


def write_gathered(
    world: World, gathered: list[NamedArray], wanted: torch.dtype, config: ModelConfig, folder: str, model_path: str
) -> None:
    """Write weights, gathered on rank 0, as a folder. Collective; raises on every rank if rank 0 fails."""
    failure: Exception | None = None
    if world.rank == 0:
        try:
            tensors, dtype = for_folder(gathered, wanted)
            facts = {**config.source, "dtype": NAME_OF[dtype], "torch_dtype": NAME_OF[dtype]}
            write_folder(folder, facts, tensors, tokenizer_from=model_path)
        except (MyxaError, OSError) as error:
            failure = error
    world.agree(failure, f"exporting to {folder}")


class TorchExporter:
    """Gathers a replica's weights in `dtype`."""

    def __init__(
        self,
        replica: Replica,
        config: ModelConfig,
        dtype: torch.dtype,
        model_path: str,
        serving_dtype: torch.dtype | None = None,
        folder_dtype: torch.dtype | None = None,
    ) -> None:
        """`serving_dtype`: of tensors that go to engines on devices; `folder_dtype`: of folders; None: `dtype`."""
        self._replica = replica
        self._config = config
        self._dtype = dtype
        self._model_path = model_path
        self._serving_dtype = serving_dtype or dtype
        self._folder_dtype = folder_dtype or dtype
        self._buffers: dict[str, Tensor] = {}

    def on_host(self) -> list[NamedArray]:
        """All weights in the order of the forward pass, one behind the other (`offset`); empty on other ranks.
        Collective: under fsdp every tensor is gathered, one at a time."""
        return self._arrays(self._dtype, self._buffers)

    def _arrays(self, dtype: torch.dtype, buffers: dict[str, Tensor]) -> list[NamedArray]:
        parameters = dict(self._replica.parameters())
        arrays: list[NamedArray] = []
        offset = 0
        for name in self._config.tensor_shapes():
            whole = whole_tensor(parameters[name].detach())
            if self._replica.world.rank == 0:
                array = named_array(name, self._on_host(name, whole, dtype, buffers), offset)
                offset += array.spec.num_bytes
                arrays.append(array)
        if self._replica.world.device.type == "cuda":
            torch.cuda.synchronize(self._replica.world.device)  # the copies to the host are under way until now
        return arrays

    def on_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on this rank's device) in the order of `tensors`, on rank 0, or on all. Collective: every
        rank must exhaust it. Live parameters where they are whole and of the serving type already."""
        parameters = dict(self._replica.parameters())
        for name in self._config.tensor_shapes():
            whole = whole_tensor(parameters[name].detach())
            if to_all or self._replica.world.rank == 0:
                yield name, whole.to(self._serving_dtype)

    def write(self, folder: str) -> None:
        """Write a HuggingFace folder, tokenizer files included. Collective; raises on every rank if rank 0 fails."""
        gathered = self._arrays(gathered_as(self._folder_dtype), {})
        write_gathered(self._replica.world, gathered, self._folder_dtype, self._config, folder, self._model_path)

    def _on_host(self, name: str, tensor: Tensor, dtype: torch.dtype, buffers: dict[str, Tensor]) -> Tensor:
        is_cuda = tensor.device.type == "cuda"
        if not is_cuda and tensor.dtype == dtype and not self._replica.is_sharded:
            return tensor
        buffer = buffers.get(name)
        if buffer is None:
            buffer = torch.empty(tensor.shape, dtype=dtype, device="cpu", pin_memory=is_cuda)
            buffers[name] = buffer
        return buffer.copy_(tensor.to(dtype), non_blocking=is_cuda)
