"""What training went back behind: put away under `lives/<number>/undone`, where nobody takes it for the newest.

    a life begins        newer checkpoints of the life before
    a gang is restarted  newer checkpoints that it could not use, or that appeared too late

Nothing is deleted. Knows folders; must not know why training went back.
"""

from __future__ import annotations

from pathlib import Path

LIVES = "lives"
UNDONE = "undone"


def past_of(run_dir: Path, life: int) -> Path:
    """Where what is over of that life goes."""
    return run_dir / LIVES / str(life)


def put_away(path: Path, folder: Path) -> None:
    """Move it there, under a name of its own; what is not there needs nothing. Raises OSError."""
    if not path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        number += 1
        target = folder / f"{path.name}.{number}"
    path.replace(target)
