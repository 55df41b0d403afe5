"""How full devices are, seen from a process that does not use them: no context is made, none is needed.

GPUs by the management library (NVML through nvidia-ml-py, else the `nvidia-smi` program), by UUID; "host:<n>" by what
its tenants hold. `torch.cuda.mem_get_info` was considered: it makes a context of half a gibibyte in whoever asks.
"""

from __future__ import annotations

import importlib
import subprocess
import threading
from collections.abc import Collection, Mapping
from typing import Any

from ..core.device_memory import DeviceReading
from ..core.errors import MemoryFault
from .arenas.resident import HostDevice

SMI_TIMEOUT_S = 10.0


class DeviceMeters:
    """A `DeviceMeter` for every device of a node. May be called from any thread, one at a time is served."""

    def __init__(self, host_capacity: Mapping[str, int] | None = None) -> None:
        """`host_capacity`: bytes of each "host:<n>" device."""
        self._hosts = {device: HostDevice(device, size) for device, size in (host_capacity or {}).items()}
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._has_looked = False
        self._handles: dict[str, Any] = {}
        self._kept: dict[str, int] = {}
        """By the driver, of each device; asked for once."""

    def measure(self, device: str, pids: Collection[int]) -> DeviceReading:
        """Now. Raises MemoryFault for a device that nobody here knows."""
        if device.startswith("host:"):
            host = self._hosts.get(device)
            if host is None:
                raise MemoryFault(f"{device} has no capacity here", remedy="set memory.capacity_mb")
            return DeviceReading(host.capacity_bytes, host.free_bytes(pids))
        with self._lock:
            nvml = self._library()
            return _by_smi(device) if nvml is None else self._by_nvml(nvml, device)

    def _library(self) -> Any:
        """NVML, ready; None where there is none."""
        if not self._has_looked:
            self._has_looked = True
            try:
                nvml = importlib.import_module("pynvml")  # on GPU hosts only
            except ImportError:
                return None
            try:
                nvml.nvmlInit()
            except nvml.NVMLError:
                return None
            self._nvml = nvml
        return self._nvml

    def _by_nvml(self, nvml: Any, device: str) -> DeviceReading:
        try:
            if device not in self._handles:
                self._handles[device] = nvml.nvmlDeviceGetHandleByUUID(device)
                self._kept[device] = _kept_by_driver(nvml, self._handles[device])
            info = nvml.nvmlDeviceGetMemoryInfo(self._handles[device])
            return DeviceReading(int(info.total), int(info.free), self._kept[device])
        except nvml.NVMLError as error:
            raise MemoryFault(f"{device}: {error}", remedy="see `nvidia-smi -L` for the GPUs of this node") from error

    def close(self) -> None:
        """Lets go of the library."""
        with self._lock:
            if self._nvml is not None:
                self._nvml.nvmlShutdown()
                self._nvml, self._has_looked = None, False
                self._handles.clear()


def _kept_by_driver(nvml: Any, handle: Any) -> int:
    """What the first version of the question counts as used; 0 where the second is not known (drivers before 510)."""
    second = getattr(nvml, "nvmlMemory_v2", None)
    if second is None:
        return 0
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=second).reserved)
    except nvml.NVMLError:
        return 0


def _by_smi(device: str) -> DeviceReading:
    words = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits", "-i", device]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
        total, free = (int(word) << 20 for word in done.stdout.strip().split(","))
    except FileNotFoundError as error:
        raise MemoryFault(
            f"{device}: neither NVML nor nvidia-smi is here", remedy="install nvidia-ml-py, or use a host with a GPU"
        ) from error
    except (subprocess.SubprocessError, ValueError) as error:
        raise MemoryFault(
            f"{device}: nvidia-smi does not tell its memory: {error}", remedy="see `nvidia-smi -L`"
        ) from error
    return DeviceReading(total, free)
