"""Looks at the machine and fills the record that is judged. The only place of `doctor` that asks the system.

Every question has its own deadline and answers with what went wrong; none raises. Nothing is changed: ports are
listened on for an instant, one process is started that does nothing, one that resolves a library's name.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

from ... import __file__ as package_file
from ...core.errors import LaunchError
from ...memory.communicators.proxy_build import COMPILERS
from ...memory.host import CGROUP_ROOT, available_bytes
from ..node_place import DEFAULT_PORT
from ..preflight.disk import free_at, nearest_folder
from ..preflight.gpus import look_at_gpus
from ..preflight.interpreters import has_module, module_folder
from ..runtime_dir import short_base
from .found_runs import find_runs, find_servers
from .machine_facts import Disk, MachineFacts, Network, Packages, Rights, Room, System, Time
from .probes import memory_read_trouble, preload_facts

DISTRIBUTIONS = (
    *("torch", "sglang", "megatron-core", "torch-memory-saver", "transformers", "flashinfer-python", "nvidia-ml-py"),
    *("nvidia-nccl-cu13", "nvidia-nccl-cu12", "pyzmq", "pydantic", "numpy"),
)
VARIABLES = (
    *("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"),
    "CUDA_VISIBLE_DEVICES",
)
LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
NO_LIMIT = 1 << 60
"""What version 1 of control groups says for "none"."""
CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


def gather(folder: str) -> MachineFacts:
    """Everything about this machine, for runs whose directories are made in `folder`."""
    packages = _packages()
    return MachineFacts(
        system=_system(),
        packages=packages,
        gpus=look_at_gpus(),
        preload=preload_facts(is_installed="torch-memory-saver" in packages.versions),
        room=_room(),
        network=_network(),
        disk=_disk(folder),
        rights=_rights(),
        time=_time(),
        runs=find_runs(),
        servers=find_servers(),
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _system() -> System:
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    try:
        os_name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        os_name = platform.system()
    return System(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        executable=sys.executable,
        machine=platform.machine(),
        os_name=os_name,
        kernel=(release[0], release[1]) if len(release) == 2 else (0, 0),
        libc=" ".join(platform.libc_ver()).strip() or "a C library that is not glibc",
        num_cpus=len(os.sched_getaffinity(0)),
    )


# -- packages ----------------------------------------------------------------------------------------------------------


def _packages() -> Packages:
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), "")
    return Packages(versions, _torch_cuda(), compiler)


def _torch_cuda() -> str | None:
    """From torch's own source text: importing it would take seconds."""
    if not has_module("torch"):
        return None
    try:
        text = (Path(module_folder("torch")) / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = CUDA_LINE.search(text)
    return None if match is None else match[1] or match[2] or ""


# -- memory, disk, limits ----------------------------------------------------------------------------------------------


def _room() -> Room:
    return Room(
        total_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_bytes(),
        cgroup_bytes=_cgroup_limit(CGROUP_ROOT),
        shm_bytes=_size_of(Path("/dev/shm")),
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        overcommit=_number(Path("/proc/sys/vm/overcommit_memory")),
    )


def _cgroup_limit(root: Path) -> int | None:
    limits = [limit for name in LIMIT_FILES if (limit := _number(root / name)) is not None and limit < NO_LIMIT]
    return min(limits) if limits else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _size_of(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _disk(folder: str) -> Disk:
    path = nearest_folder(folder)
    return Disk(str(path), free_at(folder), os.access(path, os.W_OK | os.X_OK), _file_system(path))


def _file_system(path: Path) -> str:
    """Type of the file system that the path lies on: the longest mount point above it."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = [(Path(words[1].replace("\\040", " ")), words[2]) for line in lines if len(words := line.split()) > 2]
    above = [(len(point.parts), kind) for point, kind in mounts if path == point or point in path.parents]
    return max(above, default=(0, ""), key=lambda one: one[0])[1]


# -- network -----------------------------------------------------------------------------------------------------------


def _network() -> Network:
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses, trouble = tuple(dict.fromkeys(str(one[4][0]) for one in found)), ""
    except OSError as error:
        addresses, trouble = (), str(error.strerror or error)
    return Network(
        hostname=name,
        addresses=addresses,
        trouble=trouble,
        loopback=listen_trouble(socket.AF_INET, "127.0.0.1", 0),
        every_address=listen_trouble(socket.AF_INET, "0.0.0.0", 0),  # for an instant, any port
        ipv6=listen_trouble(socket.AF_INET6, "::1", 0),
        meeting_port=listen_trouble(socket.AF_INET, "0.0.0.0", DEFAULT_PORT),
    )


def listen_trouble(family: socket.AddressFamily, host: str, port: int) -> str:
    """Why that cannot be listened on; empty if it can."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


# -- rights and clocks -------------------------------------------------------------------------------------------------


def _rights() -> Rights:
    return Rights(
        read_memory=memory_read_trouble(),
        ptrace_scope=_number(Path("/proc/sys/kernel/yama/ptrace_scope")),
        memfd=_trouble(lambda: os.memfd_create("myxa-doctor")),
        pidfd=_trouble(lambda: os.pidfd_open(os.getpid())),
        socket_folder=_socket_trouble(),
    )


def _trouble(opens: Callable[[], int]) -> str:
    try:
        os.close(opens())
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def _socket_trouble() -> str:
    try:
        short_base()
    except LaunchError as error:
        return error.message
    return ""


def _time() -> Time:
    root = Path(package_file).parent
    newest_s = max((path.stat().st_mtime for path in (root / "launch").glob("*.py")), default=0.0)
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    try:
        clock_source = source.read_text(encoding="ascii").strip()
    except OSError:
        clock_source = ""
    return Time(time.time(), newest_s, clock_source)
