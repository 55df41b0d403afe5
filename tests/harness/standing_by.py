"""The first fork server of a run of the tests: forked from the command that starts the run, with all imports done.

A run's own fork servers import torch, which is half of what a short run computes. A command of the tests has these
modules already (command_server.py), and forks itself before its first line, while it has one thread. The run's nursery
takes that process instead of starting an interpreter; from there on everything is as always. One that is taken and ends
is replaced by one of an interpreter. Starts with interpreters of their own are tested in
tests/launch/test_fork_server.py.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys

import nemesis

from myxa.core.process import die_with_parent
from myxa.launch.nodes import fork_server_pool
from myxa.launch.nodes.fork_server import serve
from myxa.launch.nodes.preloads import LIGHT
from myxa.launch.worker_spec import server_env


def begin() -> None:
    """Fork, and have the fork server pool take it. Its actors fail where the command's environment says (nemesis.py)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        nemesis.arm_by(dict(os.environ))
        stand_by(theirs, launcher)
        os._exit(0)
    theirs.close()
    start_plainly = fork_server_pool.ForkServerPool._first
    ours.setblocking(False)
    free = [(pid, ours)]

    def first(self: fork_server_pool.ForkServerPool, set_name: str) -> fork_server_pool.ForkServer:
        if not free:
            return start_plainly(self, set_name)
        pid, link = free.pop()
        log_path = self._log_path(set_name)
        with log_path.open("wb") as log:
            socket.send_fds(link, [b"log"], [log.fileno()])
        child = fork_server_pool._adopt(
            f"fork server {set_name}", 0, pid, log_path, lambda child, status: self._on_end(set_name, child, status)
        )
        return self._made(set_name, child, link)

    fork_server_pool.ForkServerPool._first = first


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
