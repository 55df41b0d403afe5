"""Ctrl-C, a scheduler's signal and a closed terminal: the first requests an orderly end, the second ends everything at
once.

`timeout` and `uv run` send one signal twice, so one that follows within `TWICE_S` counts as the same. Kernel and shell
may both report a closed terminal, and batch scripts choose SIGUSR1 or SIGUSR2 for Slurm's warning (`--signal`), which
SIGTERM may precede: these never count as the second. nohup has SIGHUP ignored.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
CTRL_C = "Ctrl-C"
TWICE_S = 0.5


@contextmanager
def stop_signals(on_request: Callable[[str, int], None]) -> Generator[asyncio.Future[int]]:
    """`on_request(reason, signal number)` is called for the first signal; the future gets the second one's number."""
    loop = asyncio.get_running_loop()
    forced: asyncio.Future[int] = loop.create_future()
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [number for number in SIGNALS if not (outlives and number is signal.SIGHUP)]
    first_s = math.inf

    def on_signal(number: signal.Signals) -> None:
        nonlocal first_s
        if first_s == math.inf:
            first_s = loop.time()
            on_request(CTRL_C if number is signal.SIGINT else number.name, int(number))
        elif number not in WARNINGS and loop.time() > first_s + TWICE_S and not forced.done():
            forced.set_result(int(number))

    for number in caught:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield forced
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
