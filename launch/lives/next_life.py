"""Begin the next life of a run in its own directory: what the last one left and the next would mistake for its own goes
to `lives/<number>/`; nothing is deleted but weights that nobody reads.

    checkpoints newer than the chosen one   a trainer that is started again would go on from them
    the ledger, if a copy replaces it       it knows groups of steps that are undone
    logs, the coordinator's journal         the next life writes its own
    config.toml (a copy)                    the next life's may say something else

Metrics, events, trace and audit log are appended to. Ended at any point and begun anew, it comes to the same. A life
that failed before its first step leaves the config.toml of the one before. Knows run directories; must not know how the
next life is started.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ...actors.checkpoints.folder import list_checkpoints
from ...actors.ledger.file import lock_ledger
from ...actors.ledger.resume import LEDGER, adopt_copy, begin_life, floor_of
from ...core.errors import LaunchError, LedgerError
from ..run_dir import RunDir
from .origin import Life, Origin, start_keeper
from .resume_point import CHECKPOINTS, ResumePoint
from .start_files import ORIGIN
from .undone import UNDONE, past_of, put_away

MOVED = ("logs", "coordinator.journal", "rdzv.json", "control.json")
DAMAGED = "damaged"
"""In `lives/<number>/`: what a copy in a checkpoint replaced."""
BUFFER_ENDS_S = 15.0
"""How long processes of a launcher that was killed may take to end."""
_LOOK_S = 0.1


@contextmanager
def no_longer_alive(run_dir: RunDir) -> Generator[None]:
    """Nobody else starts the run inside. Raises LaunchError if it still lives."""
    with run_dir.held():
        _await_buffer(run_dir.path / LEDGER)
        yield


def put_config_back(run_dir: RunDir) -> bool:
    """The newest life came to nothing: the next one begins with the config.toml of the one before it; whether that is
    another. Raises LaunchError if the disk refuses."""
    kept = past_of(run_dir.path, len(Origin.load(run_dir.path).lives) - 1) / run_dir.config.name
    if not kept.is_file() or kept.read_bytes() == run_dir.config.read_bytes():
        return False
    run_dir.post_config(kept.read_text(encoding="utf-8"))
    return True


def _await_buffer(ledger: Path) -> None:
    deadline_s = time.monotonic() + BUFFER_ENDS_S
    pause = threading.Event()
    while ledger.is_file():
        try:
            lock_ledger(ledger).close()
        except LedgerError as error:
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"the run's buffer still lives: {error.message}", remedy="end it first; `fuser` names the process"
                ) from error
            pause.wait(_LOOK_S)
        else:
            return


def begin_next_life(run_dir: RunDir, point: ResumePoint, config: str | None = None) -> Origin:
    """Make the directory what the next life expects. `config`: text of config.toml where the file is torn. Raises
    LaunchError or LedgerError if the disk refuses."""
    origin = Origin.load(run_dir.path)
    past = past_of(run_dir.path, len(origin.lives))
    try:
        _restore(run_dir, past, config)
        for info in list_checkpoints(run_dir.path / CHECKPOINTS):
            if info.version > point.version or (info.version == point.version and info.path != point.checkpoint):
                put_away(info.path, past / UNDONE)
        if not point.is_own_ledger:
            for end in ("", "-wal", "-shm"):
                put_away(run_dir.path / f"{LEDGER}{end}", past)
            adopt_copy(point.ledger, run_dir.path / LEDGER, run_dir.path.name)
        else:
            begin_life(run_dir.path / LEDGER, run_dir.path.name)
        if origin.lives:
            past.mkdir(parents=True, exist_ok=True)
            shutil.copy2(run_dir.config, past)
            for name in MOVED:
                put_away(run_dir.path / name, past)
        if point.checkpoint != point.place:
            point.checkpoint.replace(point.place)
        shutil.rmtree(run_dir.path / "weights", ignore_errors=True)
    except OSError as error:
        raise LaunchError(f"{run_dir.path} cannot be made ready: {error}", remedy="check disk and rights") from error
    life = Life(
        version=point.version,
        ledger=point.ledger_words,
        floor=floor_of(run_dir.path / LEDGER),
        passed_over=point.passed_over,
    )
    origin = msgspec.structs.replace(origin, lives=(*origin.lives, life))
    origin.save(run_dir.path)
    try:
        start_keeper(run_dir.path)(point.place)
    except OSError as error:
        raise LaunchError(f"{point.place} cannot be written: {error}", remedy="check disk and rights") from error
    return origin


def _restore(run_dir: RunDir, past: Path, config: str | None) -> None:
    """What is torn of config.toml and origin.json is put away, its copy takes its place. Raises OSError or
    LaunchError."""
    if config is not None:
        put_away(run_dir.config, past / DAMAGED)
        run_dir.post_config(config)
    origin, lost = Origin.found(run_dir.path)
    if lost:
        put_away(run_dir.path / ORIGIN, past / DAMAGED)
        origin.save(run_dir.path)
