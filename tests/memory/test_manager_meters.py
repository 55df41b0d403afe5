"""How full a device is: by NVML, or by the pages of a device of the host."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from myxa.actors.tenancy.memory_manager import NodeAgent
from myxa.core.device_memory import DeviceReading, DeviceUse
from myxa.core.errors import MemoryFault
from myxa.memory.arenas.host_vmm import HostVmmDriver

GPU = "GPU-6f1c0000-0000-0000-0000-000000000000"
MIB = 1 << 20


async def read(agent: NodeAgent, device: str) -> DeviceReading:
    return (await agent.measure((DeviceUse(device, (os.getpid(),)),)))[device]


async def test_a_device_of_the_host() -> None:
    agent = NodeAgent({"host:0": 64 * MIB})
    assert await read(agent, "host:0") == DeviceReading(64 * MIB, 64 * MIB)
    driver = HostVmmDriver("host:0", 64 * MIB)
    handle = driver.create(8 * MIB)
    assert (await read(agent, "host:0")).free_bytes == 56 * MIB
    driver.release(handle, 8 * MIB)
    assert (await read(agent, "host:0")).free_bytes == 64 * MIB
    driver.close()
    with pytest.raises(MemoryFault, match="host:1 has no capacity here -- set memory.capacity_mb"):
        await read(agent, "host:1")


async def test_a_gpu_is_asked_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with NVML's names and manners: handles by UUID, errors of its own kind."""

    class NVMLError(Exception):
        pass

    def handle_of(uuid: str) -> str:
        if uuid != GPU:
            raise NVMLError("Not Found")
        return "handle"

    def memory_of(handle: str, version: int) -> SimpleNamespace:
        assert (handle, version) == ("handle", 2)
        return SimpleNamespace(total=100, free=40, used=53, reserved=7)

    nvml = ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlMemory_v2=2,
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it raises ImportError
    with pytest.raises(MemoryFault, match=f"{GPU}: NVML is not here: .* -- pip install nvidia-ml-py"):
        await read(NodeAgent(), GPU)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert await read(NodeAgent(), GPU) == DeviceReading(100, 40, 7)
    with pytest.raises(MemoryFault, match="GPU-other: Not Found"):
        await read(NodeAgent(), "GPU-other")
