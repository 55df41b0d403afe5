"""The first actor that failed, its consequences, and the end of its log: the report of a failed run.

Peers of a dead actor fail after it and log the loudest errors, so the first failure is recorded when it happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..core.messages import RunStatus
from ..core.supervision import HOPELESS
from .contracts import ChildEnd

_LESS: Final = "less to do at a time (trainer.max_tokens_per_microbatch, engine.max_running, rollout.max_groups)"
_SIGNALS: Final[Mapping[int, tuple[str, str]]] = {
    signal.SIGKILL: (
        "it was killed, most often by the kernel for lack of memory",
        f"look for its process in `dmesg` or in the container's memory.events; give it more memory, or {_LESS}",
    ),
    signal.SIGSEGV: (
        "it touched memory that is not its own: native code failed, not Python",
        "the log names the Python line that called it; suspect the library there, and versions that do not fit",
    ),
    signal.SIGBUS: ("it touched memory that could not be had", "is a file system or /dev/shm full?"),
    signal.SIGABRT: ("a library gave up", "its last words are in the log"),
    signal.SIGILL: (
        "it met an instruction that this processor does not have",
        "install builds of its libraries that fit this machine",
    ),
    signal.SIGFPE: ("native code divided by zero", "the log names the Python line that called it"),
    signal.SIGTERM: ("it was asked to end from outside", "is there a scheduler or a person that ends processes?"),
    signal.SIGINT: ("it was interrupted from outside", "is there a scheduler or a person that ends processes?"),
}
_OUT_OF_MEMORY: Final = ("MemoryError", "can't allocate memory", "bad_alloc", "Cannot allocate memory", "out of memory")
_MORE_MEMORY: Final = f"it ran out of memory: raise its limit, or give it {_LESS}"
_NO_THREAD: Final = ("can't start new thread", "Resource temporarily unavailable")
_MORE_THREADS: Final = "it could start no thread: raise the limit (ulimit -u, the container's pids limit)"
_NO_WORD: Final = "it ended without a word, so something in it called exit: a filter or a library"


def meaning(status: int) -> str:
    """What a signal says, for people who do not know their numbers; empty for an exit status."""
    return _SIGNALS.get(-status, ("", ""))[0]


def remedy(status: int, log: Sequence[str], *, has_word: bool) -> str:
    """What to do about a process that did not say it (`has_word`: a message of ours ends its `log`), or empty."""
    if any(sign in line for line in log for sign in _OUT_OF_MEMORY):
        return _MORE_MEMORY
    if any(sign in line for line in log for sign in _NO_THREAD):
        return _MORE_THREADS
    if status < 0:
        return _SIGNALS.get(-status, ("", ""))[1]
    return "" if has_word else _NO_WORD


NUM_LINES = 25
MAX_LINE = 400
MAX_CAUSE = 4000
CAUSE = "myxa: "
"""How the last line of an actor's log begins if an error ended it (see worker.py)."""
REPORT_LINES = 24
CAUSE_LINES = 6
FOLLOWED_LINES = 4
_MAX_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """What the report says."""

    actor: str
    reason: str
    log_path: str = ""
    """On the node where the actor ran; empty: it has no log."""
    tail: tuple[str, ...] = ()
    node: int = 0
    status: int = 1
    """Exit status of its process, as `subprocess` gives it."""
    followed: tuple[str, ...] = ()
    """What failed after it, in the order in which it did."""
    ended_by: str = ""
    """Which part of this run killed it, and why; empty: none that is known."""

    @property
    def is_mistake(self) -> bool:
        """In the run file, the data or a function of the user's; then the log says nothing more than its last line."""
        return bool(self._split()[1]) and self.status in HOPELESS

    def report(self) -> str:
        """At most 24 lines: cause, remedy, what followed, and the end of the log, unless it says nothing more."""
        before, cause = self._split()
        lines = [f"first failure: {self._what()}", *cause[:CAUSE_LINES]]
        if not (self.ended_by or any(" -- " in line for line in cause)) and (
            advice := remedy(self.status, self.tail, has_word=bool(cause))
        ):
            lines.append(f"remedy: {advice}")
        lines += [f"then: {text}" for text in self.followed[:FOLLOWED_LINES]]
        if len(self.followed) > FOLLOWED_LINES:
            lines.append(f"then: {len(self.followed) - FOLLOWED_LINES} more")
        if not self.log_path:
            return "\n".join(lines)
        if self.is_mistake:
            return "\n".join([*lines, f"log: {self._place()}"])
        room = REPORT_LINES - len(lines) - 1
        end = before[-room:] if before or cause else ("(the log is empty)",)
        return "\n".join([*lines, f"---- end of {self._place()} ----", *end])

    def last_words(self) -> str:
        """For the end of the run: where the log is, who failed, and as the last line why."""
        _, cause = self._split()
        log = (f"log: {self._place()}",) if self.log_path else ()
        return "\n".join([*log, f"first failure: {self._what()}", *cause])

    def _what(self) -> str:
        failure = self.reason if self.reason.startswith(self.actor) else f"{self.actor}: {self.reason}"
        explained = self.ended_by or meaning(self.status)
        node = f" (node {self.node})" if self.node else ""
        return f"{failure}{node}" + (f": {explained}" if explained and self.status not in HOPELESS else "")

    def _place(self) -> str:
        return self.log_path + (f" on node {self.node}" if self.node else "")

    def _split(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        first = max((i for i, line in enumerate(self.tail) if line.startswith(CAUSE)), default=len(self.tail))
        return self.tail[:first], self.tail[first:]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended, as this node's launcher saw it."""

    exit_code: int
    reason: str
    status: RunStatus | None = None
    """Node 0's last look; None: it never had one."""
    first_failure: FirstFailure | None = None
    run_dir: Path | None = None

    @property
    def version(self) -> int:
        """Of the weights at the end; -1: not known."""
        return self.status.version if self.status is not None else -1


class Failures:
    """Keeps the first failure and what follows from it. Pure: time is passed in."""

    def __init__(self) -> None:
        self._first: FirstFailure | None = None
        self._at = 0.0
        self._ends: dict[str, ChildEnd] = {}
        self._killers: dict[tuple[str, int], str] = {}

    @property
    def first(self) -> FirstFailure | None:
        if self._first is None or (end := self._ends.get(self._first.actor)) is None:
            return self._first
        by = self._killers.get((end.name, end.attempt), "") if end.status == -signal.SIGKILL else ""
        failure = replace(self._first, log_path=end.log_path, tail=end.tail, node=end.node, status=end.status)
        return replace(failure, ended_by=by)

    def killed(self, actor: str, attempt: int, killer: str) -> None:
        """This run kills that attempt; `killer` asked for it, and why. The kernel is not to be blamed for it."""
        self._killers[actor, attempt] = killer

    def blame(self, actor: str, reason: str, now: float) -> None:
        """An actor failed for good; only the first one counts."""
        if self._first is None:
            self._first = FirstFailure(actor, reason)
            self._at = now

    def note_end(self, end: ChildEnd, status_text: str, now: float) -> None:
        """A process ended. After the first failure all are ended, so later failures are consequences."""
        if self._first is None or end.name == self._first.actor:
            self._ends[end.name] = end
        elif end.status > 0:
            why = next((line.removeprefix(CAUSE) for line in reversed(end.tail) if line.startswith(CAUSE)), "")
            self.add(f"{end.name} ended with {status_text}" + (f": {why}" if why else ""), now)

    def add(self, text: str, now: float) -> None:
        if self._first is not None:
            line = _cut(f"{now - self._at:.1f} s later: {' '.join(text.split())}", MAX_LINE // 2)
            self._first = replace(self._first, followed=(*self._first.followed, line))


def read_tail(path: Path) -> tuple[str, ...]:
    """The last lines of a log, long lines cut; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rstrip() for line in text.splitlines()]
    lines = [_cut(line, MAX_CAUSE if line.startswith(CAUSE) else MAX_LINE) for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return tuple(lines[-NUM_LINES:])


def read_end(path: Path, status: int) -> tuple[str, ...]:
    """As `read_tail`, of a process that ended so; with the cause if it had no room to write any."""
    tail = read_tail(path)
    if status <= 0 or any(line.startswith(CAUSE) for line in tail):
        return tail
    try:
        with path.open("r+b", buffering=0) as log:
            log.seek(0, os.SEEK_END)
            log.write(b"\n")  # a quota is no less full than a disk, and statvfs does not show it
    except FileNotFoundError:
        return tail
    except OSError as error:
        cause = f"{CAUSE}nothing can be written to its log any more: {error.strerror}"
        return (*tail[1 - NUM_LINES :], f"{cause} -- make room in {path.parent}")
    return tail


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else line[:limit] + " ..."
