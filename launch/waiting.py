"""What a command says while it works and there is no screen yet."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

FIRST_S = 1.0
AGAIN_S = 10.0


def say_aside(text: str) -> None:
    """To people, not to a program that reads the command's output."""
    print(text, file=sys.stderr, flush=True)


class Waiting:
    """Inside, what is done is said once it lasts, and then again and again, with the seconds since the beginning."""

    def __init__(self, text: str, say: Callable[[str], object] = say_aside) -> None:
        self.text = text
        """What is done now; any thread may change it."""
        self._say = say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)

    def now(self, text: str) -> None:
        self.text = text

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        began_s, pause_s = time.monotonic(), FIRST_S
        while not self._over.wait(pause_s):
            self._say(f"{self.text} ... ({time.monotonic() - began_s:.0f} s)")
            pause_s = AGAIN_S
