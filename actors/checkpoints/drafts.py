"""Checkpoints that are being written: under hidden names beside their place, each writer under its own.

    .partial-2.0-version_00000040/   grows: of life 2 of the run, attempt 0 of its gang
    .writing-2.0                     locked as long as that attempt writes something there

A process of an earlier life may outlive its launcher for a while and write on: neither spoils what the other writes,
and what nobody holds is cleared away by whoever writes next. Knows names and locks; must not know what a checkpoint
holds.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ...core.errors import TrainError
from ...core.file_lock import is_locked, lock_remedy, take_lock
from .folder_swap import GONE, OLD, is_meant

GROWING = ".partial-"
"""How the names of what is being written begin."""
WRITING = ".writing-"
"""How those of its locks begin."""

Writer = tuple[int, int]
"""Life of the run, and attempt of its gang in it; the later one is the larger."""


def writer_of(extra: Mapping[str, Any]) -> Writer | None:
    """Who writes, or wrote, what has that beside it. None: it does not say, as older ones do not."""
    life, attempt = extra.get("life"), extra.get("attempt")
    return (life, attempt) if isinstance(life, int) and isinstance(attempt, int) else None


def partial_of(folder: Path, writer: Writer | None = None) -> Path:
    """Where a checkpoint grows before it is complete."""
    return folder.with_name(f"{GROWING}{f'{_name_of(writer)}-' if writer else ''}{folder.name}")


def begin(folder: Path, writer: Writer | None = None) -> Path:
    """Make an empty place to write to. Raises TrainError if the disk refuses."""
    fresh = partial_of(folder, writer)
    try:
        if fresh.exists():
            shutil.rmtree(fresh)
        fresh.mkdir(parents=True)
    except OSError as error:
        raise TrainError(f"cannot make checkpoint folder {fresh}: {error}", remedy="check disk and rights") from error
    return fresh


def hold_drafts(holder: Path, writer: Writer) -> IO[str]:
    """Until `let_go_drafts`, nobody else clears away what this writer writes there. Raises TrainError if the disk
    refuses, or somebody else writes under that name."""
    try:
        holder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(_lock_of(holder, writer))
    except OSError as error:
        remedy = lock_remedy(error, "check disk and rights")
        raise TrainError(f"nothing can be written to {holder}: {error}", remedy=remedy) from error
    if lock is None:
        raise TrainError(
            f"another process writes checkpoints to {holder} as life {writer[0]}, attempt {writer[1]}",
            remedy="end it first",
        )
    return lock


def let_go_drafts(lock: IO[str]) -> None:
    """Nothing more is written. What cannot be deleted of the lock is for the next `sweep`."""
    with lock, suppress(OSError):
        Path(lock.name).unlink(missing_ok=True)


def sweep(holder: Path, own: Writer | None = None) -> None:
    """Delete what crashes left half written or half deleted, and nobody holds. `own`: whoever asks; what a later writer
    left is for later ones to clear."""
    for path in holder.glob(f"{GROWING}*"):
        writer = _writer_in(path.name.removeprefix(GROWING).partition("-")[0])
        if writer is None or not ((own and writer > own) or is_locked(_lock_of(holder, writer))):
            _remove(path)
    for path in [*holder.glob(f"{GONE}*"), *holder.glob(f"{OLD}*")]:
        if not path.name.startswith(OLD) or not is_meant(path):
            _remove(path)
    for path in holder.glob(f"{WRITING}*"):
        writer = _writer_in(path.name.removeprefix(WRITING))
        if writer and own and writer < own and not is_locked(path):  # nobody begins to write under that name any more
            path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _lock_of(holder: Path, writer: Writer) -> Path:
    return holder / f"{WRITING}{_name_of(writer)}"


def _name_of(writer: Writer) -> str:
    return f"{writer[0]}.{writer[1]}"


def _writer_in(name: str) -> Writer | None:
    life, dot, attempt = name.partition(".")
    return (int(life), int(attempt)) if dot and life.isdecimal() and attempt.isdecimal() else None
