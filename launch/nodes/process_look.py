"""How a process looks from outside: the command line and the variables that /proc shows (`ps`, `myxa doctor`).

The kernel shows the bytes that lay behind the first stack frame when the program began; they can be written over. What
does not fit is left out. `setproctitle` was considered: it gives up the variables, by which actors are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

_ARG_START = 45
"""Number of the field in /proc/self/stat, counted from the state; the end of the arguments and the variables' begin and
end follow."""


def look_like(command: Sequence[str], env: Iterable[tuple[bytes, bytes]]) -> None:
    """Call it when no library holds on to the first variables any more: they are overwritten. Nothing happens where the
    kernel does not tell where they are."""
    text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    places = [int(field) for field in text.rpartition(")")[2].split()[_ARG_START : _ARG_START + 4]]
    if len(places) != 4 or not all(places):
        return
    _overwrite(places[0], places[1], (word.encode() for word in command))
    _overwrite(places[2], places[3], (name + b"=" + value for name, value in env))


def _overwrite(start: int, end: int, words: Iterable[bytes]) -> None:
    """Whole words as far as they fit, zeros after them."""
    room, text = end - start, b""
    for word in words:
        if len(text) + len(word) + 1 <= room:
            text += word + b"\0"
    ctypes.memmove(start, text.ljust(room, b"\0"), room)
