"""Where a run comes from: its parent, if it was forked, and its lives. A life is one start of the run in its directory.

`origin.json` in the run directory records both. Checkpoints hold copies of it and of `config.toml`; if a file is torn,
its newest copy is used. Checkpoints that training went back behind are moved to `lives/<number>/undone`, so that none
is taken for the newest. Nothing is deleted.
"""

from __future__ import annotations

import errno
import hashlib
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ...actors.checkpoints.folder import CheckpointInfo, version_in
from ...core.errors import LaunchError, raised_as
from ...core.files import read_regular, write_durably
from ..run_dir import CONFIG
from ..worker_spec import DEFAULT_PROGRAM

CHECKPOINTS = "checkpoints"
ORIGIN = "origin.json"
START_FILE = "start.json"
"""Of a checkpoint: the copies of both."""


MAX_BYTES = 16 << 20


class WentBack(msgspec.Struct, frozen=True, kw_only=True):
    """A restart of the trainer gang, or a start from an older checkpoint than the chosen one."""

    attempt: int
    """0: the first of the life: the chosen checkpoint turned out to be damaged when it was loaded."""
    version: int


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run."""

    version: int = 0
    """Version chosen to begin from; 0: the model folder, or what `trainer.resume` named."""
    ledger: str = ""
    """Which ledger it continued with, in words."""
    floor: int = 0
    """Oldest version that this ledger could go back to at that time."""
    passed_over: tuple[str, ...] = ()
    """Checkpoints that could not be used, newest first, each with the reason."""
    gang: tuple[WentBack, ...] = ()
    """Later attempts of its trainer gang."""

    @property
    def began_at(self) -> int:
        return next((back.version for back in self.gang if back.attempt == 0), self.version)


class RunOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Content of origin.json."""

    program: str = DEFAULT_PROGRAM
    """Composition root that the run was started with."""
    parent: str = ""
    """Run directory of the parent; empty: it was not forked."""
    parent_version: int = -1
    lives: tuple[Life, ...] = (Life(),)

    def save(self, run_dir: Path) -> None:
        """Write it in one step. Raises LaunchError if the disk refuses."""
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        with raised_as(LaunchError, f"{run_dir / ORIGIN} cannot be written", OSError, remedy="check disk"):
            write_durably(run_dir / ORIGIN, text)

    @classmethod
    def load(cls, run_dir: Path) -> RunOrigin:
        """What `save` wrote; of a torn file its newest copy in a checkpoint; without either that of a first life.
        Raises LaunchError if it cannot be read: a guess could take an undone life for the newest."""
        return cls.found(run_dir)[0]

    @classmethod
    def found(cls, run_dir: Path) -> tuple[RunOrigin, str]:
        """The same, and why a copy was used; empty: the file was read."""
        path = run_dir / ORIGIN
        try:
            return msgspec.json.decode(read_regular(path, MAX_BYTES), type=cls), ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            copy, place = _newest_copy(run_dir)
            if copy is not None:
                return copy.origin, f"{path} cannot be read ({error}): its copy in {place} is taken"
            if isinstance(error, FileNotFoundError):
                return cls(), ""
            raise LaunchError(
                f"{path}, the record of the run's lives, cannot be read: {error}",
                remedy="correct it (it is JSON), or remove it if the run was started once, by `myxa up`",
            ) from error

    def went_back(self, attempt: int, version: int) -> RunOrigin:
        """The same, with another attempt of this life's trainer gang."""
        life = self.lives[-1]
        life = msgspec.structs.replace(life, gang=(*life.gang, WentBack(attempt=attempt, version=version)))
        return msgspec.structs.replace(self, lives=(*self.lives[:-1], life))

    def why_undone(self, info: CheckpointInfo) -> str:
        """Why a checkpoint is undone: its writer learnt too late that training had gone back. Empty: it is valid."""
        if info.writer is None:
            return ""
        by_life, by_attempt = info.writer
        for number, life in enumerate(self.lives, 1):
            if number > by_life and info.version > life.version:
                return f"it is of life {by_life}, and life {number} went back to version {life.version}"
            for later in life.gang:
                if (number, later.attempt) > (by_life, by_attempt) and info.version > later.version:
                    return f"the trainer gang wrote it before it went back to version {later.version}"
        return ""

    def in_words(self) -> str:
        """Parent and lives; empty for a run that was started once, from nothing."""
        parts = [f"forked from version {self.parent_version} of {self.parent}"] if self.parent else []
        if len(self.lives) > 1:
            parts.append(f"life {len(self.lives)}, from version {self.lives[-1].began_at}")
        return "; ".join(parts)


