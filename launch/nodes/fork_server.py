"""A node's fork server: a process with the imports done, forked into actors. Its launcher's side is `ForkServer`.

Launcher and server (`python -m myxa.launch.nodes.fork_server`) exchange one message a packet:

    launcher -> server           ForkRequest with two descriptors: the new process's end of a socket pair, and its log
    new process -> launcher      ForkReply on that pair: its pid, or why there is no process
    launcher -> new process      GO: continue. Anything else, or the end of the pair: exit at once
    server -> launcher, at start ForkReply: the imports are done, or why not

The server has one loop, starts no thread and touches no GPU: a child must be like a fresh process. It forks twice, and
the kernel makes the launcher, which adopts orphans (core/process.py), the parent of the second child: the launcher
watches, reaps and ends it like its own. Children of `multiprocessing.forkserver` belong to the server, so their exit
status and death signal would be lost with it. Without a server, actors get interpreters of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from ...core.config import RunConfig
from ...core.errors import LaunchError, MyxaError
from ...core.process import SCHEDULERS, die_with_parent, name_process
from ..actor_spec import ActorSpec
from ..first_failure import read_tail
from ..worker_spec import DEFAULT_PROGRAM, SPEC_VARIABLE, WORKER_MODULE, server_env
from .child import Child, OnExit, start_child

LIGHT = (
    *("myxa.launch.worker", "myxa.launch.program", "myxa.actors.monitor.monitor", "myxa.actors.sinks.registry"),
    "myxa.launch.run_lineage.resume_point",
    *("myxa.actors.buffer.buffer", "myxa.actors.coordinator.coordinator", "myxa.actors.data.prompts"),
    *("myxa.actors.rollout.rollout", "myxa.actors.rewards.rewarder", "myxa.actors.models.hf_folder"),
    *("myxa.actors.workflows.named", "numpy.random", "transformers.tokenization_utils_tokenizers"),
)
TORCH = (
    *("myxa.launch.composition.trainer_parts", "myxa.actors.trainer.trainer"),
    "myxa.actors.backends.torch_backend.backend",
    *("myxa.actors.engines.embedded.engine", "myxa.actors.weights.channels.host"),
)
MEGATRON = "myxa.actors.backends.megatron.backend"
"""Modules of the roles, read off `sys.modules` of a serving process. One that is missing here costs its import at each
start, nothing else."""
READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_")
"""Prefixes of variables that numeric libraries read when they are loaded, before the actor is known."""
SET_PER_ACTOR = "OMP_NUM_THREADS"
"""The one of these that the launcher itself sets for each actor. A forked child applies it later."""


def preloaded(
    config: RunConfig, program: str, own_actors: Iterable[ActorSpec], env: Mapping[str, str]
) -> tuple[str, ...]:
    """What the fork server of a node with these actors and launcher variables imports; empty: every actor gets its own
    interpreter. A user's own composition root may need other modules than ours."""
    is_fixed = any(name.startswith(READ_AT_IMPORT) and name != SET_PER_ACTOR for name in env)
    forked = [actor for actor in own_actors if is_forked(actor)]
    if is_fixed or not (config.run.preload and forked):
        return ()
    if program != DEFAULT_PROGRAM:
        return LIGHT
    has_engines = not config.algo.is_given
    trainers = [actor for actor in forked if actor.role == "trainer"]
    engines = [actor for actor in forked if actor.role in ("rollout", "model") and actor.kind == "embedded"]
    # Importing megatron-core asks CUDA for devices where there are some, which no fork survives.
    is_megatron = any(actor.kind == "megatron" and not actor.devices for actor in trainers)
    return (*LIGHT, *(TORCH if trainers or (engines and has_engines) else ()), *((MEGATRON,) if is_megatron else ()))


def is_forked(actor: ActorSpec) -> bool:
    """Whether it need not have its own interpreter: variables of its role may be for the loader, or read at import."""
    return not (actor.python or actor.env)


# -- the server --------------------------------------------------------------------------------------------------------

