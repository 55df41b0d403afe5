"""Devices' identity and fill. They are read without using them: no CUDA context is made.

GPUs are read by the management library (NVML by nvidia-ml-py), "host:<n>" devices by what their tenants hold.
`torch.cuda.mem_get_info` was considered: it makes a context of half a gibibyte in the calling process. `gpu_uuid` and
`gpu_capacity` take a GPU's number of this node, that of the run file and of `nvidia-smi`; CUDA_VISIBLE_DEVICES does not
change it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ..core.device_memory import DeviceReading
from ..core.errors import ConfigError, MemoryFault
from .arenas.host_vmm import device_bytes

INSTALL = "pip install nvidia-ml-py"


class DeviceMeters:
    """A `DeviceMeter` for every device of a node. May be called from any thread, one at a time is served."""

    def __init__(self, host_capacity: Mapping[str, int] | None = None) -> None:
        """`host_capacity`: bytes of each "host:<n>" device."""
        self._hosts = dict(host_capacity or {})
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._kept: dict[str, int] = {}
        """By the driver, of each device; asked for once."""

    def measure(self, device: str, pids: Collection[int]) -> DeviceReading:
        """Now. Raises MemoryFault for an unknown device."""
        if device.startswith("host:"):
            if device not in self._hosts:
                raise MemoryFault(f"{device} has no capacity here", remedy="set memory.capacity_mb")
            capacity_bytes = self._hosts[device]
            return DeviceReading(capacity_bytes, capacity_bytes - device_bytes(pids, device))
        with self._lock:
            nvml = self._library(device)
            try:
                if device not in self._handles:
                    handle = nvml.nvmlDeviceGetHandleByUUID(device)
                    self._handles[device], self._kept[device] = handle, _kept_by_driver(nvml, handle)
                info = nvml.nvmlDeviceGetMemoryInfo(self._handles[device])
            except nvml.NVMLError as error:
                raise MemoryFault(f"{device}: {error}", remedy="`nvidia-smi -L` lists this node's GPUs") from error
            return DeviceReading(int(info.total), int(info.free), self._kept[device])

    def _library(self, device: str) -> Any:
        """NVML, ready."""
        if self._nvml is None:
            try:
                nvml: Any = importlib.import_module("pynvml")  # on GPU hosts only
            except ImportError as error:
                raise MemoryFault(f"{device}: NVML is not here: {error}", remedy=INSTALL) from error
            try:
                nvml.nvmlInit()
            except nvml.NVMLError as error:
                raise MemoryFault(f"{device}: NVML does not start: {error}", remedy="see nvidia-smi") from error
            self._nvml = nvml
        return self._nvml


def _kept_by_driver(nvml: Any, handle: Any) -> int:
    """What the first version of the question counts as used; 0 where the second is not known (drivers before 510)."""
    second = getattr(nvml, "nvmlMemory_v2", None)
    if second is None:
        return 0
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=second).reserved)
    except nvml.NVMLError:
        return 0


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
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as err:
        raise ConfigError('memory.share = "switch" on GPUs needs the package nvidia-ml-py', remedy=INSTALL) from err
    try:
        nvml.nvmlInit()
        try:
            return question(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as err:
        raise ConfigError(f"GPU {number} cannot be asked: {err}", remedy="see nvidia-smi, and roles.*.devices") from err
