"""What this host has: GPUs, free ports, disk space. Uses no GPU.

GPUs are found by NVML, or by the driver's own files where NVML is not installed. A machine without GPUs is no error;
`actors/tenancy/memory_manager.py` asks about one GPU and fails if it is missing.
"""

from __future__ import annotations

import importlib
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError

DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device."""

    name: str
    num_bytes: int
    """Of the whole device; 0: not known."""
    used_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Gpus:
    """What is known of all of them."""

    found: tuple[Gpu, ...]
    driver: str = ""
    """Version of the driver; empty: no driver, or not known."""
    source: str = ""
    """Where that comes from; empty: there is no driver here."""
    trouble: str = ""
    """Why NVML could not say more."""


def look_at_gpus(root: Path = DRIVER) -> Gpus:
    """By NVML where its Python package is installed, else by the driver's files; never raises."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return _by_files(root, "nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return _by_files(root, str(error))
    try:
        return Gpus(
            tuple(_gpu(nvml, number) for number in range(nvml.nvmlDeviceGetCount())),
            _text(nvml.nvmlSystemGetDriverVersion()),
            "NVML",
        )
    except nvml.NVMLError as error:
        return _by_files(root, str(error))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, number: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _by_files(root: Path, trouble: str) -> Gpus:
    try:
        version = (root / "version").read_text(encoding="utf-8", errors="replace")
        entries = sorted((root / "gpus").iterdir())
    except OSError:
        return Gpus((), trouble=trouble)
    words = [word for word in version.split() if word[:1].isdigit() and "." in word]
    found = tuple(Gpu(_model(entry), 0) for entry in entries)
    return Gpus(found, words[0] if words else "", str(root), trouble)


def _model(entry: Path) -> str:
    try:
        lines = (entry / "information").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "GPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "GPU")


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


def listen_trouble(host: str, port: int) -> str:
    """Why that cannot be listened on; empty if it can. Port 0 means any free one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port used lately is free
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_port(place: str, host: str, port: int, remedy: str) -> None:
    """Raise LaunchError, naming `place`, if nothing can listen there now."""
    if trouble := listen_trouble(host, port):
        raise LaunchError(f"{place}: cannot listen on {host}:{port}: {trouble}", remedy=remedy)
