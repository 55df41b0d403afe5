"""Notices that an event loop is held up: by a user's function that blocks where it should await.

Such a process neither answers nor ends, and no `asyncio.timeout` in it can fire. A thread asks the loop for a sign once
a second; it counts signs that did not come, not seconds, so that a process that was stopped and goes on is not blamed.
asyncio's debug mode was considered: it tells of a slow callback when it is over, and never of one that does not end.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

TICK_S = 1.0
WARN_S = 10.0

OURS = str(Path(__file__).parents[1])
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS})

_log = logging.getLogger("myxa.worker")


class LoopWatch:
    """Watches the loop of the thread that makes it, from `start` to `stop`. `give_up` is called in a thread of its own,
    once, with the line that holds the loop up. `busy_s` says for how long it has been declared that this may be."""

    def __init__(
        self, limit_s: float, give_up: Callable[[str], object], busy_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._limit_s = limit_s
        self._give_up = give_up
        self._busy_s = busy_s
        self._sign = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join(TICK_S)

    def _watch(self) -> None:
        missed_s = 0.0
        self._ask()
        while not self._is_over.wait(TICK_S):
            if self._sign.is_set():
                missed_s = 0.0
                self._ask()
                continue
            if self._busy_s() > 0:
                continue
            missed_s += TICK_S
            if missed_s == WARN_S:
                _log.warning("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
            if missed_s >= self._limit_s:
                _log.error("the event loop has been held up for %g s:\n%s", missed_s, self._stack())
                self._give_up(self._line())
                return

    def _ask(self) -> None:
        self._sign.clear()
        try:
            self._loop.call_soon_threadsafe(self._sign.set)
        except RuntimeError:  # the loop is closed
            self._is_over.set()

    def _stack(self) -> str:
        return "".join(traceback.format_stack(self._frame()))

    def _line(self) -> str:
        """The innermost line of a file that is neither ours nor installed; else the innermost of all."""
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_stack(self._frame())]
        foreign = [place for place in places if not place[0].startswith((*INSTALLED, "<"))]
        filename, line = (foreign or places)[-1]
        return f"{filename}:{line}"

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, and there is no other way
        return frames.get(self._watched)
