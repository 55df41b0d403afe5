"""The command line's side of the control socket: finds the run, asks a verb, follows a stream. Synchronous.

A run is found by the note `control.json` that each launcher leaves. Knows the protocol (newline JSON), not
what verbs mean. Imports neither zmq nor asyncio: commands start fast.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import stat
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...core import errors
from ...core.errors import DeadlineExceeded, LaunchError, MyxaError, PeerDied
from ..run_dir import is_run_folder
from ..runtime_dir import PREFIX, short_base

RUNS = Path("runs")
"""Where run directories are looked for first when none is named."""
CONFIG = "config.toml"
"""What every run directory has."""
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
    """Unix socket, 0600: everything."""
    view: str
    """Unix socket that only shows."""
    pid: int
    """Of the launcher."""
    dashboard: str = ""
    """URL; empty: none."""

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
                f"no live run in this folder ({Path.cwd()}), only elsewhere:{listed}",
                remedy=f"to change that one: {command} --run {shlex.quote(found[0].run_dir)}",
            )
        if len(found) > 1:
            raise SeveralLiveRuns(f"{len(found)} runs are live:{listed}", remedy="say which one: --run RUN")
        return found[0]
    raise NoLiveRun(
        f"there is no live run here: none in {RUNS.resolve()}, and no other of this user",
        remedy="start one with `myxa up`, or name the run directory that it printed: --run RUN",
    )


def _named(named: Path) -> ControlNote:
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


CONNECT_S = 5.0
CHUNK_BYTES = 1 << 16


class ControlClient:
    """Asks one run. Each call has its own connection, so a client may be kept for any time."""

    def __init__(self, note: ControlNote, *, view: bool = False) -> None:
        self.note = note
        self.may_operate = not view
        """`view`: use the read-only socket, not the one that takes changes."""
        self._path = note.view if view else note.control

    @classmethod
    def of(cls, run: Path | None, *, view: bool = False) -> ControlClient:
        """Of the run directory, or of the only live run. Raises LaunchError naming what there is."""
        return cls(find_run(run), view=view)

    @property
    def run_dir(self) -> Path:
        """Of the run."""
        return Path(self.note.run_dir)

    def ask(self, verb: str, timeout_s: float = 30.0, **arguments: Any) -> Any:
        """The verb's answer, as JSON types. Raises the error that the run answered, with its remedy and exit code;
        DeadlineExceeded when it took longer, PeerDied when the run ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        with self._answers(verb, arguments, deadline) as lines:
            for line in lines:
                return _opened(line)["result"]
        raise PeerDied(f"the run ended before it answered {verb}", remedy="`myxa report RUN` shows how it ended")

    def follow(self, verb: str, **arguments: Any) -> Generator[Any]:
        """The verb's items as they come, until it ends or the run does. Close the iterator to stop."""
        with self._answers(verb, arguments, None) as lines:
            for line in lines:
                answer = _opened(line)
                if answer.get("end"):
                    return
                yield answer["item"] if "item" in answer else answer["result"]

    @contextmanager
    def _answers(self, verb: str, arguments: dict[str, Any], deadline: float | None) -> Generator[Iterator[bytes]]:
        """The lines that come back, until the other side closes."""
        request = json.dumps({"id": 1, "verb": verb, "args": arguments}).encode()
        with self._connected(verb, request + b"\n") as link:
            yield _lines(link, deadline, verb)

    @contextmanager
    def _connected(self, verb: str, request: bytes) -> Generator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(CONNECT_S)
            try:
                link.connect(self._path)
            except OSError as error:
                raise LaunchError(
                    f"the run in {self.note.run_dir} does not answer at {self._path}: {error.strerror or error}",
                    remedy="is it over? sockets belong to the user that started the run",
                ) from error
            try:
                link.sendall(request)
            except OSError as error:
                raise PeerDied(f"the run ended while it was asked to {verb}: {error.strerror or error}") from error
            yield link


def _lines(link: socket.socket, deadline: float | None, verb: str) -> Iterator[bytes]:
    """Whole lines until the other side closes."""
    kept = bytearray()
    while True:
        try:
            link.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            chunk = link.recv(CHUNK_BYTES)
        except TimeoutError:
            raise too_late(verb) from None
        except ConnectionError:
            return
        if not chunk:
            return
        kept += chunk
        *whole, rest = kept.split(b"\n") if b"\n" in chunk else (kept,)
        kept = bytearray(rest)
        yield from (bytes(line) for line in whole if line)


def too_late(verb: str) -> DeadlineExceeded:
    """The error of a call that passed its deadline."""
    return DeadlineExceeded(f"the run did not answer {verb} in time; it may still do it", remedy="see `myxa history`")


def _opened(line: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(line)
    if answer.get("ok"):
        return answer
    raise error_of(answer.get("error", {}))


def error_of(facts: dict[str, Any]) -> MyxaError:
    """The error that a run answered, of the same class where the class is ours."""
    named = getattr(errors, str(facts.get("type")), None)
    kind = named if isinstance(named, type) and issubclass(named, MyxaError) else MyxaError
    error = kind(str(facts.get("message", "?")), remedy=str(facts.get("remedy", "")))
    error.exit_code = int(facts.get("exit_code", 1))
    return error
