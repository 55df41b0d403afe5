"""Two hundred thousand broken frames into a living node over real sockets, and hostile peers beside.

    python tests/fuzz/run_fuzz.py [--frames 200000] [--raw 1000] [--seed N] [--quick]

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

from tests.fuzz import over_socket


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200_000)
    parser.add_argument("--raw", type=int, default=1000, help="connections of hostile strangers")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything")
    options = parser.parse_args()
    if options.quick:
        options.frames, options.raw = 2_000, 50
    logging.disable(logging.WARNING)
    print(f"seed {options.seed}", flush=True)
    tally = asyncio.run(over_socket.attack(options.frames, options.raw, options.seed))
    print(f"{tally.frames:,} frames in {tally.seconds:.0f} s, {tally.pings:,} good calls: {tally.after}")
    over_socket.check(tally)
    return 0


if __name__ == "__main__":
    sys.exit(main())
