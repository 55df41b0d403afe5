"""What a command says while it works and has no screen: apart from an answer that programs read."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TextIO

FIRST_S = 1.0
AGAIN_S = 10.0


class Waiting:
    """Inside, what is done is said once it lasts, and then again and again, with the seconds since the beginning."""

    def __init__(self, text: str, file: TextIO | None = None, *, is_quiet: bool = False) -> None:
        """`file`: stdout where all that is said is for people; else stderr."""
        self.text = text
        """What is done now."""
        self._file = file or sys.stderr
        self._is_quiet = is_quiet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)

    def now(self, text: str) -> None:
        """Something else is done. From any thread."""
        self.text = text

    def say(self, text: str) -> None:
        if not self._is_quiet:
            with suppress(OSError):  # a reader that is gone or a full disk: the answer itself will say it
                print(text, file=self._file, flush=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        began_s, pause_s = time.monotonic(), FIRST_S
        while not self._over.wait(pause_s):
            self.say(f"{self.text} ... ({time.monotonic() - began_s:.0f} s)")
            pause_s = AGAIN_S