MAX_BYTES = 1 << 20
"""Largest packet; the kernel's limit on buffers may be lower."""
GO = b"go"
ADOPT_S = 10.0
"""How long the process between us and the launcher may take to exit, so that the launcher becomes our parent."""
GO_S = 60.0
"""How long the launcher may take to answer GO. It closes its end if the process is not wanted."""
GPU_FILES = "/dev/nvidia"
_ARG_START = 45
"""Field of /proc/self/stat, counted from the state: start of the arguments; their end and both ends of the variables
follow."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process to be made."""

    name: str
    launcher_pid: int
    env: tuple[tuple[bytes, bytes], ...] = ()
    """The process's whole environment."""


class ForkReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process, or why there is none."""

    pid: int = 0
    problem: str = ""


pack = msgspec.msgpack.encode
unpack_request = msgspec.msgpack.Decoder(ForkRequest).decode
unpack_reply = msgspec.msgpack.Decoder(ForkReply).decode


def main(arguments: list[str]) -> int:
    """`<process id of the launcher> <descriptor of the socket> <module> ...`."""
    launcher_pid, descriptor, *modules = arguments
    die_with_parent(int(launcher_pid))
    serve(socket.socket(fileno=int(descriptor)), modules)
    return 0


def serve(launcher: socket.socket, modules: Iterable[str]) -> None:
    """Import, report, then fork on request until the launcher closes the socket."""
    for number in SCHEDULERS:  # the launcher's to act on
        signal.signal(number, signal.SIG_IGN)
    launcher.set_inheritable(False)
    name_process("myxa: forks")
    gc.disable()
    problem = _preload(modules) or unfit()
    launcher.send(pack(ForkReply(pid=os.getpid(), problem=problem)))
    if problem:
        return
    gc.collect()
    gc.freeze()  # a collection would write into every shared page
    while True:
        data, descriptors, _, _ = socket.recv_fds(launcher, MAX_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        request = unpack_request(data)
        own_end, log = socket.socket(fileno=descriptors[0]), descriptors[1]
        problem = unfit() or _fork(request, launcher, own_end, log)
        if problem:
            _tell(own_end, ForkReply(problem=problem))
        own_end.close()
        os.close(log)


def unfit() -> str:
    """Why this process must not be forked; empty: it may. A child has only the forking thread, and locks that other
    threads held stay locked. CUDA does not survive a fork and has chosen its devices already."""
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if num_threads != 1:
        return f"an import started {num_threads - 1} threads"
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone
            if (target := str(path.readlink())).startswith(GPU_FILES):
                return f"an import opened {target}"
    return ""


def _preload(modules: Iterable[str]) -> str:
    try:
        for module in modules:
            importlib.import_module(module)
        from ...transport.codec import compile_loaded  # imports numpy, which the launcher does without

        compile_loaded()
    except Exception as error:  # noqa: BLE001 - the actor's own start will report it properly
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _fork(request: ForkRequest, launcher: socket.socket, own_end: socket.socket, log: int) -> str:
    """Why there is no process; empty: there is one, or the closing socket shows that it died."""
    try:
        between = os.fork()
    except OSError as error:
        return f"no process can be made: {error.strerror}"
    if between:
        os.waitpid(between, 0)
        return ""
    status = 1
    try:
        if os.fork() == 0:
            launcher.close()
            status = be_actor(request) if detach(request, own_end, log) else 0
        else:
            status = 0
    except OSError as error:
        _tell(own_end, ForkReply(problem=f"no process can be made: {error.strerror}"))
    except BaseException:  # noqa: BLE001 - the child must not return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _tell(own_end: socket.socket, reply: ForkReply) -> None:
    with contextlib.suppress(OSError):  # the launcher has closed its end
        own_end.send(pack(reply))


# -- the forked process


def detach(request: ForkRequest, own_end: socket.socket, log: int) -> bool:
    """Leave the server's session, wait until the launcher is our parent, ask it for GO; whether it answered GO."""
    os.setsid()
    if not _is_adopted_by(request.launcher_pid):
        return False
    die_with_parent(request.launcher_pid)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    own_end.settimeout(GO_S)
    try:
        own_end.send(pack(ForkReply(pid=os.getpid())))
        return own_end.recv(len(GO)) == GO
    except OSError:  # timeout, or the launcher is gone
        return False
    finally:
        own_end.close()


