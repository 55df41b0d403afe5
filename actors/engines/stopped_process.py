"""Has a process, or one that it has started, been stopped (SIGSTOP)? It answers nothing, and nothing else tells why.

Knows processes; must not know what they are for. A debugger's stop is none: it looks and lets go on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

LOOK_EVERY_S = 0.5
NUM_STOPPED = 4
"""Looks in a row that must find it stopped: whoever goes on sooner has lost nothing. They are counted because an actor
that was stopped together with its server may be the first to go on."""
NUM_LOOKS = 20
"""After so many the processes are listed anew, which costs a look at all of the host."""


async def until_stopped(pid: int) -> int:
    """Wait until it, or one that it has started, has been stopped for a while; returns which."""
    family: list[psutil.Process] = []
    num_seen = num_looks = 0
    while True:
        if num_looks % NUM_LOOKS == 0 or num_seen == NUM_STOPPED:  # a number may have become somebody else's
            family = await asyncio.to_thread(_family, pid)
        stopped = next((one.pid for one in family if _is_stopped(one)), 0)
        if stopped and num_seen == NUM_STOPPED:
            return stopped
        num_seen = num_seen + 1 if stopped else 0
        num_looks += 1
        await asyncio.sleep(LOOK_EVERY_S)


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    return []


def _is_stopped(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() == psutil.STATUS_STOPPED
    return False
