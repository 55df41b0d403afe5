"""What this machine has, and the checks of it, for `myxa doctor`. Knows no run file.

`gather` asks everything; a failure becomes a fact, and a fact that could not be had is None or empty. The checks are
pure: they judge `MachineFacts`. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ...actors.engines.sglang.server_args import tools_path
from ...actors.user_code.sandbox import REMEDIES, namespaces_trouble, trouble_with
from ...core.config.loading import Finding, Severity
from ...core.errors import MyxaError
from ...core.host_memory import available_bytes
from ...core.tried_versions import TRIED, UNTRIED_REMEDY, untried
from ..host import Gpus, free_at, look_at_gpus, nearest_folder
from ..memory_part import GIB, size_text
from .node import TORCH_REMEDY, has_module, module_folder, version_of

SHOWN = ("torch", "sglang", "megatron-core", "torch-memory-saver", "transformers", "flashinfer-python", "nvidia-ml-py")
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
SHM = "/dev/shm"
CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


def _torch_cuda() -> str | None:
    """From torch's own source text: importing it would take seconds."""
    try:
        text = Path(module_folder("torch"), "version.py").read_text(encoding="utf-8") if has_module("torch") else ""
    except OSError:
        return None
    match = CUDA_LINE.search(text)
    return None if match is None else match[1] or match[2] or ""


def _file_system(path: Path) -> str:
    """Type of the file system that the path lies on: the longest mount point above it."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(Path(mount.mountpoint).parts)).fstype if mounts else ""


def _addresses() -> tuple[str, ...]:
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Everything that is judged; what is not given is asked of this machine."""

    folder: str
    """Where run directories go."""
    free_bytes: int | None
    is_writable: bool
    file_system: str
    """Type, like "ext4"."""
    system: str = f"Python {platform.python_version()} at {sys.executable}, {platform.platform()}"
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: found for name in SHOWN if (found := version_of(name))}
    )
    """Distribution -> version; what is missing is not installed."""
    torch_cuda: str | None = field(default_factory=_torch_cuda)
    """CUDA that torch was built for; "" = none; None: no torch."""
    gpus: Gpus = field(default_factory=look_at_gpus)
    total_bytes: int = field(default_factory=lambda: int(psutil.virtual_memory().total))
    available_bytes: int = field(default_factory=available_bytes)
    """What may still be taken, control group included."""
    ninja: str = field(default_factory=lambda: shutil.which("ninja", path=tools_path(os.environ, sys.executable)) or "")
    shm_bytes: int | None = field(default_factory=lambda: psutil.disk_usage(SHM).total if Path(SHM).is_dir() else None)
    """Size of /dev/shm; None: there is none."""
    max_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    """That a process may open once it has raised its limit; -1: any number."""
    hostname: str = field(default_factory=socket.gethostname)
    addresses: tuple[str, ...] = field(default_factory=_addresses)
    """That the hostname resolves to; empty: it does not."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    sandboxes: Mapping[str, str] = field(
        default_factory=lambda: {
            "rlimits": namespaces_trouble(), **{name: trouble_with(name) for name in ("bubblewrap", "docker")}
        }
    )  # fmt: skip
    """What keeps each from being used, of rlimits from having namespaces; empty: nothing."""


def gather(folder: str) -> MachineFacts:
    """Everything about this machine, for runs whose directories are made in `folder`."""
    place = nearest_folder(folder)
    return MachineFacts(
        folder=str(place),
        free_bytes=free_at(folder),
        is_writable=os.access(place, os.W_OK | os.X_OK),
        file_system=_file_system(place),
    )


# -- the checks --------------------------------------------------------------------------------------------------------

Case = tuple[object, Severity, str, str]
"""Condition, severity, what it means (added to what is there), what to do."""


def first(name: str, text: str, *cases: Case) -> Iterator[Finding]:
    """The first case that holds; without one, all is well with what is there, if anything is."""
    for holds, severity, meaning, remedy in cases:
        if holds:
            yield Finding(name, MyxaError(f"{text}{meaning}", remedy=remedy), severity)
            return
    if text:
        yield Finding(name, MyxaError(text), "ok")


FEW_FILES, ENOUGH_FILES = 1024, 4096
"""A ZeroMQ without descriptors ends its process."""
SMALL_SHM, LITTLE_MEMORY, LITTLE_DISK = 1 * GIB, 2 * GIB, 5 * GIB
"""The first for NCCL and torch; myxa's own shared memory is anonymous and counts as memory."""
NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs", "ceph"})


def system(facts: MachineFacts) -> Iterator[Finding]:
    yield from first("system", facts.system)
    remedy = "close other programs, or raise the container's memory limit"
    yield from first(
        "memory", f"{size_text(facts.available_bytes)} available of {size_text(facts.total_bytes)}",
        (facts.available_bytes < LITTLE_MEMORY, "warning", "", remedy),
    )  # fmt: skip
    size = facts.shm_bytes
    yield from first(
        SHM, "there is none" if size is None else size_text(size),
        (size is None, "warning", "", "mount a tmpfs there: NCCL and torch need it with several GPUs"),
        (size is not None and size < SMALL_SHM, "warning", ": NCCL between GPUs of one host needs more",
         "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory"),
    )  # fmt: skip
    yield from first(
        "open files", f"{facts.max_files} open files at most",
        (0 <= facts.max_files < FEW_FILES, "error", "",
         "ulimit -Hn 65536; LimitNOFILE= of a unit; docker run --ulimit nofile=65536"),
        (0 <= facts.max_files < ENOUGH_FILES, "warning", "", "raise the hard limit to 65536 for many actors"),
    )  # fmt: skip
    free = size_text(facts.free_bytes) if facts.free_bytes is not None else "an unknown number of bytes"
    yield from first(
        "disk", f"{free} free at {facts.folder} ({facts.file_system})",
        (not facts.is_writable, "error", " cannot be written to", "go to a folder of yours, or set run.dir"),
        (facts.free_bytes is not None and facts.free_bytes < LITTLE_DISK, "warning", "", "set run.dir to another disk"),
        (facts.file_system in NETWORK_DISKS, "warning",
         ": SQLite's ledger is slow there, and locks of some network file systems do not hold",
         "set run.dir to a local disk of node 0"),
    )  # fmt: skip


