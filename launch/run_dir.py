"""Where a run keeps its files: logs, configuration, metrics, checkpoints, report. It stays after the run.

It handles paths and links, not the content of files.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..core.errors import LaunchError, raised_as
from ..core.files import is_locked, lock_remedy, take_lock, write_durably

LOCK = ".launcher.lock"
CONFIG = "config.toml"
"""What every run directory has."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run; made by `create` on node 0, joined by the others."""

    path: Path

    @classmethod
    def create(cls, parent: str, name: str, now: datetime, *, is_announced: bool = True) -> RunDir:
        """Make `<parent>/<name>-<stamp>`, and `<parent>/latest` (unless `is_latest`). Raises LaunchError."""
        stamp = now.strftime("%Y%m%d-%H%M%S")
        base = Path(parent)
        for suffix in ("", *(f"-{n}" for n in range(2, 100))):
            path = base / f"{name}-{stamp}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise LaunchError(f"{path} cannot be made: {error.strerror}", remedy="set run.dir") from error
            run_dir = cls.join(str(path))
            if is_announced:
                run_dir.is_latest()
            return run_dir
        raise LaunchError(f"{base} holds a hundred runs of this second", remedy="set run.dir")

    @classmethod
    def join(cls, path: str) -> RunDir:
        """Make sure that an already named run directory is there, with its folders."""
        run_dir = cls(Path(path))
        with raised_as(LaunchError, f"{run_dir.logs} cannot be made", OSError, remedy="set run.dir"):
            (run_dir.logs / "latest").mkdir(parents=True, exist_ok=True)
        return run_dir

    @contextmanager
    def held(self) -> Generator[None]:
        """This launcher's alone, until the block or the process ends. Raises LaunchError if another one has it."""
        try:
            handle = take_lock(self.path / LOCK)
        except OSError as error:
            remedy = lock_remedy(error, "check its rights")
            raise LaunchError(f"{self.path / LOCK} cannot be taken: {error.strerror}", remedy=remedy) from error
        if handle is None:
            raise LaunchError(
                f"the run in {self.path} is still running", remedy="end it first: myxa down; or `myxa fork` it"
            )
        with handle:
            yield

    @property
    def is_held(self) -> bool:
        return is_locked(self.path / LOCK)

    def is_latest(self) -> None:
        """From now on `latest` beside it links to it."""
        _point(self.path.parent / "latest", self.path.name)

    @property
    def logs(self) -> Path:
        """One file per actor and attempt; `latest/` links to the newest attempts."""
        return self.path / "logs"

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    def post_config(self, text: str) -> None:
        """Write the resolved configuration in one step. Raises LaunchError."""
        with raised_as(LaunchError, f"{self.config} cannot be written", OSError, remedy="set run.dir"):
            # Where node 0 has written it for all, nodes that write at the same time would take each other's draft.
            if not self.config.is_file() or self.config.read_bytes() != text.encode():
                write_durably(self.config, text.encode())

    @property
    def rdzv(self) -> Path:
        """Exists while the run works: how programs of this host join it (see embed.py)."""
        return self.path / "rdzv.json"

    def log_path(self, actor: str, attempt: int) -> Path:
        """Log file of one attempt: `rollout/1` -> `logs/rollout.1.0.log`."""
        return self.logs / f"{_stem(actor)}.{attempt}.log"

    def new_log(self, actor: str, attempt: int) -> Path:
        """The same, and from now on `logs/latest/rollout.1.log` links to it."""
        path = self.log_path(actor, attempt)
        _point(self.logs / "latest" / f"{_stem(actor)}.log", f"../{path.name}")
        return path


def is_run_folder(folder: Path) -> bool:
    """Whether that is a run directory: with its config.toml, or a copy of it in a checkpoint."""
    return (folder / CONFIG).is_file() or any(folder.glob("checkpoints/*/start.json"))


def _stem(actor: str) -> str:
    return actor.replace("/", ".")


def _point(link: Path, target: str) -> None:
    """Make or move a symbolic link in one step, so that readers never see it missing."""
    new = link.with_name(f".{link.name}.{os.getpid()}")
    with raised_as(LaunchError, f"link {link} cannot be made", OSError, remedy="set run.dir"):
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(link)
