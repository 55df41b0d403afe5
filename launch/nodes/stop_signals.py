"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends everything at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CTRL_C = "Ctrl-C"


class StopSignals:
    """Catches both while it is open. `asked(reason, signal number)` is called on the loop for the first one."""

    def __init__(self, asked: Callable[[str, int], None]) -> None:
        self.forced: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Number of the second signal."""
        self._asked = asked
        self._is_asked = False

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._asked(CTRL_C if number is signal.SIGINT else signal.Signals(number).name, int(number))
        elif not self.forced.done():
            self.forced.set_result(int(number))
