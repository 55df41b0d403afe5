"""What a run is started from, once more in each checkpoint: its config.toml and its origin.json.

    version_00000040/start.json    both texts and their digest

In the run directory each of them is there once: a torn one would keep a run with whole checkpoints from going on.
Knows files and texts; must not know what the texts say.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from ...core.file_entry import read_regular, write_durably

START_FILE = "start.json"
MAX_BYTES = 16 << 20


class StartCopy(msgspec.Struct, frozen=True, kw_only=True):
    """What start.json says."""

    config: str
    """Text of config.toml."""
    origin: str
    """Text of origin.json."""
    sha256: str = ""
    """Of both, one after the other."""


def write_start_copy(folder: Path, copy: StartCopy) -> None:
    """Write it into a checkpoint. Another run that shares files with this one keeps its own. Raises OSError."""
    told = msgspec.structs.replace(copy, sha256=_digest(copy))
    write_durably(folder / START_FILE, msgspec.json.format(msgspec.json.encode(told), indent=2))


def read_start_copy(folder: Path) -> StartCopy | None:
    """What was written there; None: nothing, or not whole."""
    try:
        copy = msgspec.json.decode(read_regular(folder / START_FILE, MAX_BYTES), type=StartCopy)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return copy if copy.sha256 == _digest(copy) else None


def _digest(copy: StartCopy) -> str:
    return hashlib.sha256(f"{len(copy.config)} {copy.config}{copy.origin}".encode()).hexdigest()
