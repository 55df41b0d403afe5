"""Where a process is, found out from outside: it need not answer, its loop may hang, the interpreter lock may be held.

By SIGQUIT, upon which faulthandler writes the stacks into the log (worker.py), in C and without the interpreter; or by
py-spy, where it is installed and the kernel lets it look (it needs ptrace: root, or kernel.yama.ptrace_scope = 0).
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from ...core.errors import ConfigError, LaunchError
from ..contracts import StackReply
from .child import Child

WRITE_S = 5.0
QUIET_S = 0.3
"""The stacks are written when the log has not grown for so long."""
LOOK_S = 0.05
SPY_S = 20.0
MAX_TEXT = 512 * 1024


async def written_stacks(child: Child) -> StackReply:
    """By the signal. Raises LaunchError for a process that is stopped, has just begun, or wrote nothing."""
    if child.is_stopped:
        raise LaunchError(
            f"{child.name} (process {child.pid}) is stopped (SIGSTOP) and does nothing at all",
            remedy=f"`myxa kill {child.name} --signal CONT` lets it go on",
        )
    if not child.writes_stacks:
        raise LaunchError(f"{child.name} (process {child.pid}) has just been started", remedy="try again in a second")
    before = child.log_path.stat().st_size
    child.ask_for_stacks()
    size, quiet_s, waited_s = before, 0.0, 0.0
    while waited_s < WRITE_S and (size == before or quiet_s < QUIET_S):
        await asyncio.sleep(LOOK_S)
        waited_s += LOOK_S
        now = child.log_path.stat().st_size
        quiet_s = quiet_s + LOOK_S if now == size else 0.0
        size = now
    text = _stacks_in(child.log_path, before)
    if not text:
        raise LaunchError(
            f"{child.name} (process {child.pid}) wrote no stacks within {WRITE_S:g} s: it hangs in the kernel",
            remedy=f"`cat /proc/{child.pid}/stack` as root tells where",
        )
    return StackReply(name=child.name, pid=child.pid, text=text, how="signal")


def _stacks_in(log: Path, start: int) -> str:
    """What faulthandler wrote; other threads may have logged before it."""
    with log.open("rb") as file:
        file.seek(start)
        text = file.read(MAX_TEXT).decode("utf-8", errors="replace")
    begin = min((at for at in (text.find("Thread 0x"), text.find("Current thread 0x")) if at >= 0), default=-1)
    return text[begin:] if begin >= 0 else ""


async def spied_stacks(child: Child) -> StackReply:
    """By py-spy. Raises ConfigError if it is not installed, LaunchError if it may not look."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        raise ConfigError(
            "py-spy is not installed beside this launcher", remedy="pip install py-spy, or leave --py-spy out"
        )
    command = [program, "dump", "--nonblocking", "--pid", str(child.pid)]
    try:
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=SPY_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"py-spy did not come back within {SPY_S:g} s", remedy="leave --py-spy out") from error
    if done.returncode:
        why = done.stderr.decode("utf-8", errors="replace").strip()[-500:]
        raise LaunchError(f"py-spy cannot look at {child.name}: {why}", remedy="leave --py-spy out")
    text = done.stdout[:MAX_TEXT].decode("utf-8", errors="replace")
    return StackReply(name=child.name, pid=child.pid, text=text, how="py-spy")
