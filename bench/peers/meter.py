"""How every side of `calls.py` is measured: the same commands, clocks and loops for all of them.

A client process reads one JSON object per line ({"depth": 64, "seconds": 0.3}) and answers with one per line. Knows
nothing of what is called; imports nothing that is not in Python, for it also runs in the peers' environment.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

WARM_UP_S = 0.05
PAYLOAD: dict[str, Any] = {"number": 7, "name": "rollout/3", "version": 41, "reward": 0.5, "done": False}
"""What a typed call carries there and back, whoever carries it."""


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of whole processes, from the kernel's own clock of each; those that ended count nothing."""
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime((~pid << 3) | 2)
        except OSError:
            continue
    return total


def descendants(root: int) -> list[int]:
    """`root` and all processes below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def p50_us(taken_ns: list[int]) -> float:
    return sorted(taken_ns)[len(taken_ns) // 2] / 1000 if taken_ns else float("nan")


class Result:
    """What one measurement says."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._cpu_s = cpu_s(self._pids)
        self._began = time.perf_counter()

    def line(self, num_calls: int, taken_ns: list[int]) -> str:
        wall_s = time.perf_counter() - self._began
        used_s = cpu_s(self._pids) - self._cpu_s
        return json.dumps(
            {"rate": num_calls / wall_s, "cpu_us": used_s / max(1, num_calls) * 1e6, "p50_us": p50_us(taken_ns)}
        )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


Pids = Callable[[], list[int]]
"""All processes whose CPU counts."""


def blocking_client(once: Callable[[], None], flood: Callable[[int, float], int], pids: Pids) -> None:
    """For clients that block: `once` is one call, `flood(depth, seconds)` keeps `depth` of them in flight."""
    say("ready")
    for text in sys.stdin:
        command = json.loads(text)
        depth, seconds = command["depth"], command["seconds"]
        taken: list[int] = []
        flood(depth, WARM_UP_S)
        result = Result(pids())
        if depth == 1:
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                before = time.perf_counter_ns()
                once()
                taken.append(time.perf_counter_ns() - before)
            num_calls = len(taken)
        else:
            num_calls = flood(depth, seconds)
        say(result.line(num_calls, taken))


async def async_client(
    once: Callable[[], Awaitable[Any]], pids: Pids, bulk: Callable[[], Awaitable[Any]] | None = None
) -> None:
    """For clients on a loop: `depth` tasks, each of which makes one call after the other. `bulk`: one large call; a
    command with "bulk" has two tasks that make nothing else meanwhile."""
    say("ready")
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(text)
        depth, seconds = command["depth"], command["seconds"]
        floods: list[asyncio.Task[None]] = []
        if bulk is not None and command.get("bulk"):
            floods = [asyncio.create_task(_for_ever(bulk)) for _ in range(2)]
        await _flood(once, depth, WARM_UP_S)
        result = Result(pids())
        taken: list[int] = []
        if depth == 1:
            stop = time.perf_counter() + seconds
            while time.perf_counter() < stop:
                before = time.perf_counter_ns()
                await once()
                taken.append(time.perf_counter_ns() - before)
            num_calls = len(taken)
        else:
            num_calls = await _flood(once, depth, seconds)
        for flood in floods:
            flood.cancel()
        if floods:
            await asyncio.wait(floods)
        say(result.line(num_calls, taken))


async def _for_ever(work: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await work()


async def _flood(once: Callable[[], Awaitable[Any]], depth: int, seconds: float) -> int:
    counts = [0] * depth
    is_over: list[bool] = []

    async def caller(place: int) -> None:
        while not is_over:
            await once()
            counts[place] += 1

    timer = asyncio.get_running_loop().call_later(seconds, is_over.append, True)
    await asyncio.gather(*(caller(place) for place in range(depth)))
    timer.cancel()
    return sum(counts)


def as_our_workers() -> None:
    """What `launch/worker.py` sets in processes that are ours."""
    sys.setswitchinterval(0.0005)
    gc.set_threshold(50_000, 10, 10)


def end_with_input() -> None:
    """A server that blocks elsewhere ends when its input is closed."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
