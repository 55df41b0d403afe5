"""The fork server of a run of the tests: forked from the command that starts the run, with all imports done.

A run's own fork server imports torch, which is half of what a short run computes. A command of the tests has these
modules already (command_server.py), and forks itself before its first line, while it has one thread. The run's launcher
takes that process instead of starting an interpreter; from there on everything is as always. One that is taken and ends
is replaced by one of an interpreter. Starts with interpreters of their own are tested in
tests/launch/test_fork_server.py.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import socket
import sys
from pathlib import Path
from typing import Any

import nemesis

from myxa.actors.rewards import rewarder
from myxa.algos.rewards.outcome import RewardOutcome
from myxa.core.process import die_with_parent
from myxa.launch.nodes.child import Child
from myxa.launch.nodes.fork_server import LIGHT, ForkServer, serve
from myxa.launch.worker_spec import server_env


def begin() -> None:
    """Fork, and have the launcher take it. Its actors fail where the command's environment says (nemesis.py), and have
    the patience that a file in the command's folder says (run_job.py)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        nemesis.arm_by(dict(os.environ))
        if (patience := Path("patience")).exists():
            be_patient(float(patience.read_text()))
        stand_by(theirs, launcher)
        os._exit(0)
    theirs.close()
    start_plainly = ForkServer._make
    ours.setblocking(False)
    free = [(pid, ours)]

    def make(self: ForkServer) -> tuple[Child, socket.socket]:
        if not free:
            return start_plainly(self)
        pid, link = free.pop()
        with self.log_path.open("wb") as log:
            socket.send_fds(link, [b"log"], [log.fileno()])
        return Child("fork server", 0, self.log_path, pid, self.on_end), link

    ForkServer._make = make


def be_patient(seconds: float) -> None:
    """Rewards that need no process of their own take so long, and are not all the same."""

    async def slowly(reward: Any, answers: Any) -> Any:
        await asyncio.sleep(seconds)
        return tuple(RewardOutcome(float(len(answer.text) % 3)) for answer in answers)

    assert rewarder.call_reward, "a name that is gone would slow nothing"
    rewarder.call_reward = slowly


def stand_by(launcher: socket.socket, launcher_pid: int) -> None:
    """Until the launcher gives us a log and takes us, or ends."""
    os.setsid()
    die_with_parent(launcher_pid)
    env = server_env(os.environ)
    os.environ.clear()
    os.environ.update(env)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the command's reader would wait for us
        os.dup2(nothing, number)
    data, descriptors, _, _ = socket.recv_fds(launcher, 16, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return
    for number in (1, 2):
        os.dup2(descriptors[0], number)
    os.close(descriptors[0])
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    serve(launcher, LIGHT)
