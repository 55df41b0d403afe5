"""The run's part of a checkpoint: with the trainer's it is all that a run needs to resume, here or as another run.

    version_00000040/
        ...                the trainer's files and their manifest.json (`folder.py`)
        ledger.sqlite      the ledger at one moment at which everything trained up to version 40 was in it
        start.json         config.toml and origin.json of the run, and their digest
        run.json           written last: size and digest of the ledger's copy, the run, its version

A checkpoint without a run.json is whole for the trainer: its run resumes from it as long as the run's own ledger is
there.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...core.errors import TrainError
from ...core.files import FileEntry, describe_file, write_durably
from ..ledger.file import LEDGER

RUN_FILE = "run.json"
FORMAT = 2
MAX_BYTES = 64 << 20
_REMEDY = "use an older checkpoint, or the run's own ledger"


class RunPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What run.json says."""

    format: int = FORMAT
    run: str
    """Name of the run directory that wrote it."""
    version: int
    ledger: FileEntry
    is_kept: bool = False
    """Whether it stays for ever (`trainer.keep_every`)."""


def write_run_part(folder: Path, part: RunPart, ledger: Path) -> None:
    """Move the copy of the ledger, which `part.ledger` describes, into the folder, and write run.json. Raises
    TrainError if the disk refuses."""
    try:
        ledger.replace(folder / LEDGER)
        write_durably(folder / RUN_FILE, msgspec.json.format(msgspec.json.encode(part), indent=2))
    except OSError as error:
        raise TrainError(
            f"cannot write the run's part of checkpoint {folder}: {error}", remedy="check disk and rights"
        ) from error


def read_run_part(folder: Path) -> RunPart:
    """What the folder's run.json says. Raises TrainError if there is none, or it cannot be read."""
    path = folder / RUN_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TrainError(f"{path} is larger than any honest one", remedy=_REMEDY)
        part = msgspec.json.decode(path.read_bytes(), type=RunPart)
    except FileNotFoundError as error:
        raise TrainError(f"{folder} has no {RUN_FILE}: the run ended while it was written", remedy=_REMEDY) from error
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TrainError(f"{path} cannot be read: {error}", remedy=_REMEDY) from error
    if part.format != FORMAT:
        raise TrainError(f"{path} has format {part.format}, this program reads {FORMAT}", remedy="use what wrote it")
    return part


def ledger_in(folder: Path) -> Path:
    """The checkpoint's copy of the ledger, every byte as it was written. Raises TrainError saying what is wrong."""
    entry, path = read_run_part(folder).ledger, folder / LEDGER
    try:
        found = describe_file(path)
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error}", remedy=_REMEDY) from error
    if found != entry:
        raise TrainError(
            f"{path} has changed: {found.num_bytes} bytes instead of {entry.num_bytes}, or others", remedy=_REMEDY
        )
    return path


def writing_run(folder: Path) -> str:
    """Name of the run that wrote it; empty if the folder does not say."""
    try:
        return read_run_part(folder).run
    except TrainError:
        return ""


def is_kept(folder: Path) -> bool:
    """Whether the folder says that it stays for ever. One that cannot be read does not."""
    try:
        return read_run_part(folder).is_kept
    except TrainError:
        return False
