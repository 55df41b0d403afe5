"""What this host has: GPUs, free ports, disk space. Uses no GPU.

GPUs are found by NVML. A machine without GPUs is no error; `actors/tenancy/memory_manager.py` asks about one GPU and
fails if it is missing.
"""

from __future__ import annotations

import importlib
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    num_bytes: int
    """Of the whole device."""
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """What is known of all of them."""

    found: tuple[Gpu, ...]
    driver: str = ""
    """Version of the driver; empty: there is none here, or `trouble`."""
    trouble: str = ""
    """Why nothing can be seen."""


def look_at_gpus() -> Gpus:
    """By NVML; never raises."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Gpus((), trouble="nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus((), trouble=str(error))
    try:
        devices = tuple(_gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount()))
        return Gpus(devices, str(nvml.nvmlSystemGetDriverVersion()))
    except nvml.NVMLError as error:
        return Gpus((), trouble=str(error))
    finally:
        nvml.nvmlShutdown()


MAX_SLICES = 8


def _gpu(nvml: Any, number: int) -> Gpu:
    """Where it is split (MIG): the first slice that is seen here, which is all that CUDA sees of that number."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    for index in range(MAX_SLICES):
        with suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            break
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name, uuid = str(nvml.nvmlDeviceGetName(handle)), str(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(name, int(memory.total), uuid)


def nearest_folder(folder: str) -> Path:
    """What is there of a path: itself, or the nearest above it."""
    path = Path(folder).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_at(folder: str) -> int | None:
    """Bytes that are free where `folder` is or will be made; None if that cannot be asked."""
    try:
        return shutil.disk_usage(nearest_folder(folder)).free
    except OSError:
        return None


def check_port(place: str, host: str, port: int, remedy: str) -> None:
    """Raise LaunchError, naming `place`, if nothing can listen there now. Port 0 means any free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port used lately is free
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        trouble = error.strerror or str(error)
        raise LaunchError(f"{place}: cannot listen on {host}:{port}: {trouble}", remedy=remedy) from error
