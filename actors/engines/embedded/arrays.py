"""Types of the engine's per-row arrays, and their bridge to torch (shared memory, no copy)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Index = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor over the same memory."""
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] -- torch's stub leaves it open