DRIVER_OF_CUDA: Mapping[int, int] = {13: 580, 12: 525}
"""CUDA's major version -> oldest driver."""


def _major(version: str, otherwise: int = 0) -> int:
    digits = re.match(r"\d+", version)
    return int(digits[0]) if digits else otherwise


def packages(facts: MachineFacts) -> Iterator[Finding]:
    """What is installed, versions that were not tried, torch's CUDA against the driver's, and NVML."""
    there = ", ".join(f"{name} {facts.versions[name]}" for name in SHOWN if name in facts.versions)
    yield from first(
        "packages", there or "no torch: no trainer and no embedded engine can run in this interpreter",
        ("torch" not in facts.versions, "warning", "",
         f"{TORCH_REMEDY}; or set roles.<role>.python to one that has it"),
    )  # fmt: skip
    for name in TRIED:
        text = untried(name, facts.versions.get(name, ""))
        yield from first(name, "", (text, "warning", text, UNTRIED_REMEDY))
    gpus, built = facts.gpus, facts.torch_cuda
    if not gpus.driver:
        text = f"torch is built for CUDA {built}, and no driver can be seen ({gpus.trouble})"
        remedy = "fine on a machine without GPUs; else pip install nvidia-ml-py and see nvidia-smi"
        yield from first("gpu", text if built else "none: runs on the CPU", (built, "warning", "", remedy))
        return
    names = f"{len(gpus.found)} x {gpus.found[0].name}" if gpus.found else "none"
    oldest = DRIVER_OF_CUDA.get(_major(built or ""), 0)
    yield from first(
        "gpu", f"{names}, driver {gpus.driver or 'unknown'}",
        (_major(gpus.driver, oldest) < oldest, "error",
         f", torch is built for CUDA {built}, which needs driver r{oldest} or later",
         f"update the driver, or install a torch for CUDA {'12' if oldest == 580 else '11'}"),
        (built == "" and gpus.found, "warning", ", but torch is built without CUDA", "install torch's wheel for CUDA"),
    )  # fmt: skip


def environment(facts: MachineFacts) -> Iterator[Finding]:
    """Variables that every actor inherits, and the name that other nodes use."""
    env = facts.env
    rows: list[tuple[str, object, str, str]] = [
        ("ninja", "sglang" in facts.versions and not facts.ninja,
         "is neither in PATH nor beside this interpreter: SGLang compiles kernels with it when a server starts",
         f"{sys.executable} -m pip install ninja"),
        ("NCCL_CUMEM_ENABLE", env.get("NCCL_CUMEM_ENABLE", "") not in ("", "0"),
         f"= {env.get('NCCL_CUMEM_ENABLE')} here; SGLang's servers set it to 0, and members of a group must agree",
         "unset it, or set it alike for trainer and engines (roles.*.env)"),
        *((name, "expandable_segments:true" in env.get(name, "").lower(),
           "expandable_segments is on: torch-memory-saver refuses it, arenas do without",
           'unset it for runs with memory.share = "switch"') for name in ALLOCATORS),
        ("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES" in env,
         f"= {env.get('CUDA_VISIBLE_DEVICES')!r}: actors get the GPUs of roles.*.devices, whatever it says",
         "unset it, and name the GPUs in the run file"),
    ]  # fmt: skip
    for name, holds, meaning, remedy in rows:
        yield from first(name, "", (holds, "warning", meaning, remedy))
    addresses = ", ".join(facts.addresses)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in facts.addresses)
    yield from first(
        "hostname", f"{facts.hostname} resolves to {addresses}" if addresses else facts.hostname,
        (not addresses, "warning", " does not resolve",
         "add it to /etc/hosts with the address that other nodes reach; one machine alone does without"),
        (is_loopback, "warning", ": other nodes would call themselves",
         "give it its real address in /etc/hosts, or name an address: --rdzv ADDRESS:PORT"),
    )  # fmt: skip


def sandboxes(facts: MachineFacts) -> Iterator[Finding]:
    """Where programs can be started that are not trusted."""
    troubles = {name: why for name, why in facts.sandboxes.items() if why}
    there = ", ".join(name for name in facts.sandboxes if name not in troubles)
    missing = "; ".join(f"{name}: {why}" for name, why in troubles.items())
    yield from first(
        "sandboxes", there + (f" ({missing})" if missing else ""),
        ("rlimits" in troubles, "warning", ": rlimits hides neither files nor network", REMEDIES["rlimits"]),
    )  # fmt: skip


MACHINE_CHECKS = (system, packages, environment, sandboxes)
