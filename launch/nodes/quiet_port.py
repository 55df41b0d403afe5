"""A port that stays free until somebody listens there, seconds or minutes later.

The kernel gives ports of its ephemeral range to every connection that anybody of this machine opens, so a port of that
range which is free now may be taken by then. Ports outside it are taken by those only who name them.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 1024, 65535
NUM_TRIES = 100


def quiet_port(family: socket.AddressFamily = socket.AF_INET) -> int:
    """A port of all this machine's addresses where nothing listens, outside the ephemeral range if that leaves room;
    drawn at random, so that two who ask at once get different ones. Raises OSError if the machine has none."""
    below, above = _around_ephemeral()
    candidates = [*range(max(LOWEST, below - 20_000), below), *range(above + 1, HIGHEST + 1)]
    for port in random.sample(candidates, min(NUM_TRIES, len(candidates))):  # not seeded: runs must not agree on it
        if _is_free(family, port):
            return port
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_free(family: socket.AddressFamily, port: int) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _around_ephemeral() -> tuple[int, int]:
    """Its first and last port; where the machine does not say, as Linux has it by default."""
    try:
        first, last = EPHEMERAL.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32768, 60999
