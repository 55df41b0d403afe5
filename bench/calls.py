"""What a call costs: our transport, our typed actor call, and other actor systems, each beside raw pyzmq.

    python bench/calls.py [--quick] [--rounds 7] [--seconds 0.4] [--peers ray,xoscar] [--seed 0] [--bulk]

Every process is measured by the kernel's own clock of it, client and server (and daemons) together. Each round runs all
modes in another order, and before each of them its reference at the same depth: raw blocking pyzmq (DEALER, ROUTER,
ipc, 64 bytes) for ours, our typed call for the peers. "A bare asyncio call" (`peers/bare_call.py`) is the least that a
call does in Python, with nothing of an actor system. Figures are medians over rounds; ratios are taken pair by pair,
in brackets their median, smallest and largest. Peers are installed into `.bench-venv`. Prints markdown.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from environment import python_with  # pyright: ignore[reportMissingImports]
from processes import Child, Figures, Herd  # pyright: ignore[reportMissingImports]

DEPTHS = (1, 64, 1024)
RAW, BARE, TRANSPORT, CALL = "raw pyzmq", "a bare asyncio call", "our transport", "our typed call"
BESIDE_BULK = "our typed call beside bulk"
PEERS = {
    "ray": (("Ray, ray.get of a list", "ray_actor.py", "get"), ("Ray, async actor, awaited", "ray_actor.py", "await")),
    "xoscar": (("xoscar", "xoscar_actor.py", ""),),
}


@dataclass(frozen=True)
class Goal:
    """A promise about a ratio."""

    text: str
    mode: str
    depth: int
    figure: str
    limit: float
    is_at_most: bool

    def verdict(self, ratio: float) -> str:
        is_met = ratio <= self.limit if self.is_at_most else ratio >= self.limit
        sign = "<=" if self.is_at_most else ">="
        off = abs(ratio / self.limit - 1)
        return f"| {self.text} | {sign} {self.limit:g} | {ratio:.2f} | {'met' if is_met else f'missed by {off:.0%}'} |"


BULK_GOAL = Goal("typed call p50 while bulk saturates the same process / idle", BESIDE_BULK, 1, "p50_us", 1.5, True)
OWN_GOALS = (
    Goal("transport round trip p50 / raw", TRANSPORT, 1, "p50_us", 1.5, True),
    Goal("typed call p50 / raw", CALL, 1, "p50_us", 3, True),
)
PEER_GOALS = {
    "ray": (
        Goal("Ray p50 / ours", "ray", 1, "p50_us", 4, False),
        Goal("Ray's CPU a call / ours, 64 in flight", "ray", 64, "cpu_us", 5, False),
    ),
    "xoscar": (
        Goal("xoscar p50 / ours", "xoscar", 1, "p50_us", 3, False),
        Goal("our rate / xoscar's, 64 in flight", "xoscar", 64, "rate", 20, False),
    ),
}


class Book:
    """All measurements: (mode, depth) -> its figures, each with those of the reference just before."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, int], list[tuple[Figures, Figures]]] = defaultdict(list)

    def note(self, mode: str, depth: int, figures: Figures, reference: Figures) -> None:
        self._pairs[mode, depth].append((figures, reference))

    def median(self, mode: str, depth: int, figure: str) -> float:
        return statistics.median(getattr(own, figure) for own, _ in self._pairs[mode, depth])

    def reference(self, mode: str, depth: int, figure: str) -> float:
        return statistics.median(getattr(other, figure) for _, other in self._pairs[mode, depth])

    def ratios(self, mode: str, depth: int, figure: str) -> list[float]:
        return [getattr(own, figure) / getattr(other, figure) for own, other in self._pairs[mode, depth]]

    def cell(self, mode: str, depth: int, figure: str) -> str:
        """The figure and its ratio to the reference."""
        ratios = self.ratios(mode, depth, figure)
        value = self.median(mode, depth, figure)
        text = f"{value:,.0f}" if figure == "rate" else f"{value:.1f}"
        return f"{text} ({statistics.median(ratios):.2f}; {min(ratios):.2f}-{max(ratios):.2f})"


def play(
    book: Book, modes: dict[str, Child], reference: Child, rounds: int, seconds: float, rng: random.Random
) -> None:
    """All modes at all depths, `rounds` times, each right after the reference."""
    for _ in range(rounds):
        jobs = [(mode, depth) for mode in modes for depth in DEPTHS]
        rng.shuffle(jobs)
        for mode, depth in jobs:
            before = reference.measure(depth=depth, seconds=seconds)
            book.note(mode, depth, modes[mode].measure(depth=depth, seconds=seconds), before)


def start_raw(herd: Herd, folder: str) -> Child:
    endpoint = f"ipc://{folder}/raw"
    server = herd.start(sys.executable, "raw.py", "server", endpoint)
    return herd.start(sys.executable, "raw.py", "client", endpoint, str(server.pid))


def start_bare(herd: Herd, folder: str) -> Child:
    place = Path(folder, "bare")
    place.mkdir(mode=0o700)
    server = herd.start(sys.executable, "bare_call.py", "server", str(place))
    return herd.start(sys.executable, "bare_call.py", "client", str(place), str(server.pid))


def start_transport(herd: Herd, folder: str) -> Child:
    for name in ("ts", "tc"):
        Path(folder, name).mkdir(mode=0o700)
    where = f"{folder}/endpoints"
    server = herd.start(sys.executable, "echo_envelope.py", "server", f"{folder}/ts", where)
    return herd.start(sys.executable, "echo_envelope.py", "client", f"{folder}/tc", where, str(server.pid))


