"""What this machine has and lets its user do, and the checks of it, for `myxa doctor`. Knows no run file.

`gather` asks everything; a failure becomes a fact, and a fact that could not be had is None or empty. The checks are
pure: they judge `MachineFacts`. Nothing is changed: ports are listened on for an instant. Versions that belong together
follow the exact pins in the packages' own metadata.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ...core.errors import LaunchError, MyxaError
from ...core.host_memory import CGROUP_ROOT, available_bytes
from ..host import Gpus, free_at, listen_trouble, look_at_gpus, nearest_folder
from ..memory_part import GIB, size_text
from ..node_place import DEFAULT_PORT
from ..runtime_dir import short_base
from .check import Finding, Severity
from .node import has_module, module_folder

SHOWN = ("torch", "sglang", "megatron-core", "torch-memory-saver", "transformers", "flashinfer-python", "nvidia-ml-py")
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
VARIABLES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", *ALLOCATORS, "CUDA_VISIBLE_DEVICES")
LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
NO_LIMIT = 1 << 60
"""What version 1 of control groups says for "none"."""
CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


# -- questions ---------------------------------------------------------------------------------------------------------


def _text_of(path: str) -> str:
    """Empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()


def _kernel() -> tuple[int, int]:
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    return (release[0], release[1]) if len(release) == 2 else (0, 0)


def installed_versions() -> dict[str, str]:
    """Of the distributions that matter."""
    versions: dict[str, str] = {}
    for name in SHOWN:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _torch_cuda() -> str | None:
    """From torch's own source text: importing it would take seconds."""
    match = CUDA_LINE.search(_text_of(f"{module_folder('torch')}/version.py")) if has_module("torch") else None
    return None if match is None else match[1] or match[2] or ""


def _cgroup_limit() -> int | None:
    limits = [_number(f"{CGROUP_ROOT}/{name}") for name in LIMIT_FILES]
    return min((limit for limit in limits if limit is not None and limit < NO_LIMIT), default=None)


def _shm_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _file_system(path: Path) -> str:
    """Type of the file system that the path lies on: the longest mount point above it."""
    lines = _text_of("/proc/self/mounts").splitlines()
    mounts = [(Path(words[1].replace("\\040", " ")), words[2]) for line in lines if len(words := line.split()) > 2]
    above = [(len(point.parts), kind) for point, kind in mounts if path == point or point in path.parents]
    return max(above, default=(0, ""), key=lambda one: one[0])[1]


def _addresses() -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(one[4][0]) for one in found))


def _socket_trouble() -> str:
    try:
        short_base()
    except (OSError, LaunchError) as error:
        return str(error)
    return ""


# -- the facts ---------------------------------------------------------------------------------------------------------


def _ask(ask: Callable[[], Any]) -> Any:
    """A field that is asked for where it is not given."""
    return field(default_factory=ask)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Everything that is judged. Trouble is an error's text; empty: it works."""

    folder: str
    """Where run directories go."""
    free_bytes: int | None
    is_writable: bool
    file_system: str
    """Type, like "ext4"."""
    python: tuple[int, int, int] = _ask(lambda: sys.version_info[:3])
    executable: str = sys.executable
    architecture: str = _ask(platform.machine)
    os_name: str = _ask(_os_name)
    kernel: tuple[int, int] = _ask(_kernel)
    libc: str = _ask(lambda: " ".join(platform.libc_ver()).strip() or "a C library that is not glibc")
    versions: Mapping[str, str] = _ask(installed_versions)
    """Distribution -> version; what is missing is not installed."""
    torch_cuda: str | None = _ask(_torch_cuda)
    """CUDA that torch was built for; "" = none; None: no torch."""
    gpus: Gpus = field(default_factory=look_at_gpus)
    total_bytes: int = _ask(lambda: int(psutil.virtual_memory().total))
    available_bytes: int = _ask(available_bytes)
    """What may still be taken, control group included."""
    cgroup_bytes: int | None = _ask(_cgroup_limit)
    shm_bytes: int | None = _ask(_shm_bytes)
    """Size of /dev/shm; None: there is none."""
    num_files: tuple[int, int] = _ask(lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    hostname: str = _ask(socket.gethostname)
    addresses: tuple[str, ...] = _ask(_addresses)
    """That the hostname resolves to; empty: it does not."""
    port_trouble: str = _ask(lambda: listen_trouble("0.0.0.0", DEFAULT_PORT))
    """Of `myxa launch`'s default port."""
    socket_trouble: str = _ask(_socket_trouble)
    """Of making runtime folders."""
    env: Mapping[str, str] = _ask(lambda: {name: os.environ[name] for name in VARIABLES if name in os.environ})


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
    """The first case that holds; without one, all is well with what is there."""
    for holds, severity, meaning, remedy in cases:
        if holds:
            yield Finding(name, MyxaError(f"{text}{meaning}", remedy=remedy), severity)
            return
    yield Finding(name, MyxaError(text), "ok")


def if_so(name: str, *cases: Case) -> Iterator[Finding]:
    """The first case that holds, or nothing."""
    return first(name, "", *cases) if any(case[0] for case in cases) else iter(())


OLDEST_PYTHON, OLDEST_KERNEL = (3, 11), (5, 3)
"""The kernel's for pidfd_open."""
WHEEL_GLIBC = (2, 34)
"""SGLang from 0.5.11 on publishes only manylinux_2_34 wheels."""
FEW_FILES, ENOUGH_FILES = 1024, 4096
"""A ZeroMQ without descriptors ends its process."""
SMALL_SHM, LITTLE_MEMORY, LITTLE_DISK = 1 * GIB, 2 * GIB, 5 * GIB
"""The first for NCCL and torch; myxa's own shared memory is anonymous and counts as memory."""
NETWORK_DISKS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "gpfs", "beegfs", "ceph"})


