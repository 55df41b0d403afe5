"""A node's agent: whatever is in the way of a start fails it, with no process left; and when it leaves by
itself."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.harness.inproc import InprocNetwork
from tests.simulation.simulator import Sim, run

from myxa.core.errors import ConfigError, LaunchError, MyxaError, NotSent
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.contracts import (
    SUPERVISOR,
    AgentContract,
    SupervisorContract,
    agent_name,
)
from myxa.launch.launcher import TWICE_S, _lend
from myxa.launch.nodes.agent import Agent, KeyFor
from myxa.launch.nodes.child import Child, start_child
from myxa.launch.run_dir import RunDir
from myxa.transport.node import Node


def agent_of(folder: Path, node: int = 0, key_for: KeyFor | None = None) -> Agent:
    run_dir = RunDir.join(str(folder / "run"))
    return Agent(node, folder / "runtime", run_dir, key_for=key_for)


def order(**actor: Any) -> ActorSpec:
    return ActorSpec(name="rollout/0", role="rollout", kind="embedded", index=0, node=0, **actor)


@asynccontextmanager
async def agent_in(folder: Path, key_for: KeyFor | None = None) -> AsyncIterator[tuple[Agent, AgentContract]]:
    (folder / "runtime").mkdir()
    node = await Node.attach(name="launcher/0", network=InprocNetwork())
    try:
        agent = agent_of(folder, key_for=key_for)
        ref = await node.start(agent, agent_name(0))
        yield agent, ref
    finally:
        await node.close(grace_s=1)


async def failure_of(start: Awaitable[int]) -> MyxaError:
    with pytest.raises(MyxaError) as raised:
        await start
    return raised.value


async def refused(folder: Path, wanted: ActorSpec, key_for: KeyFor | None = None) -> MyxaError:
    before = {child.pid for child in psutil.Process().children()}
    async with agent_in(folder, key_for) as (agent, ref):
        failure = await failure_of(ref.start_actor(wanted))
        assert agent.children == ()
        assert {child.pid for child in psutil.Process().children()} <= before, "no process is left"
    return failure


async def test_a_program_that_cannot_be_started_is_a_mistake_of_the_run_file(tmp_path: Path):
    failure = await refused(tmp_path, order(python="/no/such/python"))
    assert failure.exit_code == ConfigError.exit_code
    assert "rollout/0 cannot be started: /no/such/python: No such file" in str(failure)
    assert str(failure) in (tmp_path / "run/logs/rollout.0.0.log").read_text()


def raising(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return call


async def test_a_machine_without_room_for_a_process_may_have_it_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "Popen", raising(errno.EAGAIN))
    failure = await refused(tmp_path, order())
    assert failure.exit_code == LaunchError.exit_code
    assert os.strerror(errno.EAGAIN) in str(failure)


async def test_a_process_that_cannot_be_watched_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    def pidfd_open(pid: int) -> int:
        made.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    failure = await refused(tmp_path, order(python=sys.executable))
    assert failure.exit_code == LaunchError.exit_code
    assert "rollout/0 cannot be watched: Too many open files" in str(failure)
    assert len(made) == 1
    assert not psutil.pid_exists(made[0])


async def test_a_loop_that_takes_no_more_descriptors_leaves_no_process_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before, command = len(os.listdir("/proc/self/fd")), ["/bin/sleep", "60"]
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "add_reader", raising(errno.ENOSPC))
        with pytest.raises(LaunchError, match="rollout/0 cannot be watched: No space"):
            start_child("rollout/0", 0, command, env={}, log_path=tmp_path / "log", on_exit=lambda c, s: None)
    assert not [child for child in psutil.Process().children() if "sleep" in child.name()]
    assert len(os.listdir("/proc/self/fd")) <= before, "what an earlier test left may be closed meanwhile"


async def test_a_full_disk_or_a_log_that_cannot_be_opened_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with agent_in(tmp_path) as (agent, ref):
        (tmp_path / "run/logs/rollout.0.0.log").symlink_to(tmp_path / "gone/away")
        failure = await failure_of(ref.start_actor(order()))
        assert failure.exit_code == LaunchError.exit_code, "ENOENT of a log, not of the interpreter"
        monkeypatch.setattr("myxa.launch.nodes.agent.write_spec", raising(errno.ENOSPC))
        monkeypatch.setattr(Path, "write_text", raising(errno.ENOSPC))  # its log cannot be written either
        failure = await failure_of(ref.start_actor(order()))
        assert (failure.exit_code, agent.children) == (LaunchError.exit_code, ())
        assert "rollout/0 was not started: [Errno 28] No space left on device" in str(failure)


async def test_no_key_may_be_there_the_next_time(tmp_path: Path):
    async def key_for(name: str) -> str:
        raise NotSent("the registry is away")

    failure = await refused(tmp_path, order(), key_for)
    assert failure.exit_code == LaunchError.exit_code
    assert "the registry is away" in str(failure)


async def test_one_that_has_that_process_already_says_so(tmp_path: Path):
    async with agent_in(tmp_path) as (agent, ref):
        child = start_child(
            "rollout/0", 4, ["/bin/sleep", "60"], env={}, log_path=tmp_path / "log", on_exit=agent._on_child_end
        )
        agent._children["rollout/0"] = child
        failure = await failure_of(ref.start_actor(order()))
        assert (failure.exit_code, str(failure)) == (3, "rollout/0 runs already as attempt 4")
        assert isinstance(child, Child)
        assert child.status is None, "and goes on"


async def test_one_that_leaves_starts_nobody_any_more(tmp_path: Path):
    is_asked, may_go_on = asyncio.Event(), asyncio.Event()

    async def key_for(name: str) -> str:
        is_asked.set()
        await may_go_on.wait()
        return ""

    async with agent_in(tmp_path, key_for) as (agent, ref):
        starting = asyncio.get_running_loop().create_task(ref.start_actor(order()))
        await is_asked.wait()
        await agent.leave(3, "node 0 considers this node lost")
        await agent.kill_all()
        may_go_on.set()
        failure = await failure_of(starting)
        assert agent.children == ()
        assert "launcher/0 leaves" in str(failure)


# -- when it leaves ----------------------------------------------------------------------------------------------------


class Conductor(SupervisorContract):
    """Counts on a node for so many pings."""

    def __init__(self, num_pings: int) -> None:
        self.num_left = num_pings

    async def ping(self, node: int) -> bool:
        self.num_left -= 1
        return self.num_left >= 0


def minded(tmp_path: Path, conductor: Conductor | None, begins: bool = True) -> tuple[int, str] | None:
    """How the agent of node 1 leaves within a virtual minute; None: it stays."""

    async def scenario(seed: int) -> tuple[int, str] | None:
        async with Sim(seed) as sim:
            if conductor is not None:
                home = sim.nodes["launcher/0"].node
                await sim.spawn("launcher/0", home.start(conductor, SUPERVISOR))
            away = (await sim.node("launcher/1")).node
            agent = agent_of(tmp_path, node=1)
            await sim.spawn("launcher/1", away.start(agent, agent_name(1)))
            if begins:

                async def begin() -> None:
                    agent.mind_node_0()

                await sim.spawn("launcher/1", begin())
            await asyncio.sleep(60)
            if not agent.left.done():
                return None
            return agent.left.result().exit_code, agent.left.result().reason

    return run(scenario, 1)


def test_a_node_leaves_when_node_0_has_dropped_it_or_is_gone_and_else_stays(tmp_path: Path):
    conductor = Conductor(3)
    assert minded(tmp_path, conductor) == (LaunchError.exit_code, "node 0 considers this node lost")
    assert conductor.num_left == -1, "it did not ask again"
    assert minded(tmp_path, Conductor(1000)) is None
    left = minded(tmp_path, None)
    assert left is not None and left[1].startswith("node 0 is gone")
    assert minded(tmp_path, None, begins=False) is None, "it has not joined: node 0 may start later than this node"


@asynccontextmanager
async def lent(
    folder: Path, stop: Callable[[str, int], Awaitable[None]]
) -> AsyncIterator[tuple[Agent, asyncio.Task[Any]]]:
    """An agent whose process is lent to the run, after its first signal."""
    node = await Node.attach(name="launcher/0", network=InprocNetwork())
    try:
        agent = agent_of(folder)
        await node.start(agent, agent_name(0))
        lending = asyncio.get_running_loop().create_task(_lend(agent, stop))
        await asyncio.sleep(0.05)  # its handlers are in place
        os.kill(os.getpid(), 15)
        async with asyncio.timeout(20):
            yield agent, lending
    finally:
        await node.close(grace_s=1)


async def test_the_second_signal_ends_at_once_though_the_first_ones_question_is_not_answered(tmp_path: Path):
    asked, has_ended = asyncio.Event(), asyncio.Event()

    async def stop(reason: str, number: int) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()  # node 0 does not answer
        finally:
            has_ended.set()

    async with lent(tmp_path, stop) as (_, lending):
        await asked.wait()
        await asyncio.sleep(TWICE_S)  # sooner, it would count as the first one sent twice
        os.kill(os.getpid(), 15)
        farewell = await lending
        assert (farewell.exit_code, farewell.reason) == (128 + 15, "ended at once")
        assert has_ended.is_set()


async def test_a_refusal_to_let_a_node_go_is_told_and_the_node_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = asyncio.Event()

    async def stop(reason: str, number: int) -> None:
        asked.set()
        raise ConfigError("trainer/1 is a rank of gang trainer")

    async with lent(tmp_path, stop) as (agent, lending):
        await asked.wait()
        await asyncio.sleep(0.05)
        assert not lending.done()
        await agent.leave(0, "over")
        assert (await lending).reason == "over"
        assert "trainer/1 is a rank" in capsys.readouterr().err


async def test_a_gang_meets_at_a_port_that_is_free_on_the_node_of_its_rank_0(tmp_path: Path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MYXA_PORTS", f"{port}-{min(port + 20, 65535)}")
        async with agent_in(tmp_path) as (_, ref):
            first = await ref.hold_meeting("trainer", 0, "127.0.0.1")
            assert first == await ref.hold_meeting("trainer", 0, "127.0.0.1"), "all ranks get the same"
            assert port < first.port <= port + 20
            second = await ref.hold_meeting("trainer", 1, "127.0.0.1")
            assert second == await ref.hold_meeting("trainer", 1, "127.0.0.1")
            monkeypatch.setenv("MYXA_PORTS", f"{port}-{port}")
            with pytest.raises(LaunchError, match="no port is free"):
                await ref.hold_meeting("trainer", 2, "127.0.0.1")
