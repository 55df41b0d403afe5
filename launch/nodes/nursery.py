"""The fork servers of one node, as its agent sees them: processes with the imports done, from which actors are forked.

Knows kits (preloads.py), requests and children. Must not know roles or runs. Nobody depends on it: whatever is wrong
with a server is said in the log, and the actor is started plainly. A running actor does not need the server it is of.
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
from ..child_env import SPEC_VARIABLE, server_env
from ..first_failure import read_tail
from .child import Adopted, Child, ExitTold, start_child
from .fork_wire import GO, MAX_BYTES, ForkReply, ForkRequest, pack, unpack_reply
from .preloads import KITS, with_bases

SERVER_MODULE = "myxa.launch.nodes.fork_server"
IMPORT_S = 300.0
"""A server that has not finished its imports by then is killed: a file system hangs."""
FORK_S = 5.0
"""How long a server may take to fork; one that takes longer hangs, and is killed."""
MAX_ENDS = 3
"""Servers of one kit that end or fail by themselves; after so many there is no other."""
END_S = 5.0


@dataclass(frozen=True, slots=True)
class ForkServer:
    """One that has been started; whether it is ready its task says."""

    kit: str
    child: Child
    link: socket.socket


class Nursery:
    """See the module's head. `folder`: for the servers' logs. Belongs to the loop it is used on, in a process that
    adopts orphans."""

    def __init__(self, folder: Path, log: logging.Logger) -> None:
        self._folder = folder
        self._log = log
        self._tasks: dict[str, asyncio.Task[ForkServer]] = {}
        self._begun_s: dict[str, float] = {}
        self._ends: dict[str, int] = {}
        self._children: set[Child] = set()
        self._refused: dict[str, str] = {}
        """Kit -> why its server cannot be forked, now or ever."""
        self._num_births = 0
        self._is_closed = False

    @property
    def pids(self) -> frozenset[int]:
        """Of the servers."""
        return frozenset(child.pid for child in self._children)

    @property
    def is_giving_birth(self) -> bool:
        """Whether there may be children of this process that nobody knows yet."""
        return self._num_births > 0

    def warm(self, kits: Iterable[str]) -> None:
        """Begin to make these servers."""
        for kit in kits:
            with contextlib.suppress(LaunchError):
                self._server(kit)

    async def start(
        self, kit: str, name: str, attempt: int, *, env: Mapping[str, str], log_path: Path, told: ExitTold
    ) -> Child | None:
        """As `start_child`; None: start it without us, there is no process. OSError if the log cannot be written."""
        spec_first = sorted(env.items(), key=lambda item: item[0] != SPEC_VARIABLE)  # the rest may not fit where shown
        wanted = ForkRequest(
            name=name,
            launcher_pid=os.getpid(),
            env=tuple((os.fsencode(key), os.fsencode(value)) for key, value in spec_first),
        )
        for one in with_bases(kit):  # what lacks half of the imports has the other half
            try:
                child, link = await self._birth(await self._ready(one), wanted, log_path, attempt, told)
            except LaunchError as error:
                level = logging.DEBUG if one in self._refused else logging.WARNING  # that was told, of the kit
                self._log.log(level, "%s is not forked with kit %s: %s", name, one, error)
            else:
                link.close()
                return child
        self._log.info("%s is started with an interpreter of its own", name)
        return None

    async def close(self) -> None:
        """End the servers."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        children = tuple(self._children)
        for child in children:
            child.kill()
        await asyncio.gather(*(child.wait(END_S) for child in children))

    # -- servers

    def _server(self, kit: str) -> asyncio.Task[ForkServer]:
        """The kit's server, which may have to be made. Raises LaunchError when there shall be none."""
        if self._is_closed:
            raise LaunchError("this node's fork servers have ended")
        if kit in self._refused:
            raise LaunchError(self._refused[kit])
        if kit not in self._tasks:
            loop = asyncio.get_running_loop()
            self._begun_s[kit] = loop.time()
            self._tasks[kit] = loop.create_task(self._make(kit), name=f"fork server {kit}")
            self._tasks[kit].add_done_callback(lambda task: self._on_made(kit, task))
        return self._tasks[kit]

    async def _ready(self, kit: str) -> ForkServer:
        task = self._server(kit)
        patience_s = KITS[kit].patience_s
        left_s = self._begun_s[kit] + patience_s - asyncio.get_running_loop().time()
        await asyncio.wait({task}, timeout=max(0.0, left_s))
        if not task.done():
            raise LaunchError(f"the fork server with kit {kit} still imports after {patience_s:g} s")
        if task.cancelled():
            raise LaunchError("this node's fork servers have ended")
        return task.result()

    def _on_made(self, kit: str, task: asyncio.Task[ForkServer]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, NoBase):  # nothing is known of this kit
            self._tasks.pop(kit, None)
        else:
            self._forget(kit, str(error))

    def _forget(self, kit: str, why: str) -> None:
        """The kit's server is no more; the next start makes another, but not for ever."""
        if self._is_closed or self._tasks.pop(kit, None) is None:
            return
        if kit in self._refused:
            return
        self._ends[kit] = self._ends.get(kit, 0) + 1
        self._log.warning("fork server with kit %s: %s", kit, why)
        if self._ends[kit] >= MAX_ENDS:
            self._refuse(kit, f"its fork server ended {MAX_ENDS} times")

    def _refuse(self, kit: str, why: str) -> None:
        self._refused[kit] = why
        self._log.warning("actors with kit %s are not forked any more: %s", kit, why)

    async def _make(self, kit: str) -> ForkServer:
        """Raises LaunchError."""
        base = KITS[kit].base
        if base:
            server = await self._another(kit, await self._base(kit, base))
        else:
            server = self._first(kit)
        try:
            reply = await _heard(server.link, IMPORT_S, f"the fork server with kit {kit}")
        except BaseException:
            _end(server)
            raise
        if reply.problem:  # another one would fare no better
            _end(server)
            self._refuse(kit, reply.problem)
            raise LaunchError(reply.problem)
        return server

    async def _base(self, kit: str, base: str) -> ForkServer:
        """The server that the kit's is forked from, however long its imports take. Raises NoBase."""
        try:
            task = self._server(base)
            await asyncio.wait({task}, timeout=IMPORT_S)
            if task.done() and not task.cancelled():
                return task.result()
        except LaunchError as error:
            if base in self._refused:
                self._refuse(kit, self._refused[base])
            raise NoBase(str(error)) from error
        raise NoBase(f"the fork server with kit {base}, of which {kit} is made, is not there")

    def _first(self, kit: str) -> ForkServer:
        ours, theirs = _pair()
        command = (sys.executable, "-m", SERVER_MODULE, str(os.getpid()), str(theirs.fileno()))
        try:
            with theirs:
                child = start_child(
                    f"fork server {kit}",
                    0,
                    command,
                    env=server_env(os.environ),
                    log_path=self._log_path(kit),
                    told=lambda child, status: self._on_end(kit, child, status),
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            raise LaunchError(f"no fork server can be started: {error}") from error
        except BaseException:
            ours.close()
            raise
        self._children.add(child)
        return ForkServer(kit, child, ours)

    async def _another(self, kit: str, base: ForkServer) -> ForkServer:
        """Forked from one that has half of the imports."""
        wanted = ForkRequest(name=f"fork server {kit}", launcher_pid=os.getpid(), kit=kit)
        child, link = await self._birth(
            base, wanted, self._log_path(kit), 0, lambda child, status: self._on_end(kit, child, status)
        )
        self._children.add(child)
        return ForkServer(kit, child, link)

    def _log_path(self, kit: str) -> Path:
        return self._folder / f"fork-server.{kit}.log"

    def _on_end(self, kit: str, child: Child, status: int) -> None:
        self._children.discard(child)
        task = self._tasks.get(kit)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            server = task.result()
            if server.child is child:
                _end(server)
                self._forget(kit, f"process {child.pid} ended with status {status}: {_last_line(child.log_path)}")

    # -- births

    async def _birth(
        self, server: ForkServer, wanted: ForkRequest, log_path: Path, attempt: int, told: ExitTold
    ) -> tuple[Child, socket.socket]:
        """The new process and the link to it. Raises LaunchError: there is none, and none will come to life. OSError if
        the log cannot be written."""
        with log_path.open("wb") as log:
            ours, theirs = _pair()
            self._num_births += 1
            try:
                with theirs:
                    socket.send_fds(server.link, [pack(wanted)], [theirs.fileno(), log.fileno()])
                reply = await _heard(ours, FORK_S, f"the fork server with kit {server.kit}")
                if reply.problem:
                    raise LaunchError(reply.problem)
                child = _adopt(wanted.name, attempt, reply.pid, log_path, told)
                with contextlib.suppress(OSError):  # it has ended already, and is told to have
                    ours.send(GO)
            except BaseException as error:
                ours.close()
                if isinstance(error, NoAnswer):
                    _end(server)
                    self._forget(server.kit, str(error))
                if isinstance(error, OSError):
                    raise LaunchError(f"the fork server with kit {server.kit} cannot be asked: {error}") from error
                raise
            finally:
                self._num_births -= 1
        return child, ours


class NoAnswer(LaunchError):
    """A fork server hangs, or talks nonsense."""


class NoBase(LaunchError):
    """A fork server cannot be made because the one that it would be forked from is not there."""


def _end(server: ForkServer) -> None:
    server.link.close()
    server.child.kill()


async def _heard(link: socket.socket, timeout_s: float, who: str) -> ForkReply:
    """What comes next. Raises LaunchError."""
    try:
        async with asyncio.timeout(timeout_s):
            data = await asyncio.get_running_loop().sock_recv(link, MAX_BYTES)
    except TimeoutError:
        raise NoAnswer(f"{who} did not answer within {timeout_s:g} s") from None
    except OSError as error:
        raise LaunchError(f"{who} cannot be heard: {error}") from error
    if not data:
        raise LaunchError(f"{who} ended")
    try:
        return unpack_reply(data)
    except msgspec.DecodeError as error:
        raise NoAnswer(f"{who} answered with nonsense: {error}") from error


def _pair() -> tuple[socket.socket, socket.socket]:
    """Ours, which does not block, and theirs."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise LaunchError(f"no socket can be made: {error.strerror}") from error
    ours.setblocking(False)
    return ours, theirs


def _adopt(name: str, attempt: int, pid: int, log_path: Path, told: ExitTold) -> Child:
    try:
        return Child(name, attempt, log_path, Adopted(pid), told)
    except OSError as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # reaped as an orphan is
        raise LaunchError(f"{name} cannot be watched: {error.strerror}") from error


def _last_line(path: Path) -> str:
    tail = read_tail(path)
    return tail[-1] if tail else "it wrote nothing"
