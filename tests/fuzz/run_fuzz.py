"""A million random and mutated frames into a living node, then a hundred thousand and hostile peers over real sockets.

    python tests/fuzz/run_fuzz.py [--frames 1000000] [--socket-frames 100000] [--raw 1000] [--seed N] [--quick]

Ends with status 0 if nothing crashed, grew or was executed, refusals were counted and the good peer was served.
A failing run is repeated with the seed that is printed first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fuzz import in_process, over_socket

PIECE = 100_000
"""Frames per node in process; each piece has a seed of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--socket-frames", type=int, default=100_000)
    parser.add_argument("--raw", type=int, default=1000, help="connections of hostile strangers")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything")
    options = parser.parse_args()
    if options.quick:
        options.frames, options.socket_frames, options.raw = 10_000, 2_000, 50
    logging.disable(logging.WARNING)
    print(f"seed {options.seed}", flush=True)
    if options.frames:
        _in_process(options.frames, options.seed)
    if options.socket_frames:
        _over_sockets(options.socket_frames, options.raw, options.seed)
    return 0


def _in_process(num_frames: int, seed: int) -> None:
    rss: list[float] = []
    for piece in range(-(-num_frames // PIECE)):
        tally = asyncio.run(in_process.fuzz(min(PIECE, num_frames - piece * PIECE), seed + piece))
        print(f"{tally.frames:,} frames in {tally.seconds:.0f} s, {tally.executed:,} handlers ran: {tally.counters}")
        in_process.check(tally)
        rss.append(tally.rss_mib[-1])
    assert not rss or max(rss) <= rss[0] + 96, f"memory grows from piece to piece: {rss}"


def _over_sockets(num_frames: int, num_raw: int, seed: int) -> None:
    tally = asyncio.run(over_socket.attack(num_frames, num_raw, seed))
    print(f"over sockets: {tally.frames:,} frames in {tally.seconds:.0f} s, {tally.pings:,} good calls: {tally.after}")
    over_socket.check(tally)


if __name__ == "__main__":
    sys.exit(main())
