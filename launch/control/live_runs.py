"""Which run is meant: the live runs of this user on this host, found by the note that each launcher leaves.

Knows `control.json` and where launchers put their runtime folders. Opens no socket and imports no transport, because
every command starts here.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.errors import LaunchError
from ..run_dir import is_run_folder
from ..runtime_dir import PREFIX, short_base

RUNS = Path("runs")
"""Where run directories are looked for first when none is named."""
CONFIG = "config.toml"
"""What every run directory has."""
NOTE = "control.json"
"""In the run directory and, for finding it, in the launcher's runtime folder."""


class ControlNote(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live run is spoken to. Paths only; it holds no secret."""

    run_dir: str
    control: str
    """Unix socket, 0600: everything."""
    view: str
    """Unix socket that only shows."""
    pid: int
    """Of the launcher."""
    tcp: str = ""
    """"host:port" for other hosts (CURVE); empty: none."""
    tcp_key: str = ""
    """Public key of that endpoint."""
    dashboard: str = ""
    """URL; empty: none."""
    key_file: str = ""
    """On another host: our own key pair, which the run admits."""

    @property
    def is_remote(self) -> bool:
        """Whether it is spoken to over the network."""
        return self.key_file != ""

    def save(self, folder: Path) -> None:
        """Write it in one step: a reader sees all of it or no file."""
        draft = folder / f".{NOTE}.{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(self))
        draft.replace(folder / NOTE)

    @classmethod
    def load(cls, folder: Path) -> ControlNote | None:
        """What `save` wrote; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode((folder / NOTE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def facts(self) -> dict[str, object]:
        """As JSON types."""
        return msgspec.to_builtins(self)

    @property
    def is_live(self) -> bool:
        """Whether the launcher's socket is still there; its folder goes with the launcher."""
        try:
            return stat.S_ISSOCK(Path(self.view).stat().st_mode)
        except OSError:
            return False


def find_run(named: Path | None, *, command: str = "") -> ControlNote:
    """The run that is named, else the only live one: of `runs/` here, of this folder or one below, or else of this user
    on this host. `command`: what was typed, of a command that changes the run: one elsewhere has to be named.

    Raises LaunchError when there is none, or more than one to choose from, which it lists.
    """
    if named is not None:
        return _named(named)
    of_user = _live(_of_this_user())
    for found in (_live(RUNS.glob(f"*/{NOTE}")), [note for note in of_user if _is_below_here(note)], of_user):
        if not found:
            continue
        listed = "".join(f"\n  {note.run_dir}" for note in found)
        if command and found is of_user:
            raise LaunchError(
                f"no run of this folder goes on ({Path.cwd()}), only elsewhere:{listed}",
                remedy=f"to change that one: {command} --run {shlex.quote(found[0].run_dir)}",
            )
        if len(found) > 1:
            raise LaunchError(f"{len(found)} runs go on:{listed}", remedy="say which one: --run RUN")
        return found[0]
    raise LaunchError(
        f"no run goes on here: none in {RUNS.resolve()}, and no other of this user",
        remedy="start one with `myxa up`, or name the run directory that it printed: --run RUN",
    )


def _named(named: Path) -> ControlNote:
    if named.is_file():
        return _remote(named)
    note = ControlNote.load(named)
    if note is not None and note.is_live:
        return note
    if not named.is_dir():
        raise LaunchError(f"there is no run directory {named}", remedy="`myxa up` prints it when it starts")
    if note is None and not is_run_folder(named):
        raise LaunchError(
            f"{named} is no run directory: there is no {CONFIG} in it",
            remedy="name the folder that `myxa up` printed, one of those in run.dir",
        )
    why = "its launcher is gone" if note is not None else "it is over, or has control.socket = false, or is elsewhere"
    raise LaunchError(f"the run in {named} cannot be spoken to: {why}", remedy="do this on the host of `myxa up`")


def _remote(file: Path) -> ControlNote:
    """What `myxa control remote` wrote."""
    try:
        note = msgspec.json.decode(file.read_bytes(), type=ControlNote)
    except (OSError, msgspec.DecodeError) as error:
        raise LaunchError(
            f"{file} says not where a run is: {error}", remedy="`myxa control remote` writes one"
        ) from None
    if not (note.tcp and note.tcp_key and note.key_file):
        raise LaunchError(f"{file} names no endpoint with keys", remedy="`myxa control remote` writes such a file")
    return note


def _live(notes: Iterator[Path]) -> list[ControlNote]:
    found = {note.run_dir: note for path in notes if (note := ControlNote.load(path.parent)) is not None}
    return [found[name] for name in sorted(found) if found[name].is_live]


def _is_below_here(note: ControlNote) -> bool:
    try:
        return Path(note.run_dir).resolve().is_relative_to(Path.cwd())
    except OSError:
        return False


def _of_this_user() -> Iterator[Path]:
    try:
        folders = [path for path in Path(short_base()).glob(f"{PREFIX}*") if _is_ours(path)]
    except (LaunchError, OSError):
        return
    yield from (path / NOTE for path in folders)


def _is_ours(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
