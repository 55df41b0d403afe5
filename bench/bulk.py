"""Large arrays between two processes of one host: how fast, and what a small call feels meanwhile.

    python bench/bulk.py [--quick] [--rounds N] [--gib]

Every number stands beside a memcpy (numpy.copyto, warm, one thread) of the same size that was measured just before it,
because the machine's other users come and go; ratios are medians over rounds in shuffled order. CPU is user + system
of both processes against the memcpy's.

    ipc   chunks over ZeroMQ
    tcp   the same with CURVE
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myxa.core.actor import Actor
from myxa.core.handlers import call
from myxa.core.refs import with_deadline
from myxa.transport.node import JobKey, Node, Rendezvous, keep_freed_memory

MIB = 1 << 20
WAYS = ("ipc", "tcp")
BULK_S = 3.0
"""How long bulk goes on while small calls are measured."""


class SinkContract(Actor):
    """The other process, as it is called."""

    @call(deadline=120)
    async def own(self, data: npt.NDArray[np.uint8]) -> int:
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def ping(self) -> float:
        """CPU seconds of this process."""
        raise NotImplementedError


class Sink(SinkContract):
    """Takes arrays and looks at them."""

    async def own(self, data: npt.NDArray[np.uint8]) -> int:
        return int(data[0]) + int(data[-1])

    async def ping(self) -> float:
        return time.process_time()


# -- two processes


async def serve(rdzv: str, name: str, key: str) -> None:
    options: dict[str, Any] = {"key": JobKey.load(Path(key)), "node_rank": 1} if key else {}
    node = await Node.attach(name=name, rdzv=Rendezvous.load(Path(rdzv)), **options)
    await node.start(Sink(), name)
    await node.failed


@contextlib.asynccontextmanager
async def pair(kind: str) -> AsyncIterator[tuple[Node, SinkContract]]:
    """This process and another one."""
    with tempfile.TemporaryDirectory() as folder:
        key = JobKey.generate() if kind == "tcp" else None
        node = await Node.attach(name="launcher/0", key=key, tcp="127.0.0.1:0" if key else "")
        rdzv, key_path = Path(folder) / "rdzv.json", Path(folder) / "job.key"
        node.rendezvous.save(rdzv)
        if key is not None:
            key.save(key_path)
        args = [sys.executable, __file__, "--serve", str(rdzv), "sink", str(key_path) if key else ""]
        child = await asyncio.create_subprocess_exec(*args, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            await node.wait_for("sink", timeout_s=30)
            yield node, with_deadline(node.ref(SinkContract, "sink"), 120)
        finally:
            child.kill()
            await child.wait()
            await node.close(grace_s=0.5)


# -- measuring


async def timed(work: Callable[[], Awaitable[Any]], sink: SinkContract) -> tuple[float, float]:
    """Wall and CPU seconds, of both processes."""
    theirs, ours, began = await sink.ping(), time.process_time(), time.perf_counter()
    await work()
    wall = time.perf_counter() - began
    return wall, time.process_time() - ours + await sink.ping() - theirs


def memcpy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8], repeats: int) -> tuple[float, float]:
    ours, began = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        np.copyto(target, source)
    return time.perf_counter() - began, time.process_time() - ours


class Way:
    """One way for one size."""

    def __init__(self, way: str, sink: SinkContract, num_bytes: int) -> None:
        self.way, self.sink, self.num_bytes = way, sink, num_bytes
        self.repeats = max(1, min(32, 64 * MIB // num_bytes))
        self.speeds: list[float] = []
        self.ratios: list[float] = []
        self.cpu_ratios: list[float] = []

    async def round(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
        async def work() -> None:
            for _ in range(self.repeats):
                await self.sink.own(source)

        await self.sink.own(source)  # warm: connections, memory
        copied_s, copied_cpu_s = memcpy(target, source, self.repeats)
        wall_s, used_s = await timed(work, self.sink)
        self.speeds.append(self.num_bytes * self.repeats / wall_s / 1e9)
        self.ratios.append(copied_s / wall_s)
        self.cpu_ratios.append(used_s / copied_cpu_s)

    def row(self) -> str:
        cpu = f"{statistics.median(self.cpu_ratios):.1f}"
        return (
            f"| {self.num_bytes // MIB} MiB | {self.way} | {statistics.median(self.speeds):.2f} "
            f"({max(self.speeds):.2f}) | {self.ratio:.2f} ({max(self.ratios):.2f}) | {cpu} |"
        )

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


async def hand_over(sizes: list[int], rounds: int) -> dict[tuple[int, str], Way]:
    """All ways and sizes, shuffled anew in every round."""
    async with pair("ipc") as (_, near), pair("tcp") as (_, far):
        sinks = {"ipc": near, "tcp": far}
        ways = {(size, way): Way(way, sinks[way], size) for size in sizes for way in WAYS}
        for size in sizes:
            source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
            mine = [way for (of, _), way in ways.items() if of == size]
            for _ in range(rounds):
                random.shuffle(mine)
                for way in mine:
                    await way.round(source, target)
        return ways


async def pings(sink: SinkContract, seconds: float, pause_s: float) -> list[float]:
    """Round trips of small calls in ms."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        await sink.ping()
        found.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(pause_s)
    return found


