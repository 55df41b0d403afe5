"""Typed fronts of a few torch functions whose own annotations say nothing, and the names of number types.

Each front is one call; they are here so that the rest can be checked strictly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import checkpoint

from ....core.protocols import NamedArray
from ...models.safetensors_file import DTYPES, E8M0

P = ParamSpec("P")
R = TypeVar("R")

DTYPE_OF: Mapping[str, torch.dtype] = {kind: getattr(torch, kind) for kind, _ in DTYPES.values() if kind != E8M0}
"""Names as in `TensorSpec.dtype`: all that a safetensors file may hold here, but for scales."""
NAME_OF = {dtype: name for name, dtype in DTYPE_OF.items()}


def floats(values: Tensor) -> list[float]:
    return cast("list[float]", cast(Any, values).tolist())


def integers(values: Tensor) -> list[int]:
    return cast("list[int]", cast(Any, values).tolist())


def pieces(tensor: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The tensor cut along its first dimension into parts of these lengths, sharing its memory."""
    return cast("tuple[Tensor, ...]", cast(Any, tensor).split(list(lengths)))


def from_array(array: npt.NDArray[Any]) -> Tensor:
    """A CPU tensor over a numpy array's memory; same dtype and shape."""
    return cast(Tensor, cast(Any, torch).from_numpy(array))


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without copying; they live as long as the view does."""
    array = cast("npt.NDArray[np.uint8]", tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return array.data


def from_bytes(array: NamedArray) -> Tensor:
    dtype = DTYPE_OF[array.spec.dtype]
    if not array.spec.num_bytes:
        return torch.empty(array.spec.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.spec.shape)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory: the local tensor of a DTensor, else the tensor itself. Asked by
    attribute, not by type: importing DTensor costs half a second that only sharded runs should pay."""
    return cast(Tensor, cast(Any, tensor).to_local()) if hasattr(tensor, "to_local") else tensor


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor put together from all ranks' parts. Collective if it is sharded."""
    return cast(Tensor, cast(Any, tensor).full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def recomputed(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(...)`, whose inner activations are not kept but made again in the backward pass."""
    front = cast("Callable[..., R]", cast(Any, checkpoint).checkpoint)
    return front(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