def system(facts: MachineFacts) -> Iterator[Finding]:
    """Interpreter, kernel, memory, limits."""
    is_old, is_glibc = facts.python[:2] < OLDEST_PYTHON, facts.libc.startswith("glibc")
    note = "" if is_old or facts.python[:2] >= (3, 12) else "; megatron-core from 0.17 on needs 3.12"
    text = f"{'.'.join(map(str, facts.python))} at {facts.executable}{note}"
    yield from first("python", text, (is_old, "error", "", "use Python 3.11 or later"))
    yield from first(
        "system",
        f"{facts.os_name}, kernel {'.'.join(map(str, facts.kernel))}, {facts.libc}, {facts.architecture}",
        (facts.kernel < OLDEST_KERNEL, "error", "", "use Linux 5.3 or later: processes are watched by pidfd"),
        (is_glibc and numbers(facts.libc.partition(" ")[2]) < WHEEL_GLIBC, "warning", "",
         "SGLang's wheels need glibc 2.34: use Ubuntu 22.04, Debian 12, RHEL 9 or later for it"),
        (not is_glibc, "warning", "", "torch and SGLang publish wheels for glibc only: use a system with glibc"),
    )  # fmt: skip
    text = f"{size_text(facts.available_bytes)} available of {size_text(facts.total_bytes)}"
    if facts.cgroup_bytes is not None and facts.cgroup_bytes < facts.total_bytes:
        text += f", but the control group allows {size_text(facts.cgroup_bytes)}: that counts, not MemTotal"
    remedy = "close other programs, or raise the container's memory limit"
    yield from first("memory", text, (facts.available_bytes < LITTLE_MEMORY, "warning", "", remedy))
    size, (soft, hard) = facts.shm_bytes, facts.num_files
    yield from first(
        "/dev/shm",
        "there is none" if size is None else size_text(size),
        (size is None, "warning", "", "mount a tmpfs there: NCCL and torch need it with several GPUs"),
        (size is not None and size < SMALL_SHM, "warning", ": NCCL between GPUs of one host needs more",
         "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium Memory"),
    )  # fmt: skip
    yield from first(
        "open files",
        f"{soft} open files, {hard} at most (launchers raise it themselves)",
        (0 <= hard < FEW_FILES, "error", "",
         "ulimit -Hn 65536; LimitNOFILE= of a unit; docker run --ulimit nofile=65536"),
        (0 <= hard < ENOUGH_FILES, "warning", "", "raise the hard limit to 65536 for runs with many actors"),
    )  # fmt: skip


def disk_and_rights(facts: MachineFacts) -> Iterator[Finding]:
    free = size_text(facts.free_bytes) if facts.free_bytes is not None else "an unknown number of bytes"
    kind = f" ({facts.file_system})" if facts.file_system else ""
    yield from first(
        "disk",
        f"{free} free at {facts.folder}{kind}" if facts.is_writable else f"{facts.folder} cannot be written to",
        (not facts.is_writable, "error", "", "go to a folder of yours, or set run.dir"),
        (facts.free_bytes is not None and facts.free_bytes < LITTLE_DISK, "warning", "",
         "set run.dir to another disk; `myxa plan RUN.TOML` says how much a run writes"),
        (facts.file_system in NETWORK_DISKS, "warning",
         ": SQLite's ledger is slow there, and locks of some network file systems do not hold",
         "set run.dir to a local disk of node 0"),
    )  # fmt: skip
    trouble = facts.socket_trouble
    case = (trouble, "error", ": launchers keep sockets there", "set TMPDIR to a short path that is writable")
    yield from first("sockets", trouble or "works", case)


