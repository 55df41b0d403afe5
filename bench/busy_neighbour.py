"""Calls into a process whose other thread is busy: what the interpreter lock costs, and what the switch interval mends.

    python bench/busy_neighbour.py [--quick] [--rounds 5] [--seconds 1.0] [--seed 0]

A server process hosts one actor on uvloop; beside its loop a thread is idle, multiplies matrices with numpy (which lets
go of the lock), or runs pure Python. A client process keeps 1 or 16 calls in flight. Every round runs all cells in
another order, each in a fresh server; figures are medians over rounds. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop
from answerer import Answerer, AnswererContract

from myxa.transport.node import Node, Rendezvous

WARM_UP = 200
DEPTHS = (1, 16)
INTERVALS_S = (0.005, 0.0005)
READY_S = 30.0


# -- the server


def idle(is_over: threading.Event) -> None:
    is_over.wait()


def busy_with_numpy(is_over: threading.Event) -> None:
    a = np.ones((256, 256), np.float32)
    while not is_over.is_set():
        np.matmul(a, a)


def busy_with_python(is_over: threading.Event) -> None:
    count = 0
    while not is_over.is_set():
        for _ in range(10_000):
            count += 1


NEIGHBOURS: dict[str, Callable[[threading.Event], None]] = {
    "idle": idle,
    "numpy": busy_with_numpy,
    "Python": busy_with_python,
}


async def serve(rdzv: Path, neighbour: str) -> None:
    node = await Node.attach(name="server")
    await node.start(Answerer(), "answerer")
    is_over = threading.Event()
    thread = threading.Thread(target=NEIGHBOURS[neighbour], args=(is_over,))
    thread.start()
    node.rendezvous.save(rdzv)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the client closes it
    is_over.set()
    thread.join()
    await node.close(grace_s=0)


# -- the client


@dataclass(frozen=True)
class Cell:
    """One combination."""

    neighbour: str
    interval_s: float
    depth: int


@dataclass(frozen=True)
class Figures:
    """Of one measurement."""

    p50_us: float
    p99_us: float
    rate: float


async def measure(rdzv: Path, depth: int, seconds: float) -> Figures:
    node = await Node.attach(name="client", rdzv=Rendezvous.load(rdzv))
    ref = node.ref(AnswererContract, "answerer")
    for n in range(WARM_UP // (10 if depth == 1 else 1)):
        await ref.answer(n)
    waits: list[float] = []
    give_up_at = time.perf_counter() + seconds

    async def work() -> None:
        while (began := time.perf_counter()) < give_up_at:
            await ref.answer(1)
            waits.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(depth)))
    took = time.perf_counter() - began
    await node.close(grace_s=0)
    waits.sort()
    return Figures(1e6 * waits[len(waits) // 2], 1e6 * waits[int(0.99 * len(waits))], len(waits) / took)


def run_cell(cell: Cell, seconds: float) -> Figures:
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        rdzv = Path(folder) / "rdzv.json"
        command = [sys.executable, __file__, "--serve", str(rdzv), cell.neighbour, str(cell.interval_s)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
            try:
                give_up_at = time.monotonic() + READY_S
                while not rdzv.exists():
                    if server.poll() is not None or time.monotonic() > give_up_at:
                        raise SystemExit(f"the server of {cell} did not start")
                    time.sleep(0.02)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(measure(rdzv, cell.depth, seconds))
            finally:
                assert server.stdin is not None
                server.stdin.close()
                server.wait(30)


def table(found: dict[Cell, list[Figures]], depth: int) -> str:
    def text(neighbour: str, interval_s: float) -> str:
        figures = found[Cell(neighbour, interval_s, depth)]
        p50, p99, rate = (statistics.median(getattr(f, name) for f in figures) for name in ("p50_us", "p99_us", "rate"))
        return f"{p50:,.0f} / {p99:,.0f} / {rate:,.0f}"

    lines = [
        f"\n**{depth} in flight: p50 us / p99 us / calls per s**\n",
        "| neighbour thread | switch interval 5 ms | 0.5 ms |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {' | '.join(text(name, i) for i in INTERVALS_S)} |" for name in NEIGHBOURS]
    return "\n".join(lines)


def goal(found: dict[Cell, list[Figures]]) -> str:
    """G13: with a busy Python thread in the process the median call takes no more than two switch intervals."""
    lines = ["\n| goal | limit ms | measured ms | |", "|---|---:|---:|---|"]
    for interval_s in INTERVALS_S:
        for depth in DEPTHS:
            p50_ms = statistics.median(f.p50_us for f in found[Cell("Python", interval_s, depth)]) / 1000
            limit_ms = 2000 * interval_s
            verdict = "met" if p50_ms <= limit_ms else f"missed by {p50_ms / limit_ms - 1:.0%}"
            what = f"p50 beside a Python-busy thread, {1000 * interval_s:g} ms, {depth} in flight"
            lines.append(f"| {what} | {limit_ms:g} | {p50_ms:.2f} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=3, metavar=("RDZV", "NEIGHBOUR", "INTERVAL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        rdzv, neighbour, interval = options.serve
        sys.setswitchinterval(float(interval))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(Path(rdzv), neighbour))
        return
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    rng = random.Random(options.seed)
    cells = [Cell(n, i, d) for n in NEIGHBOURS for i in INTERVALS_S for d in DEPTHS]
    found: dict[Cell, list[Figures]] = defaultdict(list)
    for number in range(rounds):
        rng.shuffle(cells)
        for cell in cells:
            found[cell].append(run_cell(cell, seconds))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    print(f"Python {platform.python_version()}, {rounds} rounds of {seconds:g} s, medians")
    for depth in DEPTHS:
        print(table(found, depth))
    print(goal(found))


if __name__ == "__main__":
    main()
