"""What `myxa ckpt --list` shows: every checkpoint of a run directory, looked at in every byte. Reads files only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...actors.checkpoints.folder import CheckpointInfo, whole_ones
from ...actors.checkpoints.run_part import is_kept, ledger_in
from ...core.errors import LaunchError, TrainError
from .origin import Origin
from .resume_point import CHECKPOINTS


def checkpoints_of(run_dir: Path) -> list[dict[str, Any]]:
    """As JSON types, newest version first. Raises LaunchError if there is no such directory, or it cannot be read."""
    if not run_dir.is_dir():
        raise LaunchError(f"there is no run directory {run_dir}", remedy="`myxa up` prints it when it starts")
    origin = Origin.load(run_dir)
    return [_row(info, origin) for info in whole_ones(run_dir / CHECKPOINTS)]


def _row(info: CheckpointInfo, origin: Origin) -> dict[str, Any]:
    problem = info.problem or origin.why_undone(info)
    return {
        "version": info.version,
        "folder": info.path.name,
        "stays": "for ever" if is_kept(info.path) else "",
        "problem": problem,
        "lacks": "" if problem else _lacks(info.path),
    }


def _lacks(folder: Path) -> str:
    """Why it is good for its own run only."""
    try:
        ledger_in(folder)
    except TrainError as error:
        return f"whole, but needs the run's own ledger: {error.message}"
    return ""
