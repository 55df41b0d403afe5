"""Weights on their way out of a Megatron gang: HuggingFace names, whole tensors, raw bytes on rank 0 or on the device.

Every pipeline stage has one sending rank, which holds its layers' whole tensors one after another while tensor- and
expert-parallel ranks take part. For channels of the host they travel on to rank 0; for channels of the device each
sending rank keeps its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ....core.protocols import NamedArray
from ...models.hf_folder import ModelConfig
from ..torch_backend.export import gathered_as, named_array, write_gathered
from ..torch_backend.tensors import DTYPE_OF, NAME_OF, integers
from .world import MegatronWorld

HEADER_BYTES = 512
"""Room for a tensor's name, type and shape as JSON."""


class MegatronExporter:
    """Gathers a pipeline's weights: for the host in `dtype`, for devices in `serving_dtype`."""

    def __init__(
        self,
        world: MegatronWorld,
        config: ModelConfig,
        dtype: torch.dtype,
        serving_dtype: torch.dtype,
        model_path: str,
        tensors: Callable[[bool], Iterator[tuple[str, Tensor]]],
        folder_dtype: torch.dtype | None = None,
    ) -> None:
        """`tensors(to_all)`: whole tensors, see `hf_export`. `folder_dtype`: of folders; None: `dtype`."""
        self._world = world
        self._config = config
        self._dtype = dtype
        self._serving_dtype = serving_dtype
        self._folder_dtype = folder_dtype or dtype
        self._model_path = model_path
        self._tensors = tensors
        self._buffers: dict[str, Tensor] = {}

    def on_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, whole tensor) of this stage on its sending rank, in a fixed order; nothing elsewhere. With
        `to_all` of all stages on every rank. Collective: every rank must go through it to its end."""
        for name, tensor in self._tensors(to_all):
            yield name, tensor.detach().to(self._serving_dtype)

    def on_host(self) -> list[NamedArray]:
        """All weights on rank 0 in the order of the model's own list, one behind the other (`offset`); empty on other
        ranks. Collective. The bytes lie in buffers that the next export overwrites."""
        return self._arrays(self._dtype, self._buffers)

    def _arrays(self, dtype: torch.dtype, buffers: dict[str, Tensor]) -> list[NamedArray]:
        self._collect(dtype, buffers)
        if self._world.rank != 0:
            return []
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)  # copies to pinned memory are under way until now
        arrays: list[NamedArray] = []
        offset = 0
        for name in self._config.tensor_shapes():
            arrays.append(named_array(name, buffers[name], offset))
            offset += arrays[-1].spec.num_bytes
        return arrays

    def write(self, folder: str) -> None:
        """Write a HuggingFace folder, tokenizer files included. Collective; raises on every rank if rank 0 fails."""
        gathered = self._arrays(gathered_as(self._folder_dtype), {})
        write_gathered(self._world, gathered, self._folder_dtype, self._config, folder, self._model_path)

    def _collect(self, dtype: torch.dtype, buffers: dict[str, Tensor]) -> None:
        is_first = self._world.place.pp_rank == 0
        for name, found in self._tensors(False):
            tensor = found.detach().to(dtype)
            if self._world.rank == 0:
                _keep(buffers, name, tensor)
            else:
                header = json.dumps([name, NAME_OF[tensor.dtype], list(tensor.shape)]).encode()
                dist.send(_padded(header, tensor.device), 0)
                dist.send(tensor.contiguous(), 0)
        if self._world.rank == 0:
            for source in self._later_senders():
                while (received := _receive(source, self._world.device)) is not None:
                    _keep(buffers, *received)
        elif not is_first and (place := self._world.place).dp_rank == place.tp_rank == place.cp_rank == 0:
            _send_end(self._world.device)

    def _later_senders(self) -> list[int]:
        """Global ranks that send for the stages behind the first: Megatron's rank order has stages outermost."""
        place = self._world.place
        each = self._world.size // place.pp_size
        return [stage * each for stage in range(1, place.pp_size)]


def _keep(buffers: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    buffer = buffers.get(name)
    is_cuda = tensor.device.type == "cuda"
    if buffer is None:
        buffer = buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_cuda)
    buffer.copy_(tensor, non_blocking=is_cuda)


def _send_end(device: torch.device) -> None:
    dist.send(_padded(b"", device), 0)


def _receive(source: int, device: torch.device) -> tuple[str, Tensor] | None:
    box = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=device)
    dist.recv(box, source)
    text = bytes(integers(box)).rstrip(b"\0")
    if not text:
        return None
    name, dtype, shape = json.loads(text)
    tensor = torch.empty(shape, dtype=DTYPE_OF[dtype], device=device)
    dist.recv(tensor, source)
    return name, tensor


def _padded(header: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(header.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8).to(device)
