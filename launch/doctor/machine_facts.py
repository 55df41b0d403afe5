"""What `myxa doctor` judges: one record of the machine. `gather` fills it, `judge` judges it.

Plain values: a test passes a machine of its own. A fact that could not be learnt is None or empty, its `trouble` says
why, and nothing is judged by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..preflight.machine import Gpus


@dataclass(frozen=True, slots=True)
class System:
    """Interpreter and operating system."""

    python: tuple[int, int, int]
    executable: str
    machine: str
    """Like "x86_64"."""
    os_name: str
    kernel: tuple[int, int]
    libc: str
    """Like "glibc 2.36"."""
    num_cpus: int
    """That this process may use."""


@dataclass(frozen=True, slots=True)
class Packages:
    """What is installed beside myxa."""

    versions: Mapping[str, str]
    """Distribution -> version; what is missing is not installed."""
    torch_cuda: str | None
    """CUDA that torch was built for; "" = none; None: no torch."""
    compiler: str
    """Path of a C++ compiler; empty: none."""


@dataclass(frozen=True, slots=True)
class Preload:
    """torch-memory-saver's library in front of a process."""

    library: str
    """As its own resolver says; empty: it is not installed, or does not know."""
    trouble: str = ""
    """Why the resolver does not know."""
    status: int | None = None
    """Exit status of /bin/true with it; None: not tried."""
    said: str = ""
    """What the loader said."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory, shared memory, limits."""

    total_bytes: int
    """MemTotal."""
    available_bytes: int
    """What may still be taken, control group included."""
    cgroup_bytes: int | None
    """The control group's limit; None: none."""
    shm_bytes: int | None
    """Size of /dev/shm; None: there is none."""
    num_files: tuple[int, int]
    """RLIMIT_NOFILE, soft and hard."""
    overcommit: int | None
    """vm.overcommit_memory."""


@dataclass(frozen=True, slots=True)
class Network:
    """Names and ports."""

    hostname: str
    addresses: tuple[str, ...]
    """That the hostname resolves to."""
    trouble: str
    """Why it does not resolve."""
    loopback: str
    """Why a port of 127.0.0.1 cannot be listened on; empty: it can."""
    every_address: str
    """The same of 0.0.0.0."""
    ipv6: str
    """The same of ::1."""
    meeting_port: str
    """Why `myxa launch`'s default port cannot be listened on; empty: it can."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Where run directories go."""

    folder: str
    free_bytes: int | None
    is_writable: bool
    file_system: str
    """Type, like "ext4"; empty: not known."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What the kernel lets this user do; an error's text, or empty where it works."""

    ptrace_scope: int | None
    """Yama's; None: no Yama."""
    memfd: str
    pidfd: str
    socket_folder: str
    """Why runtime folders cannot be made."""


@dataclass(frozen=True, slots=True)
class Time:
    """The clocks."""

    wall_s: float
    newest_file_s: float
    """When the newest file of this installation was written."""
    source: str
    """The kernel's clock source; empty: not known."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run of this user that has left something."""

    run_dir: str
    folder: str
    """Its runtime folder."""
    launcher: int
    """Process id; 0: not known."""
    is_alive: bool
    """Whether its launcher is."""
    pids: tuple[int, ...] = ()
    """Of its actors that are there."""


@dataclass(frozen=True, slots=True)
class Server:
    """An SGLang server of this user."""

    pid: int
    host: str
    has_key: bool


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything."""

    system: System
    packages: Packages
    gpus: Gpus
    preload: Preload
    room: Room
    network: Network
    disk: Disk
    rights: Rights
    time: Time
    runs: tuple[FoundRun, ...] = ()
    servers: tuple[Server, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of this process: the variables that matter."""
