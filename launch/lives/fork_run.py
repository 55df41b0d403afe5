"""Make the directory of a run that begins where a checkpoint of another run stands. The other run is only read.

    config.toml                the other run's, with what is to be different
    checkpoints/version_...    the checkpoint; its files are shared with the other run by hard links, where they can be;
                               its manifest is copied, since readers lock it
    origin.json                which run and version

Every byte of it is looked at: the new run has no older one that it could pass over to.

The checkpoint holds a copy of the ledger, so that nothing is asked of a run that lives. One without (of an older
version of myxa, or cut off at its end) needs a run that is over, whose ledger is copied. Knows files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path

from ...actors.checkpoints.folder import MANIFEST, being_read, forget_writer, partial_of, read_manifest
from ...actors.checkpoints.run_part import START_FILE, ledger_in, writing_run
from ...actors.ledger.file import is_in_use
from ...actors.ledger.resume import LEDGER, continue_ledger
from ...core.config import RunConfig, dump_config, load_config
from ...core.errors import LaunchError, MyxaError
from ..run_dir import RunDir, is_run_folder
from .origin import Origin, start_keeper
from .resume_point import CHECKPOINTS, ResumePoint, choose_point
from .start_files import CONFIG, config_of


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
    named = [f"run.name={name}"] if name else []
    text, _ = config_of(parent)
    config = load_config(parent / CONFIG, [*overrides, *named, 'trainer.resume=""'], text=text)
    trainer = config.trainer.model_copy(update={"resume": str(point.checkpoint)})
    check(config.model_copy(update={"trainer": trainer}))
    run_dir = RunDir.create(config.run.dir, config.run.name, now, is_announced=False)
    try:
        place = run_dir.path / CHECKPOINTS / point.place.name
        share(point.checkpoint, place)
        if point.is_own_ledger:
            continue_ledger(point.ledger, run_dir.path / LEDGER, run_dir.path.name)
            if not writing_run(place):  # nothing else there says that it is of another run
                forget_writer(place)
        else:
            ledger_in(place)  # the manifest does not tell of it: it may have gone while the files were taken
        run_dir.config.write_text(dump_config(config), encoding="utf-8")
        program = Origin.load(parent).program
        Origin(program=program, parent=str(parent), parent_version=point.version, lives=()).save(run_dir.path)
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
    """The same files under another name; nobody ever writes into a checkpoint's files. Raises OSError or TrainError if
    the checkpoint goes meanwhile; one that takes its place leaves none of its files here."""
    growing = partial_of(place)
    growing.mkdir(parents=True)
    with being_read(checkpoint):
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
    if name == MANIFEST:  # under two names it would have one lock, and readers here would keep the other's from going
        _copy(source, name, folder)
        return
    try:
        os.link(name, folder / name, src_dir_fd=source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        _copy(source, name, folder)


def _copy(source: int, name: str, folder: Path) -> None:
    with open(name, "rb", opener=partial(os.open, dir_fd=source)) as file, (folder / name).open("wb") as copy:
        shutil.copyfileobj(file, copy)