async def under_load(kind: str, seconds: float) -> tuple[list[float], list[float], float]:
    """Round trips when idle and while 64 MiB arrays follow one another to the same process; GB/s meanwhile."""
    async with pair(kind) as (_, sink):
        data = np.ones(64 * MIB, np.uint8)
        await sink.own(data)
        await pings(sink, 0.3, 0.001)
        idle = await pings(sink, seconds, 0.001)
        num_sent = 0

        async def flood() -> None:
            nonlocal num_sent
            while True:
                await sink.own(data)
                num_sent += 1

        floods = [asyncio.ensure_future(flood()) for _ in range(2)]
        try:
            busy = await pings(sink, seconds, 0.001)
        finally:
            for task in floods:
                task.cancel()
            await asyncio.wait(floods)
        return idle, busy, num_sent * data.nbytes / seconds / 1e9


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def verdict(name: str, value: float, limit: float) -> str:
    return f"| {name} | <= {limit:g} | {value:.2f} | {'met' if value <= limit else 'missed'} |"


async def main(rounds: int, sizes: list[int], seconds: float) -> None:
    ways = await hand_over(sizes, rounds)
    print(f"\n{rounds} rounds, medians (best)\n")
    print("| size | way | GB/s | x memcpy | CPU x memcpy |\n|---:|---|---:|---:|---:|")
    for way in ways.values():
        print(way.row())
    goals: list[str] = []
    print("\nSmall calls while 64 MiB arrays saturate the same process\n")
    print(
        "| bulk by | GB/s | idle p50 ms | idle p99 | busy p50 | busy p99 | busy max |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    for way in WAYS:
        idle, busy, speed = await under_load(way, seconds)
        cells = (
            percentile(idle, 0.5),
            percentile(idle, 0.99),
            percentile(busy, 0.5),
            percentile(busy, 0.99),
            max(busy),
        )
        print(f"| {way} | {speed:.2f} | " + " | ".join(f"{c:.3f}" for c in cells) + " |")
        goals.append(verdict(f"small call p50 beside {way}, x idle", cells[2] / cells[0], 1.5))
        goals.append(verdict(f"small call p99 beside {way}, ms", cells[3], 5.0))
    print("\n| goal | limit | measured | |\n|---|---:|---:|---|")
    print("\n".join(goals))


if __name__ == "__main__":
    keep_freed_memory()  # as our workers do (`launch/worker.py`)
    if sys.argv[1:2] == ["--serve"]:
        asyncio.run(serve(*sys.argv[2:5]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, 1 and 64 MiB, under a minute")
    parser.add_argument("--rounds", type=int, default=0)
    chosen = parser.parse_args()
    asyncio.run(
        main(
            chosen.rounds or (3 if chosen.quick else 9),
            [MIB, 64 * MIB],
            1.0 if chosen.quick else BULK_S,
        )
    )