def start_call(herd: Herd, folder: str) -> Child:
    rendezvous = f"{folder}/rendezvous"
    server = herd.start(sys.executable, "typed_call.py", "server", rendezvous, "server")
    return herd.start(sys.executable, "typed_call.py", "client", rendezvous, str(server.pid))


def start_peers(herd: Herd, python: str, peer: str, folder: str) -> dict[str, Child]:
    started: dict[str, Child] = {}
    for number, (mode, script, style) in enumerate(PEERS[peer]):
        args = (style, f"{folder}/{peer}{number}") if style else ()
        started[mode] = herd.start(python, script, *args)
    return started


def own_part(args: argparse.Namespace) -> list[str]:
    """Ours beside raw pyzmq."""
    book = Book()
    with tempfile.TemporaryDirectory(prefix="b-") as folder, Herd() as herd:
        raw = start_raw(herd, folder)
        modes = {
            BARE: start_bare(herd, folder), TRANSPORT: start_transport(herd, folder), CALL: start_call(herd, folder)
        }  # fmt: skip
        play(book, modes, raw, args.rounds, args.seconds, random.Random(args.seed))
        survivors = herd.end_all()
    rows = [
        *_head("raw"),
        _row(RAW, lambda depth, figure: _plain(book.reference(CALL, depth, figure), figure)),
        *(_row(mode, lambda depth, figure, mode=mode: book.cell(mode, depth, figure)) for mode in modes),
    ]
    goals = [g.verdict(statistics.median(book.ratios(g.mode, g.depth, g.figure))) for g in OWN_GOALS]
    return [*rows, "", *_goal_table(goals), "", f"Processes left: {len(survivors)}.", ""]


def peer_part(peer: str, python: str, args: argparse.Namespace) -> list[str]:
    """One other system beside ours. Goals are held against its best style, figure by figure."""
    book = Book()
    with tempfile.TemporaryDirectory(prefix="b-") as folder, Herd() as herd:
        ours = start_call(herd, folder)
        modes = start_peers(herd, python, peer, folder)
        play(book, modes, ours, args.rounds, args.seconds, random.Random(args.seed))
        survivors = herd.end_all()
    rows = [
        *_head("ours"),
        _row(CALL, lambda depth, figure: _plain(book.reference(next(iter(modes)), depth, figure), figure)),
        *(_row(mode, lambda depth, figure, mode=mode: book.cell(mode, depth, figure)) for mode in modes),
    ]
    goals: list[str] = []
    for goal in PEER_GOALS[peer]:
        medians = [statistics.median(book.ratios(mode, goal.depth, goal.figure)) for mode in modes]
        worst_for_us = 1 / max(medians) if goal.figure == "rate" else min(medians)
        goals.append(goal.verdict(worst_for_us))
    return [*rows, "", *_goal_table(goals), "", f"Processes left: {len(survivors)}.", ""]


def bulk_part(args: argparse.Namespace) -> list[str]:
    """Our typed call while arrays of 16 MiB follow one another to the same process, beside the same call when idle."""
    book = Book()
    with tempfile.TemporaryDirectory(prefix="b-") as folder, Herd() as herd:
        ours = start_call(herd, folder)
        for _ in range(args.rounds):
            idle = ours.measure(depth=1, seconds=args.seconds)
            book.note(BESIDE_BULK, 1, ours.measure(depth=1, seconds=args.seconds, bulk=1), idle)
        survivors = herd.end_all()
    goal = BULK_GOAL.verdict(statistics.median(book.ratios(BESIDE_BULK, 1, "p50_us")))
    figures = f"p50 {book.cell(BESIDE_BULK, 1, 'p50_us')} us; idle {book.reference(BESIDE_BULK, 1, 'p50_us'):.1f} us"
    return [f"{BESIDE_BULK}: {figures}", "", *_goal_table([goal]), "", f"Processes left: {len(survivors)}.", ""]


def _head(reference: str) -> list[str]:
    titles = (f"in brackets: x {reference}; range", "p50 us, 1 in flight", "CPU us a call, 64 in flight",
              "CPU us a call, 1024", "calls/s, 64", "calls/s, 1024")  # fmt: skip
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def _row(mode: str, cell: Callable[[int, str], str]) -> str:
    wanted = [(1, "p50_us"), (64, "cpu_us"), (1024, "cpu_us"), (64, "rate"), (1024, "rate")]
    return f"| {mode} | " + " | ".join(cell(depth, figure) for depth, figure in wanted) + " |"


def _plain(value: float, figure: str) -> str:
    return f"{value:,.0f}" if figure == "rate" else f"{value:.1f}"


def _goal_table(verdicts: list[str]) -> list[str]:
    return ["| goal | wanted | measured | |", "|---|---|---|---|", *verdicts]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.25 s")
    parser.add_argument("--bulk", action="store_true", help="only what a call takes while bulk saturates its process")
    parser.add_argument("--peers", default="", help="comma-separated: ray, xoscar")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 3, 0.25
    return args


def main() -> None:
    args = parse()
    peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    print(f"seed {args.seed}, {args.rounds} rounds of {args.seconds:g} s; Python {platform.python_version()}, "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start\n")  # fmt: skip
    print("\n".join((bulk_part if args.bulk else own_part)(args)), flush=True)
    python = python_with(peers) if peers else ""
    for peer in peers:
        print("\n".join(peer_part(peer, python, args)), flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
