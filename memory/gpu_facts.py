"""Name and size of a GPU by its number on this node, without using it: NVML makes no context.

The number is that of the run file and of `nvidia-smi`; CUDA_VISIBLE_DEVICES does not change it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..core.errors import ConfigError

T = TypeVar("T")


def gpu_uuid(number: int) -> str:
    """Like "GPU-1d2c..."; raises ConfigError for a GPU that is not there."""
    return _ask(number, lambda nvml, handle: _text(nvml.nvmlDeviceGetUUID(handle)))


def gpu_capacity(number: int) -> int:
    """Bytes of the whole device; raises ConfigError for a GPU that is not there."""
    return _ask(number, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _ask(number: int, question: Callable[[Any, Any], T]) -> T:
    try:
        nvml: Any = importlib.import_module("pynvml")  # part of GPU installations only
    except ImportError as err:
        raise ConfigError(
            'memory.share = "switch" on GPUs needs the package nvidia-ml-py', remedy="pip install nvidia-ml-py"
        ) from err
    try:
        nvml.nvmlInit()
        try:
            return question(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as err:
        raise ConfigError(f"GPU {number} cannot be asked: {err}", remedy="see nvidia-smi, and roles.*.devices") from err
