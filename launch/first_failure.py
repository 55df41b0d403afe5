"""The first actor that failed and the end of its log: the last thing a person reads of a failed run.

Peers of a dead actor fail after it, and theirs are the loud errors; so the cause is taken when it happens and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.supervision import HOPELESS

NUM_LINES = 25
MAX_LINE = 400
MAX_CAUSE = 4000
CAUSE = "myxa: "
"""How the last line of an actor's log begins if an error ended it (see worker.py)."""
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

    def render(self) -> str:
        """Text for the terminal; the cause is its last line. A mistake in the run file, the data or a function of the
        user's is told by that line alone: the rest of the log says nothing about it."""
        at = max((i for i, line in enumerate(self.tail) if line.startswith(CAUSE)), default=len(self.tail))
        before, cause = self.tail[:at], self.tail[at:]
        place = self.log_path + (f" on node {self.node}" if self.node else "")
        lines: list[str] = []
        if self.log_path and cause and self.status in HOPELESS:
            lines.append(f"log: {place}")
        elif self.log_path:
            lines.append(f"---- end of {place} ----")
            lines += before if before or cause else ("(the log is empty)",)
            lines.append("-" * len(lines[0]))
        named = self.reason if self.reason.startswith(self.actor) else f"{self.actor}: {self.reason}"
        return "\n".join([*lines, f"first failure: {named}", *cause])


def read_tail(path: Path, num_lines: int = NUM_LINES) -> tuple[str, ...]:
    """The last lines of a log, long lines cut; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _MAX_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ()
    lines = [line.rstrip() for line in text.splitlines()]
    kept = [_cut(line) for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept[-num_lines:])


def _cut(line: str) -> str:
    limit = MAX_CAUSE if line.startswith(CAUSE) else MAX_LINE
    return line if len(line) <= limit else line[:limit] + " ..."
