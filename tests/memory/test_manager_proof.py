"""A server ends, and its actor some seconds later: real processes, a real manager, and a device that says what it is
told. Its memory is free at once; that has to be proven as soon as the last of its processes has ended."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from myxa.actors.tenancy.memory_manager import ManagerOptions, MemoryManager
from myxa.core.clock import SystemClock
from myxa.core.device_memory import DeviceReading, MemoryView, TagReport, TenantReport
from myxa.core.process import start_time
from myxa.memory.leases.journal import Journal
from myxa.transport.node import Node

GIB = 1 << 30
WEIGHTS, CACHE, CONTEXTS = 3 * GIB, 55 * GIB, GIB // 2
QUIET_S = 5.5
"""A little more than a quiet device is left alone."""


class Device:
    """80 GiB. The server holds what it says and a context, a trainer beside it a context that it does not count."""

    def __init__(self) -> None:
        self.server_lives = True
        self.num_read = 0

    def measure(self, device: str, pids: Collection[int]) -> DeviceReading:
        self.num_read += 1
        used = CONTEXTS + (WEIGHTS + CACHE + CONTEXTS if self.server_lives else 0)
        return DeviceReading(80 * GIB, 80 * GIB - used)

    def close(self) -> None:
        return


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Actor and server."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def report_of(name: str, gang: str, pids: tuple[int, ...], *tags: TagReport) -> TenantReport:
    return TenantReport(
        tenant=name, epoch=1, gang=gang, devices=("GPU-1",), pids=pids, started_at=tuple(map(start_time, pids)),
        state="quiesced", tags=tags, sequence=1,
    )  # fmt: skip


async def until_read_again(device: Device) -> None:
    seen = device.num_read
    async with asyncio.timeout(QUIET_S + 2):
        while device.num_read < seen + 1:
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.1)


def told(view: MemoryView) -> str:
    return "\n".join(str(row) for row in view.timeline)


@pytest.mark.timeout(40)
async def test_memory_of_a_server_that_ended_before_its_actor_is_proven_free_at_once(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    actor, server = processes
    device = Device()
    manager = MemoryManager(
        meter=device, journal=Journal(tmp_path / "memory.jsonl"), options=ManagerOptions(), clock=SystemClock()
    )
    node = await Node.attach(name="launcher/0")
    try:
        await node.start(manager, "memory/0")
        tags = (
            TagReport("weights", WEIGHTS, "discard", "mapped_dirty"),
            TagReport("kv_cache", CACHE, "discard", "mapped_dirty"),
        )
        await manager.register(report_of("trainer/1", "trainer", (1,)))
        await manager.register(report_of("rollout/1", "rollout", (actor.pid, server.pid), *tags))
        await until_read_again(device)
        server.kill()
        server.wait()
        device.server_lives = False
        await until_read_again(device)
        view = await manager.view()
        assert [t.tenant for t in view.devices[0].tenants] == ["rollout/1", "trainer/1"], "its actor lives"
        actor.kill()
        actor.wait()
        async with asyncio.timeout(2):
            while "proven free: 58.0 GiB" not in told(await manager.view()):
                await asyncio.sleep(0.02)
        assert [t.tenant for t in (await manager.view()).devices[0].tenants] == ["trainer/1"]
    finally:
        await node.close(grace_s=1)
