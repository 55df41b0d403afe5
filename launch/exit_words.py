"""What the end of a process means in words, and what a person can do about it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final

_LESS: Final = "less to do at a time (trainer.max_tokens_per_microbatch, engine.max_running, rollout.max_groups)"
_SIGNALS: Final[Mapping[int, tuple[str, str]]] = {
    signal.SIGKILL: (
        "somebody killed it, most often the kernel for lack of memory",
        f"look for its process in `dmesg` or in the container's memory.events; give it more memory, or {_LESS}",
    ),
    signal.SIGSEGV: (
        "it touched memory that is not its own: native code failed, not Python",
        "the log names the Python line that called it; suspect the library there, and versions that do not fit",
    ),
    signal.SIGBUS: (
        "it touched memory that could not be had",
        "is a file system or /dev/shm full?",
    ),
    signal.SIGABRT: (
        "a library gave up",
        "its last words are in the log",
    ),
    signal.SIGILL: (
        "it met an instruction that this processor does not have",
        "install builds of its libraries that fit this machine",
    ),
    signal.SIGFPE: ("native code divided by zero", "the log names the Python line that called it"),
    signal.SIGTERM: ("somebody outside asked it to end", "is there a scheduler or a person that ends processes?"),
    signal.SIGINT: ("somebody outside interrupted it", "is there a scheduler or a person that ends processes?"),
}
_OUT_OF_MEMORY: Final = ("MemoryError", "can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory")
_MORE_MEMORY: Final = f"it ran out of memory: raise its limit, or give it {_LESS}"
_NO_WORD: Final = "it ended without a word, so something in it called exit: a reward, a workflow or a library"


def meaning(status: int) -> str:
    """What a signal says, for people who do not know their numbers; empty for an exit status."""
    return _SIGNALS.get(-status, ("", ""))[0]


def remedy(status: int, log: Sequence[str], *, has_word: bool) -> str:
    """What to do about a process that did not say it itself; `log` is the end of its log, `has_word`: with a message of
    ours at its end. Empty: nothing is known."""
    if any(sign in line for line in log for sign in _OUT_OF_MEMORY):
        return _MORE_MEMORY
    if status < 0:
        return _SIGNALS.get(-status, ("", ""))[1]
    return "" if has_word else _NO_WORD
