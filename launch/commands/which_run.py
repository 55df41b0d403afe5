"""Which run a command speaks to: said on stderr; for commands that change a run, one of this folder or a named one."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ...core.errors import LaunchError
from ..control.client import ControlClient
from ..control.live_runs import CONFIG, RUNS, ControlNote, find_run
from .output import say_first


def client_of(options: argparse.Namespace, *, changes: bool = False, view: bool = False) -> ControlClient:
    """Of the run that the command means. `changes`: the command changes the run. Raises LaunchError."""
    return ControlClient(note_of(options, changes=changes), view=view)


def note_of(options: argparse.Namespace, *, changes: bool = False) -> ControlNote:
    """The run's own note; see `client_of`."""
    note = find_run(options.run_path, command=_command(options) if changes else "")
    say_first(f"run {Path(note.run_dir).name} in {note.run_dir}")
    return note


def client_or_folder(options: argparse.Namespace, *, view: bool = False) -> ControlClient | Path:
    """The run's client; of a run that is over its folder, where the answer lies in files. Raises LaunchError."""
    try:
        return client_of(options, view=view)
    except LaunchError as error:
        folder = options.run_path if options.run_path is not None else RUNS / "latest"
        if not (folder / CONFIG).is_file() or "runs go on" in error.message:
            raise
        folder = folder.resolve()
        say_first(f"run {folder.name} in {folder} is over: this is from its files")
        return folder


def folder_of(options: argparse.Namespace) -> Path:
    """The folder of the run that the command means, whether the run goes on or is over. Raises LaunchError."""
    found = client_or_folder(options)
    return found if isinstance(found, Path) else found.run_dir


def _command(options: argparse.Namespace) -> str:
    return shlex.join(["myxa", *getattr(options, "words", ())])
