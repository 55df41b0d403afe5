"""Ctrl-C, SIGTERM and a closed terminal: the first signal requests an orderly end, the second ends everything at once.

Kernel and shell may both report a closed terminal, so SIGHUP never counts as the second. nohup has SIGHUP ignored.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CTRL_C = "Ctrl-C"


class StopSignals:
    """Catches the signals while it is open. `asked(reason, signal number)` is called on the loop for the first one."""

    def __init__(self, asked: Callable[[str, int], None]) -> None:
        self.forced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Number of the second signal."""
        self._asked = asked
        self._is_asked = False
        outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._caught = [number for number in SIGNALS if not (outlives and number is signal.SIGHUP)]

    def __enter__(self) -> StopSignals:
        for number in self._caught:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._caught:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._asked(CTRL_C if number is signal.SIGINT else signal.Signals(number).name, int(number))
        elif number is not signal.SIGHUP and not self.forced.done():
            self.forced.set_result(int(number))
