"""`myxa` as a process of its own, forked from one that has done its imports (command_server.py).

Where the start itself is looked at, or a shell has a part in it, an interpreter is started:
tests/monitor/test_finished_run.py, docs/control.md's examples, tests/launch/test_cli.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from myxa.launch.worker_spec import server_env

ROOM = 1024
COMMANDS, MEGATRON = "commands", "megatron"
"""Servers: of what `myxa` imports; of Megatron too, for gangs of its ranks."""
SERVER = Path(__file__).with_name("command_server.py")
FORK_S = 150.0
"""Time for the server's imports, on a machine that does much else, and for the fork."""
FOR_EVER_S = 1e6
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", SERVER.name)
"""Helpers of Python's, and those that commands are forked from, which end with the session. A command that was forked
looks like itself."""
TOLD = 3000
"""Characters of what one said that did not end in time."""


class _Server:
    """One that commands are forked from. Begun when it is first needed."""

    def __init__(self, *modules: str) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._modules = modules
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Unless it runs. Requests that came before are read then. Any thread."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self._begin()

    def _begin(self) -> None:
        env = {**server_env(os.environ), "OPENBLAS_NUM_THREADS": "1"}  # what is forked has one thread
        room = "." * (ROOM - sum(len(module) + 1 for module in self._modules))
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER), str(self._theirs.fileno()), room, *self._modules],
            pass_fds=[self._theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env, cwd="/",
        )  # fmt: skip

    def start(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        if self.process is not None:
            self._ours.shutdown(socket.SHUT_RDWR)
            self.process.wait(FORK_S)
        self._ours.close()
        self._theirs.close()


_servers = {
    COMMANDS: _Server(),
    MEGATRON: _Server(
        "myxa.actors.backends.megatron.backend", "megatron.core.models.gpt.gpt_model",
        "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing.strategies.torch",
        "transformers.models.deepseek_v3.configuration_deepseek_v3", "transformers.models.auto.modeling_auto",
        "torch._dynamo", "torch.distributed.fsdp",
    ),
}  # fmt: skip


_started: set[int] = set()
"""Commands of this process."""


def begin(server: str) -> None:
    """A server, unless it runs. Workers of the suite have theirs in common (workers.py)."""
    _servers[server].begin()


def left_processes() -> set[str]:
    """Children of this process, zombies included, and commands that it had started."""
    families = {pid: [*_process(pid), *processes_below(pid)] for pid in _started}
    _started.intersection_update(pid for pid, family in families.items() if family)
    left: set[str] = set()
    for child in {*psutil.Process().children(recursive=True), *itertools.chain(*families.values())}:
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline()) or child.name()
            if not any(name in line for name in KEPT):
                left.add(f"process {child.pid} ({child.status()}) of {_line(child.ppid())}: {line[:200]}")
    return left


def _line(pid: int) -> str:
    """What a process is, for one that cannot say it: a zombie has no command line any more."""
    with contextlib.suppress(psutil.Error):
        one = psutil.Process(pid)
        return f"{pid} ({one.status()}, {' '.join(one.cmdline())[:80] or one.name()})"
    return f"{pid}"


def close_servers() -> None:
    """At the end of a session. Commands that still run are left alone, and found."""
    for server in _servers.values():
        server.close()


