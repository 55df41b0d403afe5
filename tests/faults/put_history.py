"""What producers, the consumer and the ledger say happened, and whether it can all be true. In the manner of Jepsen.

Claimed for the buffer, and checked here: no acknowledged group is lost, none is trained twice, none is invented, and
what is trained is what its acknowledged put said.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ACKED = ("ready", "duplicate")
"""Outcomes that promise: this group, with this content, is in the buffer's hands."""
FAIR_ENDS = ("leftover",)
"""Reasons to drop an acknowledged group: the run ended before a whole batch came together."""


class Journal:
    """A process's own record of what it did: one line per event, in the kernel's hands before the event goes on."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, *event: str | int) -> None:
        os.write(self._file, json.dumps(event).encode() + b"\n")


@dataclass
class History:
    """Everything that was seen from outside."""

    put: dict[int, set[str]] = field(default_factory=dict)
    """group -> contents that somebody tried to put."""
    acked: dict[int, set[str]] = field(default_factory=dict)
    """group -> contents whose put was acknowledged."""
    refused: dict[int, set[str]] = field(default_factory=dict)
    """group -> contents whose put was answered with: not this one."""
    trained: list[tuple[int, str]] = field(default_factory=list)
    """(group, content) in the order in which they were trained."""
    ends: dict[int, tuple[str, str]] = field(default_factory=dict)
    """group -> (state, reason) in the ledger when all was over."""

    def read(self, path: Path) -> None:
        """Add a journal; a line that was cut off by a kill did not happen."""
        for line in path.read_text().split("\n")[:-1]:
            kind, group_id, content, *rest = json.loads(line)
            if kind == "put":
                self.put.setdefault(group_id, set()).add(content)
            else:
                target = self.acked if rest[0] in ACKED else self.refused
                target.setdefault(group_id, set()).add(content)

    def read_ledger(self, path: Path) -> None:
        with sqlite3.connect(path) as db:
            for group_id, state, reason in db.execute("SELECT group_id, state, reason FROM groups"):
                self.ends[group_id] = (state, reason)
        db.close()


def faults_of(history: History) -> list[str]:
    """What cannot be true, in words; empty: the history is sound."""
    found: list[str] = []
    counts = Counter(group_id for group_id, _ in history.trained)
    found += [f"group {group_id} was trained {count} times" for group_id, count in counts.items() if count > 1]
    for group_id, contents in sorted(history.acked.items()):
        if len(contents) > 1:
            found.append(f"group {group_id} was acknowledged with different contents: {sorted(contents)}")
        state, reason = history.ends.get(group_id, ("nothing", ""))
        if group_id not in counts and not (state == "DROPPED" and reason in FAIR_ENDS):
            found.append(f"group {group_id} was acknowledged and is lost: the ledger has {state} {reason}")
    for group_id, content in history.trained:
        if content not in history.put.get(group_id, set()):
            found.append(f"group {group_id} was trained with {content!r}, which nobody put")
        if content in history.refused.get(group_id, set()) - history.acked.get(group_id, set()):
            found.append(f"group {group_id} was trained with {content!r}, which was refused")
        other = history.acked.get(group_id, {content}) - {content}
        if other:
            found.append(f"group {group_id} was trained with {content!r}, but {sorted(other)} was acknowledged")
        state, _ = history.ends.get(group_id, ("nothing", ""))
        if state not in ("TRAINED", "DURABLE"):
            found.append(f"group {group_id} was trained, but the ledger has {state}")
    return found