def be_actor(request: ForkRequest) -> int:
    """Become the worker; returns its exit status, if it returns."""
    name_process(request.name)
    for number in SCHEDULERS:
        signal.signal(number, signal.SIG_DFL)
    os.environb.clear()
    os.environb.update(dict(request.env))
    worker = importlib.import_module(WORKER_MODULE)
    sys.argv = [str(worker.__file__)]
    sys.orig_argv = [sys.executable, "-m", WORKER_MODULE]
    look_like(sys.orig_argv, request.env)
    for name in ("__main__", "__mp_main__"):  # children of `multiprocessing` import these
        if name in sys.modules:
            sys.modules[name] = worker
    importlib.invalidate_caches()  # users' files may be newer than the server
    reseed()
    use_threads(os.environ)
    gc.enable()
    try:
        return worker.main()
    except SystemExit as error:  # no interpreter above us handles it
        if error.code is None or isinstance(error.code, int):
            return worker.leave((error.code or 0) & 0xFF)
        print(error.code, file=sys.stderr)
        return worker.leave(1)


def reseed() -> None:
    """Seed this process's random numbers again. Python's `random` reseeds itself after a fork."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = secrets.token_bytes(32)


def use_threads(env: Mapping[str, str]) -> None:
    """Set the actor's number of threads for torch: the server loaded it with one."""
    num_threads = env.get(SET_PER_ACTOR, "1")
    if num_threads.isdecimal() and int(num_threads) > 1 and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(min(int(num_threads), len(os.sched_getaffinity(0))))  # the libraries' own default


def _is_adopted_by(launcher_pid: int) -> bool:
    """Whether the launcher becomes our parent, when the process between us has ended."""
    deadline = time.monotonic() + ADOPT_S
    while os.getppid() != launcher_pid and time.monotonic() < deadline:
        select.select([], [], [], 0.001)
    return os.getppid() == launcher_pid


def look_like(command: Sequence[str], env: Iterable[tuple[bytes, bytes]]) -> None:
    """Set the command line and variables that /proc shows (`ps`, `myxa doctor`).

    The kernel shows the bytes behind the first stack frame of the program; this overwrites them and leaves out what
    does not fit. No library may use the first environment any more. Does nothing if the kernel does not give the
    addresses. `setproctitle` was considered: it drops the variables, by which actors are found."""
    text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    places = [int(field) for field in text.rpartition(")")[2].split()[_ARG_START : _ARG_START + 4]]
    if len(places) != 4 or not all(places):
        return
    _overwrite(places[0], places[1], (word.encode() for word in command))
    _overwrite(places[2], places[3], (name + b"=" + value for name, value in env))


def _overwrite(start: int, end: int, texts: Iterable[bytes]) -> None:
    """Write the words that fit whole, then zeros."""
    room, text = end - start, b""
    for word in texts:
        if len(text) + len(word) + 1 <= room:
            text += word + b"\0"
    ctypes.memmove(start, text.ljust(room, b"\0"), room)


# -- the launcher's side -----------------------------------------------------------------------------------------------

SERVER_MODULE = "myxa.launch.nodes.fork_server"
IMPORT_S = 45.0
"""How long starts wait for the server's imports; a slower one is killed. An order to start an actor has a deadline of
60 s."""
FORK_S = 5.0
"""A server that takes longer to fork hangs, and is killed."""
END_S = 5.0


