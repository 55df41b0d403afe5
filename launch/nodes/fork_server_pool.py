"""The pool of one node's fork servers (fork_server.py), one per preload set, from which its agent forks actors.

Forking only saves time: if anything is wrong with a server, the pool logs it and the agent starts the actor with an
interpreter of its own. A running actor does not need the server that it was forked from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...core.errors import LaunchError
from ..first_failure import read_tail
from ..worker_spec import SPEC_VARIABLE, server_env
from .child import Adopted, Child, OnExit, start_child
from .fork_server import GO, MAX_BYTES, ForkReply, ForkRequest, pack, unpack_reply
from .preloads import PRELOAD_SETS

SERVER_MODULE = "myxa.launch.nodes.fork_server"
IMPORT_S = 300.0
"""A server whose imports take longer is killed: a file system hangs."""
FORK_S = 5.0
"""A server that takes longer to fork hangs, and is killed."""
MAX_ENDS = 3
"""After so many servers of one set have ended or failed by themselves, the pool makes no other."""
END_S = 5.0


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A started server; its task in the pool ends when it is ready."""

    preload_set: str
    child: Child
    link: socket.socket


class ForkServerPool:
    """`folder`: for the servers' logs. The pool belongs to one event loop, in a process that adopts orphans."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        self._folder = folder
        self._log = log
        self._tasks: dict[str, asyncio.Task[ForkServer]] = {}
        self._begun_s: dict[str, float] = {}
        self._ends: dict[str, int] = {}
        self._children: set[Child] = set()
        self._refused: dict[str, str] = {}
        """Preload set -> why actors cannot be forked from its server."""
        self._num_forks = 0
        self._is_closed = False

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(child.pid for child in self._children)

    @property
    def has_fork_in_flight(self) -> bool:
        """Whether this process may have children that are not registered as such yet."""
        return self._num_forks > 0

    def warm(self, sets: Iterable[str]) -> None:
        for set_name in sets:
            with contextlib.suppress(LaunchError):
                self._server(set_name)

    async def start(
        self, set_name: str, name: str, attempt: int, *, env: Mapping[str, str], log_path: Path, on_exit: OnExit
    ) -> Child | None:
        """Like `start_child`; None: there is no process, start it without the pool. OSError: no log can be written."""
        # The specification first: /proc may have no room for the rest.
        spec_first = sorted(env.items(), key=lambda item: item[0] != SPEC_VARIABLE)
        wanted = ForkRequest(
            name=name,
            launcher_pid=os.getpid(),
            env=tuple((os.fsencode(key), os.fsencode(value)) for key, value in spec_first),
        )
        try:
            child, link = await self._fork(await self._ready(set_name), wanted, log_path, attempt, on_exit)
        except LaunchError as error:
            level = logging.DEBUG if set_name in self._refused else logging.WARNING  # it was logged already
            self._log.log(level, "%s is started with its own interpreter: %s", name, error)
            return None
        link.close()
        return child

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        children = tuple(self._children)
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait(END_S) for child in children))

    # -- servers

    def _server(self, set_name: str) -> asyncio.Task[ForkServer]:
        """The set's server, made if there is none. Raises LaunchError if there may be none."""
        if self._is_closed:
            raise LaunchError("this node's fork servers have ended")
        if set_name in self._refused:
            raise LaunchError(self._refused[set_name])
        if set_name not in self._tasks:
            loop = asyncio.get_running_loop()
            self._begun_s[set_name] = loop.time()
            self._tasks[set_name] = loop.create_task(self._make(set_name), name=f"fork server {set_name}")
            self._tasks[set_name].add_done_callback(lambda task: self._on_made(set_name, task))
        return self._tasks[set_name]

    async def _ready(self, set_name: str) -> ForkServer:
        task = self._server(set_name)
        patience_s = PRELOAD_SETS[set_name].patience_s
        left_s = self._begun_s[set_name] + patience_s - asyncio.get_running_loop().time()
        await asyncio.wait({task}, timeout=max(0.0, left_s))
        if not task.done():
            raise LaunchError(f"the fork server {set_name} still imports after {patience_s:g} s")
        if task.cancelled():
            raise LaunchError("this node's fork servers have ended")
        return task.result()

    def _on_made(self, set_name: str, task: asyncio.Task[ForkServer]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._forget(set_name, str(error))

    def _forget(self, set_name: str, why: str) -> None:
        """The set's server is gone; the next start makes another, up to `MAX_ENDS`."""
        if self._is_closed or self._tasks.pop(set_name, None) is None:
            return
        if set_name in self._refused:
            return
        self._ends[set_name] = self._ends.get(set_name, 0) + 1
        self._log.warning("fork server %s: %s", set_name, why)
        if self._ends[set_name] >= MAX_ENDS:
            self._refuse(set_name, f"its fork server ended {MAX_ENDS} times")

    def _refuse(self, set_name: str, why: str) -> None:
        self._refused[set_name] = why
        self._log.warning("actors with preload set %s are not forked any more: %s", set_name, why)

    async def _make(self, set_name: str) -> ForkServer:
        base = PRELOAD_SETS[set_name].base
        try:
            server = (
                await self._another(set_name, await asyncio.shield(self._server(base)))
                if base
                else self._first(set_name)
            )
        except LaunchError:
            if base in self._refused:
                self._refuse(set_name, self._refused[base])
            raise
        try:
            reply = await _receive(server.link, IMPORT_S, f"the fork server {set_name}")
        except BaseException:
            _end(server)
            raise
        if reply.problem:  # another one would fail the same way
            _end(server)
            self._refuse(set_name, reply.problem)
            raise LaunchError(reply.problem)
        return server

    def _first(self, set_name: str) -> ForkServer:
        ours, theirs = _pair()
        command = (sys.executable, "-m", SERVER_MODULE, str(os.getpid()), str(theirs.fileno()))
        try:
            with theirs:
                child = start_child(
                    f"fork server {set_name}",
                    0,
                    command,
                    env=server_env(os.environ),
                    log_path=self._log_path(set_name),
                    on_exit=lambda child, status: self._on_end(set_name, child, status),
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            raise LaunchError(f"no fork server can be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        self._children.add(child)
        return ForkServer(set_name, child, ours)

    async def _another(self, set_name: str, base: ForkServer) -> ForkServer:
        wanted = ForkRequest(name=f"fork server {set_name}", launcher_pid=os.getpid(), preload_set=set_name)
        child, link = await self._fork(
            base, wanted, self._log_path(set_name), 0, lambda child, status: self._on_end(set_name, child, status)
        )
        self._children.add(child)
        return ForkServer(set_name, child, link)

    def _log_path(self, set_name: str) -> Path:
        return self._folder / f"fork-server.{set_name}.log"

    def _on_end(self, set_name: str, child: Child, status: int) -> None:
        self._children.discard(child)
        task = self._tasks.get(set_name)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            server = task.result()
            if server.child is child:
                _end(server)
                self._forget(set_name, f"process {child.pid} ended with status {status}: {_last_line(child.log_path)}")

    # -- forking

    async def _fork(
        self, server: ForkServer, wanted: ForkRequest, log_path: Path, attempt: int, on_exit: OnExit
    ) -> tuple[Child, socket.socket]:
        """The new process and the link to it. Raises LaunchError: there is none, and none will come later. OSError if
        the log cannot be written."""
        with log_path.open("wb") as log:
            ours, theirs = _pair()
            self._num_forks += 1
            try:
                with theirs:
                    socket.send_fds(server.link, [pack(wanted)], [theirs.fileno(), log.fileno()])
                reply = await _receive(ours, FORK_S, f"the fork server {server.preload_set}")
                if reply.problem:
                    raise LaunchError(reply.problem)
                child = _adopt(wanted.name, attempt, reply.pid, log_path, on_exit)
                with contextlib.suppress(OSError):  # it has ended already, which its pidfd reports
                    ours.send(GO)
            except BaseException as error:
                ours.close()
                if isinstance(error, NoAnswer):
                    _end(server)
                    self._forget(server.preload_set, str(error))
                if isinstance(error, OSError):
                    raise LaunchError(f"the fork server {server.preload_set} cannot be reached: {error}") from error
                raise
            finally:
                self._num_forks -= 1
        return child, ours


class NoAnswer(LaunchError):
    """A fork server hangs or sends invalid data."""


def _end(server: ForkServer) -> None:
    server.link.close()
    server.child.kill()


async def _receive(link: socket.socket, timeout_s: float, who: str) -> ForkReply:
    try:
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(link, MAX_BYTES)
    except TimeoutError:
        raise NoAnswer(f"{who} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise LaunchError(f"{who} cannot be read: {error}") from error
    if not data:
        raise LaunchError(f"{who} ended")
    try:
        return unpack_reply(data)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"{who} sent invalid data: {error}") from error


def _pair() -> tuple[socket.socket, socket.socket]:
    """Our end, which does not block, and theirs."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise LaunchError(f"no socket can be made: {error.strerror}") from error
    ours.setblocking(False)
    return ours, theirs


def _adopt(name: str, attempt: int, pid: int, log_path: Path, on_exit: OnExit) -> Child:
    try:
        return Child(name, attempt, log_path, Adopted(pid), on_exit)
    except OSError as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # orphans are reaped by the agent
        raise LaunchError(f"{name} cannot be watched: {error.strerror}") from error


def _last_line(path: Path) -> str:
    tail = read_tail(path)
    return tail[-1] if tail else "it wrote nothing"
