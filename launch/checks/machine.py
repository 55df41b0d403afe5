"""What this machine has and lets its user do: the facts that `machine_checks` judges. Uses no GPU, knows no run file.

`gather` asks everything, for `myxa doctor`; parts are asked by other checks and by the launcher. Each question has its
own deadline, and a failure becomes a fact; only `check_port` raises. Nothing is changed: ports are listened on for an
instant, and a few child processes start (one loads a preloaded library). Earlier runs are found by what they left:
runtime folders, workers' descriptions, command lines.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import psutil

from ... import __file__ as package_file
from ...core.errors import LaunchError
from ...memory.host import CGROUP_ROOT, available_bytes
from ..control.client import ControlNote
from ..host import Gpus, free_at, listen_trouble, look_at_gpus, nearest_folder
from ..node_place import DEFAULT_PORT
from ..runtime_dir import PREFIX, short_base
from ..worker_spec import SPEC_VARIABLE, WORKER_MODULE, ProcessSpec, read_spec
from .interpreters import has_module, module_folder


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Everything that is judged. A fact that could not be had is None or empty, and nothing is judged by it. Trouble is
    an error's text; empty: it works."""

    python: tuple[int, int, int]
    executable: str
    architecture: str
    os_name: str
    kernel: tuple[int, int]
    libc: str
    """Like "glibc 2.36"."""
    versions: Mapping[str, str]
    """Distribution -> version; what is missing is not installed."""
    torch_cuda: str | None
    """CUDA that torch was built for; "" = none; None: no torch."""
    compiler: str
    """Path of a C++ compiler."""
    gpus: Gpus
    preload: Preload
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
    hostname: str
    addresses: tuple[str, ...]
    """That the hostname resolves to."""
    hostname_trouble: str
    loopback_trouble: str
    """Of listening on 127.0.0.1."""
    address_trouble: str
    """Of listening on 0.0.0.0."""
    ipv6_trouble: str
    port_trouble: str
    """Of `myxa launch`'s default port."""
    folder: str
    """Where run directories go."""
    free_bytes: int | None
    is_writable: bool
    file_system: str
    """Type, like "ext4"."""
    ptrace_scope: int | None
    """Yama's; None: no Yama."""
    memfd_trouble: str
    pidfd_trouble: str
    socket_trouble: str
    """Of making runtime folders."""
    wall_s: float
    newest_file_s: float
    """When the newest file of this installation was written."""
    clock_source: str
    """The kernel's."""
    runs: tuple[FoundRun, ...] = ()
    servers: tuple[Server, ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of this process: the variables that matter."""


VARIABLES = (
    *("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "LD_PRELOAD"),
    "CUDA_VISIBLE_DEVICES",
)
COMPILERS = ("c++", "g++", "clang++")
"""As `memory/communicators/proxy_build.py`, which imports torch, looks for them."""


def gather(folder: str) -> MachineFacts:
    """Everything about this machine, for runs whose directories are made in `folder`."""
    versions = installed_versions()
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    hostname, (addresses, hostname_trouble) = socket.gethostname(), _addresses()
    place = nearest_folder(folder)
    newest = max((path.stat().st_mtime for path in (Path(package_file).parent / "launch").glob("*.py")), default=0.0)
    return MachineFacts(
        python=sys.version_info[:3],
        executable=sys.executable,
        architecture=platform.machine(),
        os_name=_os_name(),
        kernel=(release[0], release[1]) if len(release) == 2 else (0, 0),
        libc=" ".join(platform.libc_ver()).strip() or "a C library that is not glibc",
        versions=versions,
        torch_cuda=_torch_cuda(),
        compiler=next((path for name in COMPILERS if (path := shutil.which(name))), ""),
        gpus=look_at_gpus(),
        preload=preload_facts(is_installed="torch-memory-saver" in versions),
        total_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_bytes(),
        cgroup_bytes=_cgroup_limit(CGROUP_ROOT),
        shm_bytes=_size_of(Path("/dev/shm")),
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        overcommit=_number(Path("/proc/sys/vm/overcommit_memory")),
        hostname=hostname,
        addresses=addresses,
        hostname_trouble=hostname_trouble,
        loopback_trouble=listen_trouble("127.0.0.1", 0),
        address_trouble=listen_trouble("0.0.0.0", 0),  # for an instant, any port
        ipv6_trouble=listen_trouble("::1", 0),
        port_trouble=listen_trouble("0.0.0.0", DEFAULT_PORT),
        folder=str(place),
        free_bytes=free_at(folder),
        is_writable=os.access(place, os.W_OK | os.X_OK),
        file_system=_file_system(place),
        ptrace_scope=_number(Path("/proc/sys/kernel/yama/ptrace_scope")),
        memfd_trouble=_trouble(lambda: os.memfd_create("myxa-doctor")),
        pidfd_trouble=_trouble(lambda: os.pidfd_open(os.getpid())),
        socket_trouble=_socket_trouble(),
        wall_s=time.time(),
        newest_file_s=newest,
        clock_source=_text_of(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")).strip(),
        runs=find_runs(),
        servers=find_servers(),
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def installed_versions() -> dict[str, str]:
    """Of the distributions that matter."""
    versions: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


DISTRIBUTIONS = (
    *("torch", "sglang", "megatron-core", "torch-memory-saver", "transformers", "flashinfer-python", "nvidia-ml-py"),
    *("nvidia-nccl-cu13", "nvidia-nccl-cu12", "pyzmq", "pydantic", "numpy"),
)
LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
NO_LIMIT = 1 << 60
"""What version 1 of control groups says for "none"."""
CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()


def _text_of(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None


def _torch_cuda() -> str | None:
    """From torch's own source text: importing it would take seconds."""
    match = CUDA_LINE.search(_text_of(Path(module_folder("torch")) / "version.py")) if has_module("torch") else None
    return None if match is None else match[1] or match[2] or ""


def _cgroup_limit(root: Path) -> int | None:
    limits = [limit for name in LIMIT_FILES if (limit := _number(root / name)) is not None and limit < NO_LIMIT]
    return min(limits) if limits else None


def _size_of(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _file_system(path: Path) -> str:
    """Type of the file system that the path lies on: the longest mount point above it."""
    lines = _text_of(Path("/proc/self/mounts")).splitlines()
    mounts = [(Path(words[1].replace("\\040", " ")), words[2]) for line in lines if len(words := line.split()) > 2]
    above = [(len(point.parts), kind) for point, kind in mounts if path == point or point in path.parents]
    return max(above, default=(0, ""), key=lambda one: one[0])[1]


def _addresses() -> tuple[tuple[str, ...], str]:
    """That the hostname resolves to, and why it does not."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), str(error.strerror or error)
    return tuple(dict.fromkeys(str(one[4][0]) for one in found)), ""


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


RESOLVE_S = 120.0
"""torch-memory-saver's resolver imports torch."""
TRY_S = 20.0
RESOLVER = (
    "from torch_memory_saver.utils import get_binary_path_from_package as find;"
    "print(); print(find('torch_memory_saver_hook_mode_preload'))"
)
"""Its own: by file name one takes the library of another CUDA."""


def preload_facts(*, is_installed: bool) -> Preload:
    """What torch-memory-saver would preload, and whether a process starts with it."""
    from ...actors.engines.sglang.memory import saver_env

    if not is_installed:
        return Preload("")
    try:
        done = _run([sys.executable, "-c", RESOLVER], dict(os.environ), RESOLVE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload("", trouble=f"its resolver could not be asked: {error}")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Preload("", trouble=last)
    return try_preload(done.stdout.strip().splitlines()[-1], saver_env(os.environ))


def try_preload(library: str, env: dict[str, str]) -> Preload:
    """Start /bin/true with the library in front of it, in the environment that a server would get."""
    try:
        done = _run(["/bin/true"], {**env, "LD_PRELOAD": library}, TRY_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Preload(library, status=-1, said=str(error))
    return Preload(library, status=done.returncode, said=" ".join(done.stderr.split()))


def _run(command: list[str], env: dict[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


SERVER_MODULE = "sglang.launch_server"
HOST_FLAG, KEY_FLAGS = "--host", ("--api-key", "--admin-api-key", "--config")
"""myxa's own servers get their keys by a file, `--config`."""


def find_runs() -> tuple[FoundRun, ...]:
    """Every run of this user that has a folder or a process here."""
    lines = _command_lines()
    workers = list(_workers(lines))
    # A shell waits for the launcher's end, to remove its folder then.
    guarded = {words[-1] for words in lines.values() if words[:2] == ["/bin/sh", "-c"]}
    found: dict[str, FoundRun] = {}
    for folder in {*_folders(), *(folder for _, folder, _ in workers)}:
        note = ControlNote.load(folder)
        mine = [(pid, spec) for pid, folder_of, spec in workers if folder_of == folder]
        launcher = note.pid if note is not None else mine[0][1].launcher_pid if mine else 0
        run_dir = note.run_dir if note is not None else mine[0][1].run_dir if mine else ""
        is_alive = str(folder) in guarded or (launcher > 0 and psutil.pid_exists(launcher))
        found[str(folder)] = FoundRun(run_dir, str(folder), launcher, is_alive, tuple(pid for pid, _ in mine))
    return tuple(found[name] for name in sorted(found))


def _command_lines() -> dict[int, list[str]]:
    """Of every process of this user."""
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == os.getuid():
                found[process.pid] = process.cmdline()
        except psutil.Error:
            continue
    return found


def _folders() -> Iterator[Path]:
    try:
        entries = sorted(Path(short_base()).glob(f"{PREFIX}*"))
    except (LaunchError, OSError):
        return
    for entry in entries:
        try:
            is_ours = entry.lstat().st_uid == os.getuid() and entry.is_dir()
        except OSError:
            continue
        if is_ours and ((entry / "rdzv.json").exists() or ControlNote.load(entry) is not None):
            yield entry


def _workers(lines: Mapping[int, list[str]]) -> Iterator[tuple[int, Path, ProcessSpec]]:
    """Process id, runtime folder and description of every actor of this user."""
    for pid, words in lines.items():
        if WORKER_MODULE not in words:
            continue
        try:
            path = psutil.Process(pid).environ().get(SPEC_VARIABLE, "")
            yield pid, Path(path).parent, read_spec(path)
        except (psutil.Error, LaunchError):
            continue


def find_servers() -> tuple[Server, ...]:
    """SGLang servers of this user: what they listen on, and whether they ask for a key."""
    return tuple(server_of(pid, words) for pid, words in _command_lines().items() if SERVER_MODULE in words)


def server_of(pid: int, words: Sequence[str]) -> Server:
    """From a command line with `--flag value` or `--flag=value`."""
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    host = next((flat[at + 1] for at, word in enumerate(flat[:-1]) if word == HOST_FLAG), "127.0.0.1")
    return Server(pid, host, any(flag in flat for flag in KEY_FLAGS))
