"""How full a device is: by NVML, or by the pages of a device of the host."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from myxa.core.device_memory import DeviceReading
from myxa.core.errors import MemoryFault
from myxa.memory.arenas.host_vmm import HostVmmDriver
from myxa.memory.meters import DeviceMeters

GPU = "GPU-6f1c0000-0000-0000-0000-000000000000"
MIB = 1 << 20


def test_a_device_of_the_host() -> None:
    meters = DeviceMeters({"host:0": 64 * MIB})
    assert meters.measure("host:0", [os.getpid()]) == DeviceReading(64 * MIB, 64 * MIB)
    driver = HostVmmDriver("host:0", 64 * MIB)
    handle = driver.create(8 * MIB)
    address = driver.reserve(8 * MIB)
    driver.map(address, 8 * MIB, handle)
    assert meters.measure("host:0", [os.getpid()]).free_bytes == 56 * MIB
    driver.unmap(address, 8 * MIB)
    driver.release(handle, 8 * MIB)
    assert meters.measure("host:0", [os.getpid()]).free_bytes == 64 * MIB
    driver.free_reservation(address, 8 * MIB)
    driver.close()
    with pytest.raises(MemoryFault, match="host:1 has no capacity here -- set memory.capacity_mb"):
        meters.measure("host:1", [])


@pytest.mark.parametrize("is_old", [False, True])
def test_nvml_is_opened_once(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    """A stand-in with NVML's names and manners: handles by UUID, errors of its own kind."""
    calls: list[str] = []

    class NVMLError(Exception):
        pass

    def handle_of(uuid: str) -> str:
        calls.append(uuid)
        if uuid != GPU:
            raise NVMLError("Not Found")
        return "handle"

    def memory_of(handle: str, version: int = 1) -> SimpleNamespace:
        """The first version counts as used what the second tells apart."""
        assert handle == "handle"
        if version == 1:
            return SimpleNamespace(total=100, free=40, used=60)
        if is_old:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(total=100, free=40, used=53, reserved=7)

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: calls.append("init"),
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlMemory_v2=2,
    )
    meters = DeviceMeters()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    with pytest.raises(MemoryFault, match=f"{GPU}: NVML is not here: .* -- pip install nvidia-ml-py"):
        meters.measure(GPU, [])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert [meters.measure(GPU, []) for _ in range(2)] == [DeviceReading(100, 40, 0 if is_old else 7)] * 2
    with pytest.raises(MemoryFault, match="GPU-other: Not Found"):
        meters.measure("GPU-other", [])
    assert calls == ["init", GPU, "GPU-other"]
