"""Where a run comes from: the run that it was forked from, and its own lives, one for each time that it was started.

Knows `origin.json`, which lies in the run directory. Must not know how a life is chosen or begun.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ...actors.checkpoints.folder import CheckpointInfo
from ...actors.checkpoints.run_part import StartCopy, write_start_copy
from ...core.errors import LaunchError
from ...core.files import read_regular, write_durably
from ..worker_spec import DEFAULT_PROGRAM
from .start_files import ORIGIN, config_text, newest_copy

MAX_BYTES = 16 << 20


class WentBack(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer gang that was started again, or could not begin where its life was to."""

    attempt: int
    """0: the life's first; the checkpoint that was chosen turned out to be damaged when it was loaded."""
    version: int
    """It went on from."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the run."""

    version: int = 0
    """It was to begin from; 0: the model folder, or what `trainer.resume` named."""
    ledger: str = ""
    """Which ledger it went on with, in words."""
    floor: int = 0
    """The oldest version that this ledger could go back to then."""
    passed_over: tuple[str, ...] = ()
    """Checkpoints that could not be used, newest first, each with the reason."""
    gang: tuple[WentBack, ...] = ()
    """Its trainer's later attempts."""

    @property
    def began_at(self) -> int:
        """Version that it began from in the end."""
        return next((back.version for back in self.gang if back.attempt == 0), self.version)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What origin.json says."""

    program: str = DEFAULT_PROGRAM
    """Composition root that it was started with."""
    parent: str = ""
    """Run directory that it was forked from; empty: from none."""
    parent_version: int = -1
    lives: tuple[Life, ...] = (Life(),)

    def save(self, run_dir: Path) -> None:
        """Write it in one step. Raises LaunchError if the disk refuses."""
        try:
            write_durably(run_dir / ORIGIN, self.text.encode())
        except OSError as error:
            raise LaunchError(f"{run_dir / ORIGIN} cannot be written: {error.strerror}", remedy="check disk") from error

    @property
    def text(self) -> str:
        """As origin.json has it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    @classmethod
    def load(cls, run_dir: Path) -> Origin:
        """What `save` wrote, or where it is torn what its newest copy in a checkpoint says; that of a first life where
        there is nothing. Raises LaunchError if it cannot be read: a guess would start another program, or take a life
        that is undone for the newest."""
        return cls.found(run_dir)[0]

    @classmethod
    def found(cls, run_dir: Path) -> tuple[Origin, str]:
        """The same, and why it is not the file's own word; empty: it is."""
        path = run_dir / ORIGIN
        try:
            return msgspec.json.decode(read_regular(path, MAX_BYTES), type=cls), ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            failure = error
        newest = newest_copy(run_dir)
        is_missing = isinstance(failure, FileNotFoundError)
        if newest is not None:
            copy, place = newest
            trouble = "is missing" if is_missing else f"cannot be read ({failure})"
            return msgspec.json.decode(copy.origin, type=cls), f"{path} {trouble}: its copy in {place.name} is taken"
        if is_missing:
            return cls(), ""
        raise LaunchError(
            f"{path}, which tells of the run's lives, cannot be read: {failure}",
            remedy="mend it (it is JSON), or remove it if the run was started once, by `myxa up`",
        ) from failure

    def went_back(self, attempt: int, version: int) -> Origin:
        """The same, with another attempt of this life's trainer gang."""
        life = self.lives[-1]
        life = msgspec.structs.replace(life, gang=(*life.gang, WentBack(attempt=attempt, version=version)))
        return msgspec.structs.replace(self, lives=(*self.lives[:-1], life))

    def why_undone(self, info: CheckpointInfo) -> str:
        """Why a checkpoint is none of this run's past any more, although it lies there: whoever wrote it was told too
        late that training had gone back behind it. Empty if it is, or does not say who wrote it."""
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
        words: list[str] = []
        if self.parent:
            words.append(f"forked from version {self.parent_version} of {self.parent}")
        if len(self.lives) > 1:
            words.append(f"life {len(self.lives)}, from version {self.lives[-1].began_at}")
        return "; ".join(words)


def origin_events(run_dir: Path) -> tuple[tuple[str, str], ...]:
    """Kinds and texts of what is to be told at the beginning of this life, once its trainer has begun."""
    origin = Origin.load(run_dir)
    life = origin.lives[-1]
    told = [("checkpoint-passed-over", text) for text in life.passed_over]
    if len(origin.lives) > 1:
        told.append(("resumed", f"life {len(origin.lives)} goes on from version {life.began_at} with {life.ledger}"))
    elif origin.parent:
        told.append(("forked", f"from version {origin.parent_version} of {origin.parent}, with {life.ledger}"))
    return tuple(told)


def start_keeper(run_dir: Path) -> Callable[[Path], None]:
    """What copies the run's config.toml, as it is now, and its origin.json into one of its checkpoints. A run that has
    neither gets no copy. What is made may raise OSError."""
    try:
        config = config_text(run_dir)
    except (OSError, UnicodeDecodeError):
        return lambda _: None

    def keep(checkpoint: Path) -> None:
        with suppress(LaunchError):  # an origin.json that cannot be read has no copy to be made
            write_start_copy(checkpoint, StartCopy(config=config, origin=Origin.load(run_dir).text))

    return keep
