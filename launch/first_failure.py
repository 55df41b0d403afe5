"""The first actor that failed and the end of its log: the last thing a person reads of a failed run.

Peers of a dead actor fail after it, and theirs are the loud errors; so the cause is taken when it happens and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NUM_LINES = 25
MAX_LINE = 400
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

    def render(self) -> str:
        """Text for the terminal; the cause is its last line."""
        lines: list[str] = []
        if self.log_path:
            lines.append(f"---- end of {self.log_path}" + (f" on node {self.node}" if self.node else "") + " ----")
            lines += self.tail or ("(the log is empty)",)
            lines.append("-" * len(lines[0]))
        named = self.reason if self.reason.startswith(self.actor) else f"{self.actor}: {self.reason}"
        lines.append(f"first failure: {named}")
        return "\n".join(lines)


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
    kept = [line if len(line) <= MAX_LINE else line[:MAX_LINE] + " ..." for line in lines]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept[-num_lines:])