class ForkServer:
    """See the module's head. Of one loop, in a process that adopts orphans; started once, when first wanted."""

    def __init__(self, modules: Sequence[str], folder: Path, log: logging.Logger) -> None:
        """`folder`: for the server's log."""
        self.log_path = folder / "fork-server.log"
        self._modules = modules
        self._log = log
        self._child: Child | None = None
        self._link: socket.socket | None = None
        self._begun: asyncio.Task[None] | None = None
        self._refused = ""
        """Why actors cannot be forked from it."""

    @property
    def pid(self) -> int:
        """Of the process while it runs, else 0."""
        return self._child.pid if self._child is not None and self._child.status is None else 0

    def warm(self) -> asyncio.Task[None]:
        """Have the server do its imports now; done when it has, or is refused."""
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_task(self._begin(), name="fork server")
        return self._begun

    async def start(
        self, name: str, attempt: int, *, env: Mapping[str, str], log_path: Path, on_exit: OnExit
    ) -> Child | None:
        """Like `start_child`; None: there is no process and none will come later, start it otherwise."""
        if not self._refused:
            await asyncio.wait({self.warm()})
        if self._refused or self._link is None:
            return None
        # The specification first: /proc may have no room for the rest.
        spec_first = sorted(env.items(), key=lambda item: item[0] != SPEC_VARIABLE)
        request = ForkRequest(
            name=name,
            launcher_pid=os.getpid(),
            env=tuple((os.fsencode(key), os.fsencode(value)) for key, value in spec_first),
        )
        try:
            async with asyncio.timeout(FORK_S):
                return await self._fork(self._link, request, log_path, attempt, on_exit)
        except TimeoutError:
            self._refuse(f"the fork server did not answer within {FORK_S:g} s")
        except (LaunchError, OSError) as error:
            if not self._refused:
                self._log.warning("%s is started with its own interpreter: %s", name, error)
        return None

    async def close(self) -> None:
        self._refused = self._refused or "this node's fork server has ended"
        if self._begun is not None:
            self._begun.cancel()
            await asyncio.wait({self._begun})
        self._end()
        if self._child is not None:
            await self._child.wait(END_S)

    def _refuse(self, why: str) -> None:
        if not self._refused:
            self._refused = why
            self._log.warning("actors are not forked any more: %s", why)
        self._end()

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._child is not None:
            self._child.kill()

    async def _begin(self) -> None:
        try:
            async with asyncio.timeout(IMPORT_S):
                self._child, self._link = self._make()
                if problem := (await _receive(self._link)).problem:
                    raise LaunchError(problem)
        except TimeoutError:
            self._refuse(f"the fork server still imports after {IMPORT_S:g} s")
        except (MyxaError, OSError) as error:
            self._refuse(str(error))

    def _make(self) -> tuple[Child, socket.socket]:
        ours, theirs = _pair()
        command = (sys.executable, "-m", SERVER_MODULE, str(os.getpid()), str(theirs.fileno()), *self._modules)
        with theirs, contextlib.ExitStack() as stack:
            stack.enter_context(ours)  # closed if there is no process
            child = start_child(
                "fork server", 0, command, env=server_env(os.environ), log_path=self.log_path, on_exit=self.on_end,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
            stack.pop_all()
        return child, ours

    def on_end(self, child: Child, status: int) -> None:
        if self._begun is not None and self._begun.done():  # else `_begin` says why
            last = next(iter(read_tail(child.log_path)[-1:]), "it wrote nothing")
            self._refuse(f"the fork server (process {child.pid}) ended with status {status}: {last}")

    async def _fork(
        self, link: socket.socket, request: ForkRequest, log_path: Path, attempt: int, on_exit: OnExit
    ) -> Child:
        """Raises LaunchError or OSError."""
        ours, theirs = _pair()
        with ours, log_path.open("wb") as log:
            with theirs:
                socket.send_fds(link, [pack(request)], [theirs.fileno(), log.fileno()])
            reply = await _receive(ours)
            if reply.problem:
                raise LaunchError(reply.problem)
            child = Child(request.name, attempt, log_path, reply.pid, on_exit)
            with contextlib.suppress(OSError):  # it has ended already, which its pidfd reports
                ours.send(GO)
        return child


async def _receive(link: socket.socket) -> ForkReply:
    """Raises LaunchError if the other side ended or cannot be understood, OSError if it cannot be read."""
    data = await asyncio.get_running_loop().sock_recv(link, MAX_BYTES)
    try:
        return unpack_reply(data)
    except msgspec.DecodeError as error:
        raise LaunchError(f"the fork server sent invalid data: {error}" if data else "the fork server ended") from error


def _pair() -> tuple[socket.socket, socket.socket]:
    """Our end, which does not block, and theirs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