def origin_events(run_dir: Path) -> tuple[tuple[str, str], ...]:
    """Kinds and texts of the events to record once the trainer of this life has begun."""
    origin = RunOrigin.load(run_dir)
    life = origin.lives[-1]
    events = [("checkpoint-passed-over", text) for text in life.passed_over]
    if len(origin.lives) > 1:
        events.append(
            ("resumed", f"life {len(origin.lives)} continues from version {life.began_at} with {life.ledger}")
        )
    elif origin.parent:
        events.append(("forked", f"from version {origin.parent_version} of {origin.parent}, with {life.ledger}"))
    return tuple(events)


class StartCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Content of start.json."""

    config: str
    origin: RunOrigin
    sha256: str = ""
    """Of the two."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode((self.config, self.origin))).hexdigest()


def start_keeper(run_dir: Path) -> Callable[[Path], None]:
    """A function that copies config.toml, as it is now, and origin.json into a checkpoint. It may raise OSError."""
    try:
        config = read_regular(run_dir / CONFIG, MAX_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return lambda _: None

    def keep(checkpoint: Path) -> None:
        with suppress(LaunchError):  # an unreadable origin.json is not copied
            copy = StartCopy(config=config, origin=RunOrigin.load(run_dir))
            copy = msgspec.structs.replace(copy, sha256=copy.digest())
            write_durably(checkpoint / START_FILE, msgspec.json.format(msgspec.json.encode(copy), indent=2))

    return keep


def _newest_copy(run_dir: Path) -> tuple[StartCopy | None, str]:
    """The copy of the latest life, in its newest checkpoint, and that one's name."""
    copies: list[tuple[int, int, str, StartCopy]] = []
    for path in (run_dir / CHECKPOINTS).glob(f"*/{START_FILE}"):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            copy = msgspec.json.decode(read_regular(path, MAX_BYTES), type=StartCopy)
            if copy.sha256 == copy.digest():
                copies.append((len(copy.origin.lives), version_in(path.parent), path.parent.name, copy))
    _, _, name, copy = max(copies, key=lambda entry: entry[:3], default=(0, 0, "", None))
    return copy, name


def config_of(run_dir: Path) -> tuple[str | None, str]:
    """(text of config.toml as the newest copy has it, why), or (None, ""): read the file itself."""
    copy, place = _newest_copy(run_dir)
    if copy is None or not (trouble := _trouble(run_dir / CONFIG, copy.config)):
        return None, ""
    return copy.config, f"{run_dir / CONFIG} {trouble}: its copy in {place} is taken"


def _trouble(path: Path, copy: str) -> str:
    """Why a file is torn. One that is no TOML but has most of its lines is a person's, who made an error in it."""
    text = ""
    try:
        text = read_regular(path, MAX_BYTES).decode("utf-8-sig")
        if text.strip() != copy.strip() and copy.startswith(text.rstrip()):
            return "is cut off"
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        lines = set(copy.splitlines())
        return "" if len(lines & set(text.splitlines())) * 2 > len(lines) else "is no TOML"
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    return ""


LIVES = "lives"
UNDONE = "undone"


def past_of(run_dir: Path, life: int) -> Path:
    """Folder of what that life left behind."""
    return run_dir / LIVES / str(life)


def put_away(path: Path, folder: Path) -> None:
    """Move it there, under a unique name, if it exists; where that is another disk (`checkpoints` may be a link, or a
    mount), to a hidden name beside it. Raises OSError."""
    if not path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    target, number = folder / path.name, 1
    while target.exists():
        number += 1
        target = folder / f"{path.name}.{number}"
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        path.replace(path.with_name(f".{folder.parent.name}-{folder.name}-{target.name}"))
