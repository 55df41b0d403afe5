"""The tensors of a model folder, as a backend would export them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from myxa.actors.models.hf_folder import open_weights, read_config
from myxa.core.messages import TensorSpec
from myxa.core.protocols import NamedArray


def tensors_of(folder: Path) -> list[tuple[str, Tensor]]:
    """(name, tensor) in the folder's order."""
    with open_weights(folder, read_config(folder)) as arrays:
        return [
            (name, torch.frombuffer(bytearray(a.data), dtype=getattr(torch, a.spec.dtype)).view(a.spec.shape))
            for name, a in arrays.items()
        ]


def arrays_of(folder: Path) -> list[NamedArray]:
    """The same for channels that are written."""
    with open_weights(folder, read_config(folder)) as arrays:
        return [NamedArray(spec=a.spec, data=memoryview(bytes(a.data))) for a in arrays.values()]


def shape(name: str, dtype: str, sizes: tuple[int, ...]) -> TensorSpec:
    """A tensor that has no place yet."""
    num_bytes = math.prod(sizes) * getattr(torch, dtype).itemsize
    return TensorSpec(name=name, dtype=dtype, shape=sizes, offset=0, num_bytes=num_bytes)