def _process(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


def processes_below(pid: int) -> list[psutil.Process]:
    """Children, theirs too, of a process that may end while we look: then none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


class Command(subprocess.Popen[str]):
    """One that runs, or has run. To its tests it is a child; its parent is the server's keeper of it, which alone can
    wait for it, so that whatever waits is done here anew."""

    def __init__(
        self, words: Sequence[str], folder: Path, *, is_merged: bool = True, has_session: bool = False,
        env: Mapping[str, str] | None = None, log: IO[str] | None = None, has_stand_by: bool = True,
        program: Path | None = None, server: str = COMMANDS, streams: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`is_merged`: what it says of errors comes with the rest of its output, which is in `log`, if there is one.
        `has_stand_by`: a run that it starts gets its first fork server from us (standing_by.py). `program`: to be run
        with these words in place of `myxa`. `streams`: its standard streams, if the caller has them."""
        self.args, self.returncode = list(words), None
        self.stdin, self.stdout, self.stderr = None, None, None
        self._said: dict[int, bytearray] = {}
        if streams:
            out_end = os.dup(streams[1])
        elif log is None:
            out, out_end = os.pipe()
            self.stdout = os.fdopen(out, "r")
        else:
            out_end = os.dup(log.fileno())
        ends = [out_end, out_end]
        if streams:
            ends[1] = os.dup(streams[2])
        elif not is_merged:
            err, ends[1] = os.pipe()
            self.stderr = os.fdopen(err, "r")
        report, report_end = os.pipe()
        self._report = os.fdopen(report, "rb", buffering=0)
        request = {
            "words": self.args, "folder": str(folder), "env": dict(os.environ if env is None else env),
            "has_session": has_session, "has_stand_by": has_stand_by, "program": str(program or ""),
        }  # fmt: skip
        with open(os.devnull) as nothing:
            begin(server)
            _servers[server].start(request, [*(streams[:1] or [nothing.fileno()]), *ends, report_end])
        for end in {*ends, report_end}:
            os.close(end)
        self._told = b""
        self._hear(FORK_S, 1)
        assert self._told, f"no process was made of myxa {' '.join(words)} within {FORK_S:g} s"
        self.pid = int(self._told.split(b"\n")[0])
        _started.add(self.pid)

    def _hear(self, timeout_s: float, num_lines: int) -> None:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            while self._told.count(b"\n") < num_lines:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return
                heard = self._report.read(64)
                assert heard, f"nobody makes, or waits for, the process of myxa {self.args}"
                self._told += heard

    def poll(self) -> int | None:
        """Exit status; None: it runs."""
        if self.returncode is None:
            self._hear(0.0, 2)
            if self._told.count(b"\n") == 2:
                self.returncode = int(self._told.split(b"\n")[1])
                self._report.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            self._hear(FOR_EVER_S if timeout is None else timeout, 2)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def __exit__(self, *_: object) -> None:
        """It does not outlive its block."""
        self.kill()
        super().__exit__(None, None, None)

    def below(self) -> list[psutil.Process]:
        """What it started and what those started, of what runs now."""
        return processes_below(self.pid)

    def family(self) -> list[psutil.Process]:
        """It and all below it; nothing, where it has ended."""
        return [*_process(self.pid), *self.below()]

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Everything that it said (and of errors, if not merged), once it has ended. Raises
        subprocess.TimeoutExpired."""
        assert input is None
        deadline = time.monotonic() + (FOR_EVER_S if timeout is None else timeout)
        streams = [stream for stream in (self.stdout, self.stderr) if stream is not None]
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                if not stream.closed:
                    self._said.setdefault(stream.fileno(), bytearray())
                    selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    error = subprocess.TimeoutExpired(self.args, timeout or 0.0)
                    for said in self._said.values():
                        error.add_note(f"said by then: {bytes(said[-TOLD:]).decode(errors='replace')}")
                    raise error
                for key, _ in ready:
                    heard = os.read(key.fd, 1 << 16)
                    self._said[key.fd] += heard
                    if not heard:
                        selector.unregister(key.fileobj)
        self.wait(max(0.0, deadline - time.monotonic()))
        for stream in streams:
            stream.close()
        said = [bytes(part).decode(errors="replace") for part in self._said.values()]
        return said[0] if said else "", said[1] if len(said) > 1 else ""


def run(
    *words: str, folder: Path, timeout_s: float = 100, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command to its end. Raises subprocess.TimeoutExpired; it is killed then."""
    with Command(words, folder, is_merged=False, env=env) as command:
        out, err = command.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(["myxa", *words], command.wait(), out, err)
