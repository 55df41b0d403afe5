"""Begin a run from a checkpoint: a fork in its own directory, or the next life of a run in the same directory.

A fork only reads its parent:
    config.toml                the parent's, with overrides
    checkpoints/version_...    the checkpoint, by hard links where possible; the manifest copied: readers lock it
    ledger.sqlite              copied from the checkpoint; without a copy there, from a parent that has ended
    origin.json                parent and version

The next life moves to `lives/<number>/` what it would take for its own: newer checkpoints, the ledger if a copy
replaces it, logs, the coordinator's journal, a copy of config.toml. An interrupted move can be repeated. If a life
failed before its first step, `put_config_back` restores the previous config.toml.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

import msgspec

from ...actors.checkpoints.folder import (
    forget_writer,
    ledger_in,
    list_checkpoints,
    partial_of,
    read_manifest,
    writing_run,
)
from ...actors.hub import fetched
from ...actors.ledger.file import LEDGER, adopt_copy, begin_life, continue_ledger, is_in_use, lock_ledger, recorded
from ...core.config import RunConfig, dump_config, load_config
from ...core.errors import LaunchError, LedgerError, MyxaError, raised_as
from ..run_dir import CONFIG, RunDir, is_run_folder
from .origin import ORIGIN, START_FILE, UNDONE, Life, RunOrigin, config_of, past_of, put_away, start_keeper
from .resume_point import CHECKPOINTS, ResumePoint, choose_point


def fork_run(
    parent: Path,
    version: int | None,
    name: str,
    overrides: Sequence[str],
    now: datetime,
    check: Callable[[RunConfig], object] = lambda _: None,
) -> Path:
    """Returns the new run directory. `check` raises for a configuration with which the run could not begin; in it
    `trainer.resume` names the checkpoint. Raises what that does, LaunchError if there is nothing to begin from,
    ConfigError for what does not go together."""
    if not is_run_folder(parent):
        raise LaunchError(f"{parent} is no run directory", remedy="name the folder that `myxa up` printed")
    parent = parent.resolve()
    point = _choose(parent, version)
    renamed = [f"run.name={name}"] if name else []
    text, _ = config_of(parent)
    config = fetched(load_config(parent / CONFIG, [*overrides, *renamed, 'trainer.resume=""'], text=text))
    trainer = config.trainer.model_copy(update={"resume": str(point.checkpoint)})
    check(config.model_copy(update={"trainer": trainer}))
    run_dir = RunDir.create(config.run.dir, config.run.name, now, is_announced=False)
    try:
        place = run_dir.path / CHECKPOINTS / point.place.name
        share(point.checkpoint, place)
        if point.is_own_ledger:
            continue_ledger(point.ledger, run_dir.path / LEDGER, run_dir.path.name)
            if not writing_run(place):  # nothing else there names its run
                forget_writer(place)
        else:
            ledger_in(place)  # the manifest does not list it: it may have been deleted meanwhile
        run_dir.post_config(dump_config(config))
        program = RunOrigin.load(parent).program
        RunOrigin(program=program, parent=str(parent), parent_version=point.version, lives=()).save(run_dir.path)
        if (place / START_FILE).exists():  # the parent's
            start_keeper(run_dir.path)(place)
        run_dir.is_latest()
    except (OSError, MyxaError) as error:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise LaunchError(
            f"version {point.version} of {parent} could not be taken over: {error}",
            remedy="it may have been deleted meanwhile (trainer.keep_last): try again, or name another with --from",
        ) from error
    return run_dir.path


def _choose(parent: Path, version: int | None) -> ResumePoint:
    try:
        return choose_point(parent, version, needs_copy=True, reads_all=True)
    except LaunchError as error:
        if is_in_use(parent / LEDGER):
            raise
        try:
            return choose_point(parent, version, reads_all=True)
        except LaunchError:
            raise error from None


def share(checkpoint: Path, place: Path) -> None:
    """Link the files under another name. Raises OSError or TrainError if they are deleted or replaced meanwhile."""
    growing = partial_of(place)
    growing.mkdir(parents=True)
    source = os.open(checkpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(source) as files:
            for file in files:
                _take(source, file.name, growing)
    finally:
        os.close(source)
    read_manifest(growing)
    growing.replace(place)


def _take(source: int, name: str, folder: Path) -> None:
    try:
        os.link(name, folder / name, src_dir_fd=source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        with open(name, "rb", opener=partial(os.open, dir_fd=source)) as file, (folder / name).open("wb") as copy:
            shutil.copyfileobj(file, copy)


MOVED = ("logs", "coordinator.journal", "rdzv.json", "control.json")
DAMAGED = "damaged"
"""Folder in `lives/<number>/` for files that a copy from a checkpoint replaced."""
BUFFER_ENDS_S = 15.0
"""How long processes of a launcher that was killed may take to end."""
_LOOK_S = 0.1


@contextmanager
def no_longer_alive(run_dir: RunDir) -> Generator[None]:
    """Hold the run's directory and wait for its buffer to end. Raises LaunchError if the run still works."""
    with run_dir.held():
        _await_buffer(run_dir.path / LEDGER)
        yield


def put_config_back(run_dir: RunDir) -> bool:
    """Restore the config.toml of the life before one that failed at its start; whether it differs."""
    earlier = past_of(run_dir.path, len(RunOrigin.load(run_dir.path).lives) - 1) / run_dir.config.name
    if not earlier.is_file() or earlier.read_bytes() == run_dir.config.read_bytes():
        return False
    run_dir.post_config(earlier.read_text(encoding="utf-8"))
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
                    f"the run's buffer is still running: {error.message}",
                    remedy="end it first; `fuser` names the process",
                ) from error
            pause.wait(_LOOK_S)
        else:
            return


def begin_next_life(run_dir: RunDir, point: ResumePoint, config: str | None = None) -> RunOrigin:
    """Prepare the next life. `config`: of a torn config.toml. Raises LaunchError or LedgerError for the disk."""
    origin = RunOrigin.load(run_dir.path)
    past = past_of(run_dir.path, len(origin.lives))
    with raised_as(LaunchError, f"{run_dir.path} cannot be made ready", OSError, remedy="check disk and rights"):
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
    life = Life(
        version=point.version, ledger=point.ledger_words,
        floor=int(recorded(run_dir.path / LEDGER, "payload_floor")), passed_over=point.passed_over,
    )  # fmt: skip
    origin = msgspec.structs.replace(origin, lives=(*origin.lives, life))
    origin.save(run_dir.path)
    with raised_as(LaunchError, f"{point.place} cannot be written", OSError, remedy="check disk and rights"):
        start_keeper(run_dir.path)(point.place)
    return origin


def _restore(run_dir: RunDir, past: Path, config: str | None) -> None:
    """Replace torn config.toml and origin.json by their copies, and keep them. Raises OSError, LaunchError."""
    if config is not None:
        put_away(run_dir.config, past / DAMAGED)
        run_dir.post_config(config)
    origin, lost = RunOrigin.found(run_dir.path)
    if lost:
        put_away(run_dir.path / ORIGIN, past / DAMAGED)
        origin.save(run_dir.path)
