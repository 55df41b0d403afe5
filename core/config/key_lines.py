"""Which line of a TOML text each key stands on. `tomllib` parses but keeps no positions, and neither does tomlkit.

The text is cut into statements (a header, or a key with its value), each of which `tomllib` parses by itself: a value
over several lines never parses before its last line, because its bracket or quotes are still open.
"""

from __future__ import annotations

import tomllib

from .tables import KeyPath, Table, as_table, single_path


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every table header and key of a text that is valid TOML; the first mention counts."""
    lines = text.replace("\r\n", "\n").split("\n")
    found: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    at = 0
    while at < len(lines):
        head = lines[at].strip()
        if not head or head.startswith("#"):
            at += 1
            continue
        parsed, end = _statement(lines, at)
        if head.startswith("["):
            prefix = single_path(parsed)
            found.setdefault(prefix, at + 1)
        else:
            _note(found, prefix, parsed, at + 1)
        at = end
    return found


def _statement(lines: list[str], at: int) -> tuple[Table, int]:
    for end in range(at + 1, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[at:end])), end
        except tomllib.TOMLDecodeError:
            continue
    return {}, len(lines)


def _note(found: dict[KeyPath, int], prefix: KeyPath, table: Table, line: int) -> None:
    for key, value in table.items():
        path = (*prefix, key)
        found.setdefault(path, line)
        below = as_table(value)
        if below is not None:
            _note(found, path, below, line)
