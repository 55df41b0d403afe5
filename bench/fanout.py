"""What it costs a root to call many processes at once and wait for all: its CPU per peer is what serialises.

    python bench/fanout.py [--quick] [--peers 8] [--rounds 5] [--seconds 0.4]

One root, N processes (1, 2, 4, 8), each hosting one actor; one typed call of five fields to each, all at once, again
and again: by `group.all`, and by references in `asyncio.gather`. Before each of them the reference: blocking pyzmq with
the same sockets and as many bytes, to processes that only echo. Rounds run all in another order. Lines are fitted to
the medians; the ratio is the median of pairs at the most peers. On a machine with fewer cores than processes the wall
time is the peers' own work. Goal: at most 20 us of the root's CPU per peer. Prints markdown.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from processes import Child, Figures, Herd  # pyright: ignore[reportMissingImports]

GOAL_US = 20.0
RAW, GROUP, GATHER = "raw pyzmq", "group.all", "asyncio.gather"
Book = dict[tuple[str, int], list[Figures]]


def start(herd: Herd, folder: str, num_peers: int) -> Child:
    rendezvous = f"{folder}/rendezvous"
    for place in range(num_peers):
        herd.start(sys.executable, "typed_call.py", "server", rendezvous, f"server/{place}")
    return herd.start(sys.executable, "fanout_root.py", rendezvous, str(num_peers))


def start_raw(herd: Herd, folder: str, num_peers: int) -> Child:
    for place in range(num_peers):
        herd.start(sys.executable, "raw_fanout.py", "server", folder, str(place))
    return herd.start(sys.executable, "raw_fanout.py", "root", folder, str(num_peers))


def measure(args: argparse.Namespace, sizes: list[int]) -> tuple[Book, dict[str, list[float]], int]:
    """Figures; at the most peers, root CPU x raw's just before; processes that were left."""
    book: Book = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="b-") as folder, Herd() as herd:
        root, raw = start(herd, folder, max(sizes)), start_raw(herd, folder, max(sizes))
        for _ in range(args.rounds):
            jobs = [(way, size) for way in (GROUP, GATHER) for size in sizes]
            for way, size in rng.sample(jobs, len(jobs)):
                before = raw.measure(peers=size, seconds=args.seconds / 2)
                found = root.measure(peers=size, seconds=args.seconds, as_group=way == GROUP)
                book[RAW, size].append(before)
                book[way, size].append(found)
                if size == max(sizes):
                    ratios[way].append(found.cpu_us / before.cpu_us)
        return book, ratios, len(herd.end_all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8, help="largest number of processes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.25 s")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 3, 0.25
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= args.peers]
    book, ratios, survivors = measure(args, sizes)
    print(f"seed {args.seed}, {args.rounds} rounds of {args.seconds:g} s, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print("| root CPU us (wall us, p50) | " + " | ".join(f"{n} peers" for n in sizes) + " | a peer more | x raw |")
    print("|---|" + "---|" * (len(sizes) + 2))
    slopes: dict[str, float] = {}
    for way in (RAW, GROUP, GATHER):
        cpu = [statistics.median(f.cpu_us for f in book[way, n]) for n in sizes]
        wall = [statistics.median(f.p50_us for f in book[way, n]) for n in sizes]
        slopes[way] = float(np.polyfit(sizes, cpu, 1)[0])
        cells = " | ".join(f"{c:.0f} ({w:.0f})" for c, w in zip(cpu, wall, strict=True))
        found = ratios[way]
        ratio = f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})" if found else "1"
        print(f"| {way} | {cells} | {slopes[way]:.1f} | {ratio} |")
    verdict = "met" if slopes[GROUP] <= GOAL_US else f"missed by {slopes[GROUP] / GOAL_US - 1:.0%}"
    print(f"\nRoot CPU a peer by {GROUP}: {slopes[GROUP]:.1f} us (goal {GOAL_US:g}: {verdict}), "
          f"raw {slopes[RAW]:.1f}. Processes left: {survivors}.")  # fmt: skip


if __name__ == "__main__":
    main()
