"""The pool of one node's fork servers (fork_server.py), one per preload set, from which its agent forks actors.

Forking only saves time: if anything is wrong with a server, the pool logs it once, makes no other for that set, and the
agent starts actors with interpreters of their own. A running actor does not need the server that it was forked from.
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
from functools import partial
from pathlib import Path

import msgspec

from ...core.errors import LaunchError, MyxaError
from ..first_failure import read_tail
from ..worker_spec import SPEC_VARIABLE, server_env
from .child import Adopted, Child, OnExit, start_child
from .fork_server import GO, MAX_BYTES, ForkReply, ForkRequest, pack, unpack_reply
from .preloads import PRELOAD_SETS

SERVER_MODULE = "myxa.launch.nodes.fork_server"
IMPORT_S = 45.0
"""How long starts wait for a server's imports, those of its base included; a slower one is killed. An order to start an
actor has a deadline of 60 s."""
FORK_S = 5.0
"""A server that takes longer to fork hangs, and is killed."""
END_S = 5.0


@dataclass(frozen=True, slots=True)
class ForkServer:
    """A started server; its task in the pool ends when it is ready."""

    preload_set: str
    child: Child
    link: socket.socket

    def end(self) -> None:
        self.link.close()
        self.child.kill()


class ForkServerPool:
    """`folder`: for the servers' logs. The pool belongs to one event loop, in a process that adopts orphans."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        self._folder = folder
        self._log = log
        self._servers: dict[str, asyncio.Task[ForkServer | None]] = {}
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
        for task in self._servers.values():
            task.cancel()
        await asyncio.gather(*self._servers.values(), return_exceptions=True)
        children = tuple(self._children)
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait(END_S) for child in children))

    # -- servers

    def _server(self, set_name: str) -> asyncio.Task[ForkServer | None]:
        """The set's server, which is made when it is first wanted, and once; None: it is refused."""
        if set_name not in self._servers:
            task = asyncio.get_running_loop().create_task(self._make(set_name), name=f"fork server {set_name}")
            self._servers[set_name] = task
        return self._servers[set_name]

    async def _ready(self, set_name: str) -> ForkServer:
        """Raises LaunchError if actors cannot be forked from it."""
        if not self._is_closed:
            await asyncio.wait({task := self._server(set_name)})
            server = None if task.cancelled() else task.result()
            if server is not None and set_name not in self._refused:
                return server
        raise LaunchError(self._refused.get(set_name, "this node's fork servers have ended"))

    def _refuse(self, set_name: str, why: str) -> None:
        if not self._is_closed and set_name not in self._refused:
            self._refused[set_name] = why
            self._log.warning("actors with preload set %s are not forked any more: %s", set_name, why)

    async def _make(self, set_name: str) -> ForkServer | None:
        base = PRELOAD_SETS[set_name].base
        try:
            async with asyncio.timeout(IMPORT_S):
                server = await self._another(set_name, await self._ready(base)) if base else self._first(set_name)
                try:
                    reply = await _receive(server.link, f"the fork server {set_name}")
                    if reply.problem:
                        raise LaunchError(reply.problem)
                except BaseException:
                    server.end()
                    raise
        except TimeoutError:
            return self._refuse(set_name, f"its fork server still imports after {IMPORT_S:g} s")
        except MyxaError as error:
            return self._refuse(set_name, str(error))
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
                    on_exit=partial(self._on_end, set_name),
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise LaunchError(f"no fork server can be started: {error}") from error
            raise
        return self._made(set_name, child, ours)

    async def _another(self, set_name: str, base: ForkServer) -> ForkServer:
        wanted = ForkRequest(name=f"fork server {set_name}", launcher_pid=os.getpid(), preload_set=set_name)
        on_exit = partial(self._on_end, set_name)
        return self._made(set_name, *await self._fork(base, wanted, self._log_path(set_name), 0, on_exit))

    def _made(self, set_name: str, child: Child, link: socket.socket) -> ForkServer:
        self._children.add(child)
        return ForkServer(set_name, child, link)

    def _log_path(self, set_name: str) -> Path:
        return self._folder / f"fork-server.{set_name}.log"

    def _on_end(self, set_name: str, child: Child, status: int) -> None:
        self._children.discard(child)
        task = self._servers[set_name]
        if task.done() and not task.cancelled() and (server := task.result()) is not None:  # else `_make` says why
            server.link.close()
            last = next(iter(read_tail(child.log_path)[-1:]), "it wrote nothing")
            self._refuse(set_name, f"its fork server (process {child.pid}) ended with status {status}: {last}")

    # -- forking

    async def _fork(
        self, server: ForkServer, wanted: ForkRequest, log_path: Path, attempt: int, on_exit: OnExit
    ) -> tuple[Child, socket.socket]:
        """The new process and the link to it. Raises LaunchError: there is none, and none will come later. OSError if
        the log cannot be written."""
        who = f"the fork server {server.preload_set}"
        with log_path.open("wb") as log:
            ours, theirs = _pair()
            self._num_forks += 1
            try:
                with theirs:
                    socket.send_fds(server.link, [pack(wanted)], [theirs.fileno(), log.fileno()])
                try:
                    async with asyncio.timeout(FORK_S):
                        reply = await _receive(ours, who)
                except TimeoutError:
                    self._refuse(server.preload_set, why := f"{who} did not answer within {FORK_S:g} s")
                    server.end()
                    raise LaunchError(why) from None
                if reply.problem:
                    raise LaunchError(reply.problem)
                child = _adopt(wanted.name, attempt, reply.pid, log_path, on_exit)
                with contextlib.suppress(OSError):  # it has ended already, which its pidfd reports
                    ours.send(GO)
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):
                    raise LaunchError(f"{who} cannot be reached: {error}") from error
                raise
            finally:
                self._num_forks -= 1
        return child, ours


async def _receive(link: socket.socket, who: str) -> ForkReply:
    """Raises LaunchError if the other side ended or cannot be understood."""
    try:
        data = await asyncio.get_running_loop().sock_recv(link, MAX_BYTES)
    except OSError as error:
        raise LaunchError(f"{who} cannot be read: {error}") from error
    if not data:
        raise LaunchError(f"{who} ended")
    try:
        return unpack_reply(data)
    except msgspec.DecodeError as error:
        raise LaunchError(f"{who} sent invalid data: {error}") from error


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
