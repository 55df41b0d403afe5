"""A device for the memory benchmark: its driver, an arena on it, what outsiders see of it, hashes of its contents.

With `--device cpu` Linux's memory stands for a GPU's: the same arena over the host's VMM driver.
"""

from __future__ import annotations

import importlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from memory_figures import MIB

from myxa.actors.tenancy.memory_manager import gpu_uuid
from myxa.memory.arenas.arena import Arena
from myxa.memory.arenas.driver import VmmDriver
from myxa.memory.arenas.host_pool import HostPool
from myxa.memory.arenas.host_vmm import HostVmmDriver
from myxa.memory.arenas.tensors import tensor_at

HASH_BYTES = 256 * MIB
"""Hashed at a time; twice that is needed beside it."""


# -- arenas ------------------------------------------------------------------------------------------------------------


def open_driver(device: str, *, capacity_bytes: int, ordinal: int = 0) -> VmmDriver:
    if device == "cpu":
        return HostVmmDriver(device=f"host:{ordinal}", capacity_bytes=capacity_bytes)
    from myxa.memory.arenas.cuda_driver import CudaDriver  # there is a driver library only where there is a GPU

    return CudaDriver(ordinal)


def open_pool(device: str, limit_bytes: int, ordinal: int = 0) -> HostPool:
    """Where released tags go; pinned for a GPU."""
    if device == "cpu":
        return HostPool(limit_bytes, None)
    from myxa.memory.arenas.cuda_driver import Pinning  # as above

    return HostPool(limit_bytes, Pinning(ordinal))


@dataclass(frozen=True)
class Opened:
    """An arena with what it was made of."""

    device: str
    driver: VmmDriver
    pool: HostPool
    arena: Arena
    pool_s: float
    """What making and pinning the pool took."""

    def close(self) -> None:
        self.arena.close()
        self.pool.close()
        self.driver.close()


def open_arena(
    device: str, *, capacity_bytes: int, pool_bytes: int, chunk_bytes: int = 256 * MIB, ordinal: int = 0
) -> Opened:
    driver = open_driver(device, capacity_bytes=capacity_bytes, ordinal=ordinal)
    started = time.perf_counter()
    pool = open_pool(device, pool_bytes, ordinal)
    pool_s = time.perf_counter() - started
    return Opened(device, driver, pool, Arena(driver, pool, chunk_bytes=chunk_bytes), pool_s)


# -- contents ----------------------------------------------------------------------------------------------------------


def bytes_at(address: int, num_bytes: int, device: str) -> torch.Tensor:
    """A view of mapped memory: int64, shape [num_bytes / 8]."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return tensor_at(address, (num_bytes // 8,), torch.int64, place)


def fill(view: torch.Tensor, seed: int) -> None:
    """Random contents, where they lie."""
    generator = torch.Generator(device=view.device)
    generator.manual_seed(seed)
    view.random_(generator=generator)


def hashes(view: torch.Tensor) -> list[int]:
    """One number for every 256 MiB: words times odd weights, modulo 2^64; any changed or moved word changes it."""
    found: list[torch.Tensor] = []
    step = HASH_BYTES // 8
    for start in range(0, view.numel(), step):
        part = view[start : start + step]
        weights = torch.arange(1, 2 * part.numel(), 2, dtype=torch.int64, device=view.device)
        found.append((part * weights).sum())
    return [int(value) for value in torch.stack(found).tolist()] if found else []


def device_name(device: str, ordinal: int) -> str:
    """As a driver of ours would call it, without one: the GPU's UUID, or "host:<n>"."""
    if device == "cpu":
        return f"host:{ordinal}"
    return gpu_uuid(ordinal)


# -- from outside ------------------------------------------------------------------------------------------------------


def device_bytes(ordinal: int = 0) -> tuple[int, int]:
    """(used, total) of a GPU as its driver tells everybody; no context is made for it."""
    try:
        pynvml = importlib.import_module("pynvml")  # a package of GPU machines
        pynvml.nvmlInit()
        try:
            told = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(ordinal))
            return int(told.used), int(told.total)
        finally:
            pynvml.nvmlShutdown()
    except ImportError:
        query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits", f"-i={ordinal}"]
        words = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
        return int(words[0]) * MIB, int(words[1]) * MIB


def used_by_process(ordinal: int = 0) -> dict[int, int]:
    """Bytes of a GPU by process, where the driver tells; empty where it does not."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return {}
    pynvml.nvmlInit()
    try:
        told = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(ordinal))
        return {int(one.pid): int(one.usedGpuMemory) for one in told if one.usedGpuMemory is not None}
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()


def settled_used(ordinal: int = 0, limit_s: float = 3.0) -> int:
    """Used bytes once they stand still: frees show late."""
    give_up_at = time.monotonic() + limit_s
    before = device_bytes(ordinal)[0]
    while time.monotonic() < give_up_at:
        time.sleep(0.1)
        now = device_bytes(ordinal)[0]
        if now == before:
            break
        before = now
    return before


# -- time --------------------------------------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def within(limit_s: float, most: int, least: int = 1) -> Iterator[int]:
    """Numbers below `most`, until the time is over, at least `least` of them."""
    give_up_at = time.monotonic() + limit_s
    for index in range(most):
        if index >= least and time.monotonic() > give_up_at:
            return
        yield index
