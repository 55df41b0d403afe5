"""The command line's side of the control socket: finds the run and asks a verb. Synchronous.

A run is found by the note `control.json` that each launcher leaves. Imports neither zmq nor asyncio: commands start
fast.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ...core import errors
from ...core.errors import DeadlineExceeded, LaunchError, MyxaError, PeerDied, raised_as
from ...core.files import write_durably
from ..run_dir import CONFIG, LOCK, RunDir, is_run_folder
from ..runtime_dir import PREFIX, short_base
from ..verbs import BY_NAME, HOST, SPARE_S

RUNS = Path("runs")
"""Where run directories are looked for first when none is named."""
NOTE = "control.json"
"""In the run directory and, for finding it, in the launcher's runtime folder."""


class NoLiveRun(LaunchError):
    """No run of this user is live on this host."""


class SeveralLiveRuns(LaunchError):
    """More than one live run could be meant."""


class ControlNote(msgspec.Struct, frozen=True, kw_only=True):
    """Where a live run is reached. Paths only; it holds no secret."""

    run_dir: str
    control: str
    """Unix socket, 0600."""
    pid: int

    def save(self, folder: Path) -> None:
        """Write it in one step: a reader sees all of it or no file."""
        write_durably(folder / NOTE, msgspec.json.encode(self))

    @classmethod
    def load(cls, folder: Path) -> ControlNote | None:
        """What `save` wrote; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode((folder / NOTE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    @property
    def is_live(self) -> bool:
        """Whether a launcher of this user listens there."""
        with socket.socket(socket.AF_UNIX) as link:
            link.setblocking(False)
            try:
                link.connect(self.control)
            except BlockingIOError:  # it is busy
                return True
            except OSError:
                return False
        return True


def find_run(folder: Path | None, *, command: str = "", is_elsewhere_meant: bool = True) -> ControlNote:
    """The run of that directory, else the only live one: of `runs/` here, of this folder or one below, or else (unless
    not `is_elsewhere_meant`) of this user on this host. `command`: what was typed, of a command that changes the run:
    one elsewhere has to be named. Raises LaunchError when there is none, or several to choose from, which it lists."""
    if folder is not None:
        return _run_in(folder)
    of_user = _live(_of_this_user())
    for notes in (_live(RUNS.glob(f"*/{NOTE}")), [note for note in of_user if _is_below_here(note)], of_user):
        if not notes or (notes is of_user and not is_elsewhere_meant):
            continue
        listed = "".join(f"\n  {note.run_dir}" for note in notes)
        if command and notes is of_user:
            raise LaunchError(
                f"no live run in this folder ({Path.cwd()}), only elsewhere:{listed}",
                remedy=f"to change that one: {command} --run {shlex.quote(notes[0].run_dir)}",
            )
        if len(notes) > 1:
            raise SeveralLiveRuns(f"{len(notes)} runs are live:{listed}", remedy="say which one: --run RUN")
        return notes[0]
    raise NoLiveRun(
        f"there is no live run here: none in {RUNS.resolve()}, and no other of this user",
        remedy="start one with `myxa up`, or name the run directory that it printed: --run RUN",
    )


def _run_in(folder: Path) -> ControlNote:
    note = ControlNote.load(folder)
    if note is not None and note.is_live:
        return note
    if note is None and not is_run_folder(folder):
        run_dir = next(filter(is_run_folder, folder.absolute().parents), None)
        candidate = f"its run, {run_dir}" if run_dir else "the folder that `myxa up` printed, one of those in run.dir"
        cause = f"{folder} is no run directory: there is no {CONFIG} in it"
        cause = cause if folder.is_dir() else f"there is no run directory {folder}"
        raise LaunchError(cause, remedy=f"name {candidate}")
    if (folder / LOCK).exists() and not RunDir(folder).is_held:
        resume = f"`myxa resume {shlex.quote(str(folder))}` continues it"
        remedy = f"{resume}; why, ps, logs, samples and report read its files"
        raise LaunchError(f"the run in {folder} cannot be spoken to: it is over", remedy=remedy)
    why = "its launcher is gone" if note is not None else "it is over, or has control.socket = false, or is elsewhere"
    raise LaunchError(f"the run in {folder} cannot be spoken to: {why}", remedy="do this on the host of `myxa up`")


def _live(notes: Iterator[Path]) -> list[ControlNote]:
    by_folder = {note.run_dir: note for path in notes if (note := ControlNote.load(path.parent)) is not None}
    return [note for _, note in sorted(by_folder.items()) if note.is_live]


def _is_below_here(note: ControlNote) -> bool:
    try:
        return Path(note.run_dir).resolve().is_relative_to(Path.cwd())
    except OSError:
        return False


def _of_this_user() -> Iterator[Path]:
    with suppress(LaunchError, OSError):
        for folder in Path(short_base()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                facts = folder.lstat()
                if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077:
                    yield folder / NOTE


CONNECT_S = 5.0
OK = 200


class ControlClient:
    """Asks one run. Each call has its own connection, so a client may be kept for any time."""

    def __init__(self, note: ControlNote) -> None:
        self.note = note

    @classmethod
    def of(cls, run: Path | None) -> ControlClient:
        """Of the run directory, or of the only live run. Raises LaunchError naming what there is."""
        return cls(find_run(run))

    @property
    def run_dir(self) -> Path:
        return Path(self.note.run_dir)

    def ask(self, verb: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        """The verb's answer, as JSON types. Raises the run's own error; DeadlineExceeded after `timeout_s` (None: as
        long as the verb may take), PeerDied when the run ended meanwhile."""
        if timeout_s is None:
            timeout_s = BY_NAME[verb].patience_s(arguments) if verb in BY_NAME else SPARE_S
        from http.client import HTTPConnection, HTTPException  # commands that ask nothing start without it

        connection = HTTPConnection(HOST)
        connection.sock = link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(CONNECT_S)
            problem = f"the run in {self.note.run_dir} does not answer at {self.note.control}"
            remedy = "is it over? sockets belong to the user that started the run"
            with raised_as(LaunchError, problem, OSError, remedy=remedy):
                link.connect(self.note.control)
            link.settimeout(timeout_s)
            with suppress(ConnectionError):  # it may have answered without reading everything
                body, head = msgspec.json.encode(arguments), {"Content-Type": "application/json"}
                connection.request("POST", f"/{verb}", body, head)
            response = connection.getresponse()
            answer = msgspec.json.decode(response.read())
        except TimeoutError:
            raise DeadlineExceeded(
                f"the run did not answer {verb} in time; it may still do it", remedy="see `myxa history`"
            ) from None
        except (HTTPException, ConnectionError):
            raise PeerDied(
                f"the run ended before it answered {verb}", remedy="`myxa report RUN` shows how it ended"
            ) from None
        finally:
            connection.close()
        if response.status != OK:
            raise error_of(answer["error"])
        return answer


def error_of(facts: dict[str, Any]) -> MyxaError:
    """The error that a run answered, of the same class where the class is ours."""
    kind = getattr(errors, str(facts.get("type")), None)
    kind = kind if isinstance(kind, type) and issubclass(kind, MyxaError) else MyxaError
    error = kind(str(facts.get("message", "?")), remedy=str(facts.get("remedy", "")))
    error.exit_code = int(facts.get("exit_code", 1))
    return error
