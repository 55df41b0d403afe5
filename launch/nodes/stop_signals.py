"""Ctrl-C, SIGTERM and a closed terminal: the first signal requests an orderly end, the second ends everything at once.

Kernel and shell may both report a closed terminal, so SIGHUP never counts as the second. nohup has SIGHUP ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTRL_C = "Ctrl-C"


@contextmanager
def stop_signals(asked: Callable[[str, int], None]) -> Generator[asyncio.Future[int]]:
    """`asked(reason, signal number)` is called for the first signal; the future gets the second one's number."""
    loop = asyncio.get_running_loop()
    forced: asyncio.Future[int] = loop.create_future()
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    caught = [number for number in SIGNALS if not (outlives and number is signal.SIGHUP)]
    is_asked = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            asked(CTRL_C if number is signal.SIGINT else number.name, int(number))
        elif number is not signal.SIGHUP and not forced.done():
            forced.set_result(int(number))

    for number in caught:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield forced
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
