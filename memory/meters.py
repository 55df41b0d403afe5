"""Identity and fill of devices, read without using them: no CUDA context is made.

GPUs are read by the management library (NVML through nvidia-ml-py, else the `nvidia-smi` program); "host:<n>" devices
by what their tenants hold. `torch.cuda.mem_get_info` was considered: it makes a context of half a gibibyte in the
calling process. `gpu_uuid` and `gpu_capacity` take a GPU's number of this node, that of the run file and of
`nvidia-smi`; CUDA_VISIBLE_DEVICES does not change it.
"""

from __future__ import annotations

import importlib
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ..core.device_memory import DeviceReading
from ..core.errors import ConfigError, MemoryFault
from .arenas.host_vmm import HostDevice

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
        """Now. Raises MemoryFault for an unknown device."""
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
            f"{device}: nvidia-smi does not report its memory: {error}", remedy="see `nvidia-smi -L`"
        ) from error
    return DeviceReading(total, free)


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
