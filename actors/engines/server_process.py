"""A server that an actor started: its own process group, its own log, noticed at once when it ends.

Knows a command, an environment and a log file; must not know SGLang. The guardian between (`server_guardian.py`) sees
to it that nothing is left when this process is killed. `launch/nodes/child.py` does the like for actors; it reaps on
the launcher's own loop and may not be imported from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import EngineError, LaunchError

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL: a server has nothing to lose, and its actor has five seconds to end."""
CLOSE_S = 5.0
"""For the guardian to end; it is killed after that."""
START_S = 60.0
"""For the guardian to start the server's program: an interpreter and a few imports, from a disk that may be slow."""
TAIL_LINES = 12
TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to start."""

    name: str
    """Whom errors name."""
    command: Sequence[str]
    env: Mapping[str, str]
    log_path: Path
    """Appended to; made readable for this user only."""


class ServerProcess:
    """A running server. Built by `start_server`."""

    def __init__(self, what: ServerCommand, guardian: Process, pid: int) -> None:
        self._what = what
        self._guardian = guardian
        self.pid = pid
        """Of the server's first process, also of its group."""
        self._how = ""
        self._reading = asyncio.Lock()

    @property
    def is_alive(self) -> bool:
        """Whether it has not been seen to end."""
        return not self._how and self._guardian.returncode is None

    async def until_ended(self) -> str:
        """Wait for its end; returns how it ended: "exit status 3", "signal SIGKILL"."""
        async with self._reading:
            self._how = self._how or await _how_it_ends(self._guardian, self.pid)
        return self._how

    def last_lines(self, num_lines: int = TAIL_LINES) -> str:
        """The end of its log, indented; empty when it wrote nothing."""
        try:
            with self._what.log_path.open("rb") as log:
                log.seek(max(_size(self._what.log_path) - TAIL_BYTES, 0))
                text = log.read().decode(errors="replace")
        except OSError as err:
            return f"\n    (its log cannot be read: {err.strerror})"
        lines = deque((line for line in text.splitlines() if line.strip()), maxlen=num_lines)
        return "".join(f"\n    {line[:500]}" for line in lines)

    def death(self, how: str, doing: str) -> EngineError:
        """What to raise when it ended on its own."""
        return EngineError(
            f"{self._what.name}: its server (pid {self.pid}) ended {doing} with {how}; the last lines of its log:"
            f"{self.last_lines()}",
            remedy=f"see {self._what.log_path}",
        )

    async def close(self) -> None:
        """SIGTERM, then SIGKILL for the whole group. Never raises; a second call does nothing."""
        stdin = self._guardian.stdin
        assert stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            stdin.write(b"stop\n")
            await stdin.drain()
        try:
            async with asyncio.timeout(GRACE_S + CLOSE_S):
                await self.until_ended()
        except TimeoutError:
            for pid in (self.pid, self._guardian.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            await self.until_ended()
        with contextlib.suppress(ConnectionError, RuntimeError):
            stdin.close()


async def start_server(what: ServerCommand) -> ServerProcess:
    """Start it. Raises LaunchError when the program cannot be started."""
    try:
        what.log_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise LaunchError(f"{what.name}: {what.log_path.parent} cannot be made: {err.strerror}") from err
    command = (sys.executable, "-m", "myxa.actors.engines.server_guardian", str(os.getpid()))
    guardian = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=dict(what.env), start_new_session=True
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    task = {
        "command": list(what.command),
        "env": dict(what.env),
        "log_path": str(what.log_path),
        "grace_s": GRACE_S,
    }
    guardian.stdin.write(json.dumps(task).encode() + b"\n")
    try:
        async with asyncio.timeout(START_S):
            told = _parse(await guardian.stdout.readline())
            if "pid" in told:
                return ServerProcess(what, guardian, int(told["pid"]))
            await guardian.wait()
    except BaseException as err:
        await _let_go(guardian)
        if not isinstance(err, TimeoutError):
            raise
        raise LaunchError(
            f"{what.name}: {what.command[0]} was not started within {START_S:g} s",
            remedy="does the disk answer that the interpreters are on?",
        ) from err
    raise LaunchError(
        f"{what.name}: its server cannot be started: {told.get('failed', 'its guardian ended')}",
        remedy="check engine.python, or the role's `python`, in the run file",
    )


async def _let_go(guardian: Process) -> None:
    """End a guardian nobody has heard of yet; whatever it has started ends with it."""
    assert guardian.stdin is not None
    guardian.stdin.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await guardian.wait()
            return
    with contextlib.suppress(ProcessLookupError):
        guardian.kill()
    await guardian.wait()


async def _how_it_ends(guardian: Process, pid: int) -> str:
    assert guardian.stdout is not None
    told = _parse(await guardian.stdout.readline())
    await guardian.wait()
    if "ended" not in told:
        # The server's first process went with it; as long as others of its group live, the number is nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return "its guardian, which was killed"
    status = int(told["ended"])
    return f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"


def _parse(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        value: Any = json.loads(line)
        if isinstance(value, dict):
            return value  # pyright: ignore[reportUnknownVariableType] -- JSON
    return {}


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
