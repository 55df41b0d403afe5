"""What it costs a root to call many processes at once and wait for all: its CPU per peer is what serialises.

    python bench/fanout.py [--quick] [--peers 8] [--rounds 5] [--seconds 0.4]

One root, N processes (1, 2, 4, 8), each hosting one actor; one typed call of five fields to each, all at once, again
and again. Rounds run the Ns in another order each. The line is fitted to the medians; on a machine with fewer cores
than processes the wall time is the peers' own work. Goal: at most 20 us of the root's CPU per peer. Prints markdown.
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


def start(herd: Herd, folder: str, num_peers: int) -> Child:
    rendezvous = f"{folder}/rendezvous"
    for place in range(num_peers):
        herd.start(sys.executable, "typed_call.py", "server", rendezvous, f"server/{place}")
    return herd.start(sys.executable, "fanout_root.py", rendezvous, str(num_peers))


def measure(args: argparse.Namespace, sizes: list[int]) -> tuple[dict[int, list[Figures]], int]:
    figures: dict[int, list[Figures]] = defaultdict(list)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="b-") as folder, Herd() as herd:
        root = start(herd, folder, max(sizes))
        for _ in range(args.rounds):
            for size in rng.sample(sizes, len(sizes)):
                figures[size].append(root.measure(peers=size, seconds=args.seconds))
        return figures, len(herd.end_all())


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
    figures, survivors = measure(args, sizes)
    wall = [statistics.median(f.p50_us for f in figures[n]) for n in sizes]
    cpu = [statistics.median(f.cpu_us for f in figures[n]) for n in sizes]
    slope, base = np.polyfit(sizes, cpu, 1)
    print(f"seed {args.seed}, {args.rounds} rounds of {args.seconds:g} s, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0]:.1f}\n")  # fmt: skip
    print("| | " + " | ".join(f"{n} peers" for n in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    print("| wall us, p50 | " + " | ".join(f"{us:.0f}" for us in wall) + " |")
    print("| root CPU us | " + " | ".join(f"{us:.1f}" for us in cpu) + " |")
    verdict = "met" if slope <= GOAL_US else f"missed by {slope / GOAL_US - 1:.0%}"
    print(f"\nRoot CPU: {base:.1f} us + {slope:.1f} us a peer (goal {GOAL_US:g}: {verdict}); "
          f"extrapolated to 64 peers {(base + 64 * slope) / 1000:.2f} ms. Processes left: {survivors}.")  # fmt: skip


if __name__ == "__main__":
    main()
