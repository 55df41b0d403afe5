"""How late a host's event loop is while a node attached to it answers 10,000 calls a second.

    python bench/host_lag.py [--quick] [--rounds 5] [--seconds 3] [--rate 10000] [--burst 100] [--seed 0]

The host sleeps for a millisecond again and again and notes by how much it woke too late. A client process calls an
actor on that loop at the given rate, `burst` calls at a time. Beside it: the same loop with nobody calling, and with a
time budget per turn that bounds nothing. Each round runs all three in another order; figures are medians over rounds,
the goal is judged by the difference within a round. "A turn": processor time of the longest turn of the loop during a
step of the host, which a crowded machine's time slices do not lengthen. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import platform
import random
import selectors
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from answerer import Answerer, AnswererContract

from myxa.transport import zeromq
from myxa.transport.node import Node, Rendezvous

TICK_S = 0.001
QUIET, ATTACHED, UNBOUNDED = "nobody calls", f"attached, {1000 * zeromq.TURN_S:g} ms a turn", "attached, no bound"
BUDGETS_S = {QUIET: zeromq.TURN_S, ATTACHED: zeromq.TURN_S, UNBOUNDED: 60.0}
LIMIT_MS = 1.0


@dataclass(frozen=True)
class Figures:
    """Of one measurement: lateness in milliseconds, and calls answered a second."""

    p50_ms: float
    p99_ms: float
    worst_ms: float
    turn_p99_ms: float
    rate: float


async def drive(rdzv: Path, rate: float, burst: int) -> None:
    """The client: open loop, so that a slow host is not spared."""
    node = await Node.attach(name="client", rdzv=Rendezvous.load(rdzv))
    ref = node.ref(AnswererContract, "answerer")
    await ref.answer(0)
    print("calling", flush=True)
    is_over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    under_way: set[asyncio.Future[int]] = set()
    due = time.perf_counter()
    while not is_over.done():
        under_way = {future for future in under_way if not future.done()}
        if len(under_way) < 8 * burst:
            under_way |= {asyncio.ensure_future(ref.answer(n)) for n in range(burst)}
        due = max(due + burst / rate, time.perf_counter() - 0.1)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    await asyncio.gather(*under_way, return_exceptions=True)
    await node.close(grace_s=0)


class TimedSelector(selectors.EpollSelector):
    """Knows how long the loop's turns are: what it does between two looks at its descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._since_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        events = super().select(timeout)
        self._since_s = time.thread_time()
        return events


async def lateness(seconds: float, selector: TimedSelector) -> tuple[list[float], list[float]]:
    """Of the host's own timer, and the longest turn before it fired; milliseconds, sorted."""
    late: list[float] = []
    turns: list[float] = []
    give_up_at = time.perf_counter() + seconds
    while (began := time.perf_counter()) < give_up_at:
        await asyncio.sleep(TICK_S)
        late.append(1000 * (time.perf_counter() - began - TICK_S))
        turns.append(1000 * selector.longest_s)
        selector.longest_s = 0.0
    return sorted(late), sorted(turns)


async def measure(mode: str, seconds: float, rate: float, burst: int, selector: TimedSelector) -> Figures:
    zeromq.TURN_S = BUDGETS_S[mode]
    node = await Node.attach(name="host")
    actor = Answerer()
    await node.start(actor, "answerer")
    with tempfile.TemporaryDirectory(prefix="b-") as folder:
        rdzv = Path(folder) / "rdzv.json"
        node.rendezvous.save(rdzv)
        command = [sys.executable, str(Path(__file__).resolve()), "--drive", str(rdzv), str(rate), str(burst)]
        client = None
        if mode != QUIET:
            client = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert client.stdout is not None
            await asyncio.wait_for(client.stdout.readline(), 30)
            await asyncio.sleep(0.2)
        num_before, began = actor.num_answered, time.perf_counter()
        late, turns = await lateness(seconds, selector)
        num = (actor.num_answered - num_before) / (time.perf_counter() - began)
        if client is not None:
            assert client.stdin is not None
            client.stdin.close()
            await asyncio.wait_for(client.wait(), 30)
    await node.close(grace_s=0)
    last = int(0.99 * len(late))
    return Figures(late[len(late) // 2], late[last], late[-1], turns[last], num)


def report(found: dict[str, list[Figures]]) -> str:
    def median(mode: str, name: str) -> float:
        return statistics.median(getattr(f, name) for f in found[mode])

    lines = [
        "| host loop | late p50 ms | p99 ms | worst ms | longest turn p99 ms | calls answered per s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {mode} | {median(mode, 'p50_ms'):.2f} | {median(mode, 'p99_ms'):.2f} | {median(mode, 'worst_ms'):.1f} "
        f"| {median(mode, 'turn_p99_ms'):.2f} | {median(mode, 'rate'):,.0f} |"
        for mode in (QUIET, ATTACHED, UNBOUNDED)
    ]
    lines += [
        "",
        "| goal: at most 1 ms over the quiet loop at the 99th percentile | measured ms (each round) | |",
        "|---|---:|---|",
    ]
    for what, name in (("lateness", "p99_ms"), ("longest turn", "turn_p99_ms")):
        pairs = zip(found[ATTACHED], found[QUIET], strict=True)
        more = [getattr(ours, name) - getattr(quiet, name) for ours, quiet in pairs]
        excess = statistics.median(more)
        verdict = "met" if excess <= LIMIT_MS else f"missed by {excess - LIMIT_MS:.2f} ms"
        lines.append(f"| {what} | {excess:.2f} ({', '.join(f'{value:.2f}' for value in more)}) | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round: does it run?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=10_000)
    parser.add_argument("--burst", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", nargs=3, metavar=("RDZV", "RATE", "BURST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        rdzv, rate, burst = options.drive
        asyncio.run(drive(Path(rdzv), float(rate), int(burst)))
        return
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    rng = random.Random(options.seed)
    modes = [QUIET, ATTACHED, UNBOUNDED]
    found: dict[str, list[Figures]] = defaultdict(list)
    for number in range(rounds):
        rng.shuffle(modes)
        for mode in modes:
            selector = TimedSelector()
            with asyncio.Runner(loop_factory=functools.partial(asyncio.SelectorEventLoop, selector)) as runner:
                found[mode].append(runner.run(measure(mode, seconds, options.rate, options.burst, selector)))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    print(f"Python {platform.python_version()}, {rounds} rounds of {seconds:g} s, bursts of {options.burst} calls\n")
    print(report(found))


if __name__ == "__main__":
    main()
