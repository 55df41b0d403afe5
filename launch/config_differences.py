"""Two resolved configurations and where they differ, in words. Pure."""

from __future__ import annotations

import difflib

MAX_DIFFERENCES = 8


def differences(theirs: str, ours: str) -> str:
    """The values that differ between two resolved configurations, both named."""
    lines: list[str] = []
    table = ""
    for line in difflib.ndiff(theirs.splitlines(), ours.splitlines()):
        text = line[2:].strip()
        if line[0] in " -+" and text.startswith("["):
            table = text.strip("[]")
        if line[0] == "-" and text:
            lines.append(f"it has {table}.{text}")
        if line[0] == "+" and text:
            lines.append(f"node 0 has {table}.{text}")
    shown = lines[:MAX_DIFFERENCES]
    return "; ".join(shown) + (f"; and {len(lines) - len(shown)} more" if len(lines) > len(shown) else "")
