"""A node's agent: starts the processes of actors, watches them, ends them, reaps orphans.

It decides nothing: the run supervisor on node 0 gives the orders. It has no knowledge of policies or roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ...core.errors import CallError, ConfigError, LaunchError, NoSuchActor, PeerDied
from ...core.process import adopts_orphans
from ...core.refs import with_deadline
from ...core.retry import until_answered
from ...core.timeouts import TIMEOUTS
from ...transport.address import hold_port
from ..actor_spec import ActorSpec, GangRendezvous
from ..contracts import (
    SUPERVISOR,
    AgentContract,
    ChildEnd,
    LogChunk,
    StackReply,
    SupervisorContract,
)
from ..first_failure import RunEnd, read_end
from ..run_dir import RunDir
from ..verbs import LogsArguments
from ..worker_spec import DEFAULT_PROGRAM, ProcessSpec, child_env, worker_command, write_spec
from .child import Child, start_child, written_stacks
from .fork_server import ForkServer, is_forked
from .log_reader import read_logs

PING_S = 1.0
REAP_EVERY_S = 2.0
KeyFor = Callable[[str], Awaitable[str]]

STACKS_S = 0.5
"""How long a process that hangs may take to write its stacks."""
KILL_S = 5.0
"""How long a process may take to vanish after SIGKILL (longer: it hangs in the kernel)."""


class Agent(AgentContract):
    """Of that node. `runtime_dir`: with the rendezvous record. `lost_s`: for a sign of life of node 0. `key_for` makes
    the key of a process and registers it at the registry; None: processes need no key. `base_env`: variables of actors;
    the launcher's own environment overrides them."""

    def __init__(
        self, node: int, runtime_dir: Path, run_dir: RunDir, *, program: str = DEFAULT_PROGRAM,
        lost_s: float = TIMEOUTS.launcher.lost_s, key_for: KeyFor | None = None,
        fork_server: ForkServer | None = None, base_env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.left: asyncio.Future[RunEnd] = asyncio.get_running_loop().create_future()
        """Set once the run is over."""
        self._node = node
        self._lost_s = lost_s
        self._program = program
        self._runtime_dir = runtime_dir
        self._run_dir = run_dir
        self._key_for = key_for
        self._fork_server = fork_server
        self._base_env = base_env or {}
        self._children: dict[str, Child] = {}
        self._starting: dict[str, asyncio.Task[Child]] = {}
        self._meetings: dict[str, tuple[int, socket.socket]] = {}
        """Gang -> attempt, and what holds the port at which its ranks meet."""
        self._is_stopped = False

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(self._children.values())

    async def on_start(self) -> None:
        if not adopts_orphans():  # in a program that hosts us a forked process would not become our child
            return
        self.ctx.spawn(self._reap_orphans(), name="reap orphans")
        if self._fork_server is not None:
            self._fork_server.warm()

    def mind_node_0(self) -> None:
        """From now on this node leaves when node 0 is gone or has dropped it."""
        self.ctx.spawn(self._mind_node_0(), name="mind node 0")

    async def _mind_node_0(self) -> None:
        supervisor = with_deadline(self.ctx.ref(SupervisorContract, SUPERVISOR), self._lost_s)
        heard_s = self.ctx.clock.monotonic()
        while True:
            await asyncio.sleep(PING_S)
            try:
                is_member = await supervisor.ping(self._node)
                heard_s = self.ctx.clock.monotonic()
                if not is_member:
                    await self.leave(LaunchError.exit_code, "node 0 considers this node lost")
                    return
            except CallError as error:
                silent_s = self.ctx.clock.monotonic() - heard_s
                if isinstance(error, (PeerDied, NoSuchActor)) or silent_s > self._lost_s:
                    reason = f"node 0 is gone ({error})"
                    await self.leave(LaunchError.exit_code, reason)
                    return

    async def on_stop(self, why: str) -> None:
        """Nothing may outlive the launcher."""
        self._is_stopped = True
        self._start_no_more()
        for _, holder in self._meetings.values():
            holder.close()
        servers = [self._fork_server.close()] if self._fork_server is not None else []
        await asyncio.gather(self.kill_all(), *servers)
        if adopts_orphans():
            reap_orphans(self._knows)

    async def _reap_orphans(self) -> None:
        while True:
            await asyncio.sleep(REAP_EVERY_S)
            reap_orphans(self._knows)

    def _knows(self, pid: int) -> bool:
        """Whether the process is watched, so that its end will be noticed."""
        is_server = self._fork_server is not None and self._fork_server.pid == pid
        return is_server or any(child.pid == pid for child in self.children)

    async def hold_meeting(self, gang: str, attempt: int, address: str) -> GangRendezvous:
        held = self._meetings.get(gang)
        if held is None or held[0] != attempt:
            if held is not None:
                held[1].close()
            held = self._meetings[gang] = attempt, hold_port(address)
        return GangRendezvous(address=address, port=held[1].getsockname()[1])

    async def start_actor(self, actor: ActorSpec, meeting: GangRendezvous | None = None) -> int:
        name = actor.name
        try:
            child = await self._start(actor, meeting)
        except (ConfigError, LaunchError) as error:
            failure = error
        except (CallError, OSError, ValueError) as error:
            failure = LaunchError(f"{name} was not started: {error}")
        else:
            self.ctx.log.info("%s: attempt %d is process %d", name, actor.attempt, child.pid)
            return child.pid
        if name not in self._children:
            with contextlib.suppress(OSError):  # what prevents a start may prevent its log too
                self._run_dir.log_path(name, actor.attempt).write_text(f"{failure}\n", encoding="utf-8")
        raise failure

    async def _start(self, actor: ActorSpec, meeting: GangRendezvous | None) -> Child:
        """An order to end cancels it. Raises MyxaError; OSError of files; ValueError for an impossible environment."""
        name = actor.name
        if name in self._children:
            raise LaunchError(f"{name} runs already as attempt {self._children[name].attempt}")
        if name in self._starting:
            raise LaunchError(f"{name} is being started already")
        task = self._starting[name] = asyncio.get_running_loop().create_task(self._make_child(actor, meeting))
        if self._is_stopped or self.left.done():
            self._start_no_more()
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
            del self._starting[name]
        if task.cancelled():
            is_leaving = self._is_stopped or self.left.done()
            why = f"{self.ctx.name} leaves and starts no more actors"
            raise LaunchError(why if is_leaving else f"{name} was ended before it started")
        return task.result()

    def _start_no_more(self) -> None:
        for task in self._starting.values():
            task.cancel()

    async def _make_child(self, actor: ActorSpec, meeting: GangRendezvous | None) -> Child:
        name, run_dir = actor.name, self._run_dir
        key = await self._key_for(name) if self._key_for is not None else ""
        spec = ProcessSpec(
            actor=actor, launcher_pid=os.getpid(), run_dir=str(run_dir.path), key=key,
            socket_dir=str(self._runtime_dir), program=self._program,
        )  # fmt: skip
        env = child_env(
            {**self._base_env, **os.environ}, actor,
            spec_path=str(write_spec(spec, self._runtime_dir)), run_id=run_dir.path.name, meeting=meeting,
        )  # fmt: skip
        child, on_exit, log_path = None, self._on_child_end, run_dir.new_log(name, actor.attempt)
        if self._fork_server is not None and is_forked(actor):
            child = await self._fork_server.start(name, actor.attempt, env=env, log_path=log_path, on_exit=on_exit)
        if child is None:  # only the time it takes differs
            command = worker_command(actor)
            child = start_child(name, actor.attempt, command, env=env, log_path=log_path, on_exit=on_exit)
        self._children[name] = child
        return child

    def _on_child_end(self, child: Child, status: int) -> None:
        if self._children.get(child.name) is child:
            del self._children[child.name]
        end = ChildEnd(
            name=child.name, attempt=child.attempt, status=status, node=self._node,
            log_path=str(child.log_path), pid=child.pid, tail=read_end(child.log_path, status),
        )  # fmt: skip
        if not self._is_stopped:
            tell = partial(self.ctx.ref(SupervisorContract, SUPERVISOR).child_ended, end)
            told = until_answered(tell, who=SUPERVISOR, clock=self.ctx.clock, log=self.ctx.log)
            self.ctx.spawn(told, name=f"end of {child.name}")

    async def end_actors(self, names: tuple[str, ...], grace_s: float, is_hung: bool = False) -> None:
        for name in names:
            if name in self._starting:
                self._starting[name].cancel()
        children = [self._children[name] for name in names if name in self._children]
        for child in children:
            if is_hung:
                child.ask_for_stacks()
            elif grace_s > 0:
                child.ask_to_end()
        wait_s = STACKS_S if is_hung else grace_s
        hung = await _still_there(children, wait_s) if wait_s > 0 else children
        for child in hung:
            if grace_s > 0:
                self.ctx.log.warning("%s did not end within %g s and is killed", child.name, grace_s)
            child.kill()
        for child in await _still_there(hung, KILL_S):
            self.ctx.log.error("%s (process %d) survives SIGKILL: it hangs in the kernel", child.name, child.pid)

    async def read_logs(self, request: LogsArguments) -> tuple[LogChunk, ...]:
        # In a thread: it may look through megabytes on a slow disk, and this process serves the run meanwhile.
        return await asyncio.to_thread(read_logs, self._run_dir, self._node, request)

    async def stacks_from_outside(self, name: str) -> StackReply:
        child = self._children.get(name)
        if child is None:
            raise ConfigError(f"{name} has no process on node {self._node}", remedy="see `myxa ps`")
        return await written_stacks(child)

    async def kill_all(self) -> None:
        for child in self.children:
            child.kill()
        await _still_there(self.children, KILL_S)

    async def leave(self, exit_code: int, reason: str) -> None:
        if not self.left.done():
            self.left.set_result(RunEnd(exit_code, reason))
        self._start_no_more()


async def _still_there(children: Sequence[Child], timeout_s: float) -> list[Child]:
    ended = await asyncio.gather(*(child.wait(timeout_s) for child in children))
    return [child for child, has_ended in zip(children, ended, strict=True) if not has_ended]


def reap_orphans(is_known: Callable[[int], bool]) -> None:
    """Reap processes that actors started and that outlived their parents: they have sessions of their own; what
    `subprocess` starts here has ours. `is_known(pid)`: whether the process is watched by its descriptor."""
    try:
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    except OSError:  # this kernel does not list them
        return
    for pid in map(int, pids):
        with contextlib.suppress(OSError):  # it is gone
            if not is_known(pid) and os.getsid(pid) != os.getsid(0):
                os.waitpid(pid, os.WNOHANG)
