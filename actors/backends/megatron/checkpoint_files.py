"""Names of the files of a checkpoint that several ranks write, and who answers for which. Pure."""

from __future__ import annotations

from pathlib import Path

_LIST = ".files-"
_UNFINISHED = ".tmp"
"""safetensors writes beside the place under such a name and renames; torch ends a name with it."""


def list_of(rank: int) -> str:
    """File in which a rank says what it wrote, until the manifest does."""
    return f"{_LIST}{rank:05d}.json"


def files_of(partial: Path, rank: int) -> list[Path]:
    """What that rank wrote, or for all of them; not the lists of files, which other ranks may be writing by now, nor
    what another rank has under way and will rename."""
    names = [path.name for path in partial.iterdir() if not path.name.startswith((_LIST, _UNFINISHED))]
    return [partial / name for name in sorted(names) if not name.endswith(_UNFINISHED) and _writer_of(name) == rank]


def _writer_of(name: str) -> int:
    """The rank that wrote a file: `__3_0.distcp`, `rank-00003.safetensors`; rank 0 for what all share."""
    number = name.removeprefix("__").split("_")[0] if name.startswith("__") else name[5:10]
    return int(number) if number.isdigit() and name.startswith(("__", "rank-")) else 0
