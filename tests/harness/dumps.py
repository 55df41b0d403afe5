"""What a dump of groups holds, read as a test needs it."""

from __future__ import annotations

from pathlib import Path

from myxa.actors.buffer.dumps import DumpedGroup, group_of, read_header


def read_groups(path: Path) -> list[DumpedGroup]:
    """All groups, in order; the first line is the header."""
    read_header(path)
    return [group_of(line) for line in path.read_bytes().splitlines()[1:]]