OLDEST_SGLANG = (0, 5, 17)
"""With token ids on every reply."""
OLDEST_MEGATRON = (0, 16)
MEGATRON_PYTHON = ((0, 17), (3, 12))
"""From that megatron-core on, this Python."""
DRIVER_OF_CUDA: Mapping[int, int] = {13: 580, 12: 525}
"""CUDA's major version -> oldest driver."""


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: "2.11.0+cu130" -> (2, 11, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(piece) for piece in found[0].split(".")) if found else ()


def packages(facts: MachineFacts) -> Iterator[Finding]:
    """Which are there, and whether they go together."""
    there = ", ".join(f"{name} {facts.versions[name]}" for name in SHOWN if name in facts.versions)
    torch, sglang, megatron = (facts.versions.get(name, "") for name in ("torch", "sglang", "megatron-core"))
    yield from first(
        "packages",
        there or "no torch: no trainer and no embedded engine can run in this interpreter",
        (not torch, "warning", "",
         "install an extra: pip install 'myxa[cpu]' or 'myxa[gpu]'; or set roles.<role>.python to one that has it"),
    )  # fmt: skip
    is_old = numbers(sglang) < OLDEST_SGLANG
    case = (is_old, "error", ": myxa needs token ids on every reply", "install SGLang 0.5.17 or later")
    yield from first("sglang", sglang, case) if sglang else ()
    needs_newer = numbers(megatron) >= MEGATRON_PYTHON[0] and facts.python[:2] < MEGATRON_PYTHON[1]
    yield from (
        first(
            "megatron-core",
            megatron,
            (numbers(megatron) < OLDEST_MEGATRON, "error", "", "install megatron-core 0.16 or later"),
            (needs_newer, "error", " needs Python 3.12", "use Python 3.12, or megatron-core 0.16.1"),
        )
        if megatron
        else ()
    )


def gpu(facts: MachineFacts) -> Iterator[Finding]:
    """Torch's CUDA against the driver's, and NVML."""
    gpus, built = facts.gpus, facts.torch_cuda
    if not gpus.source:
        text = f"torch is built for CUDA {built}, and no driver can be seen ({gpus.trouble})"
        remedy = "fine on a machine without GPUs; else pip install nvidia-ml-py and see nvidia-smi"
        yield from first("gpu", text if built else "none: runs on the CPU", (built, "warning", "", remedy))
        return
    names = f"{len(gpus.found)} x {gpus.found[0].name}" if gpus.found else "none"
    oldest = DRIVER_OF_CUDA.get(next(iter(numbers(built or "")), 0), 0)
    have = next(iter(numbers(gpus.driver)), oldest)
    yield from first(
        "gpu",
        f"{names}, driver {gpus.driver or 'unknown'} (by {gpus.source})",
        (have < oldest, "error", f", torch is built for CUDA {built}, which needs driver r{oldest} or later",
         f"update the driver, or install a torch for CUDA {'12' if oldest == 580 else '11'}"),
        (built == "" and gpus.found, "warning", ", but torch is built without CUDA", "install torch's wheel for CUDA"),
    )  # fmt: skip
    remedy = 'pip install nvidia-ml-py: memory.share = "switch" needs it'
    lacks_nvml = "nvidia-ml-py" not in facts.versions and gpus.found
    yield from if_so("nvml", (lacks_nvml, "warning", "nvidia-ml-py is not installed", remedy))


def environment(facts: MachineFacts) -> Iterator[Finding]:
    """Variables that every actor inherits."""
    env = facts.env
    rows: list[tuple[str, object, str, str]] = [
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
        yield from if_so(name, (holds, "warning", meaning, remedy))


def network(facts: MachineFacts) -> Iterator[Finding]:
    """The name that other nodes use, and the port where they meet."""
    addresses = ", ".join(facts.addresses)
    is_loopback = all(address.startswith("127.") or address == "::1" for address in facts.addresses)
    yield from first(
        "hostname",
        f"{facts.hostname} resolves to {addresses}" if addresses else facts.hostname,
        (not addresses, "warning", " does not resolve",
         "add it to /etc/hosts with the address that other nodes reach; one machine alone does without"),
        (is_loopback, "warning", ": other nodes would call themselves",
         "give it its real address in /etc/hosts, or name an address: --rdzv ADDRESS:PORT"),
    )  # fmt: skip
    meaning = f"{facts.port_trouble}: `myxa launch` meets there by default"
    remedy = "end what listens there (ss -ltnp), or give another one: --rdzv HOST:PORT"
    yield from if_so("port 29400", (facts.port_trouble, "warning", meaning, remedy))


MACHINE_CHECKS = (system, disk_and_rights, packages, gpu, environment, network)
