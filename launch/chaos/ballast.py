"""A file that takes up space in the run directory for a while, as other people's files do.

Knows one folder. Whoever makes it says how large; nothing is taken from a disk that the machine itself lives on.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ...core.errors import ConfigError, LaunchError

BALLAST = "chaos-ballast"
NUM_TRIES = 5
"""To take all that is left, of a disk that others write to."""


class Ballast:
    """Of one run."""

    def __init__(self, folder: Path, spared: Path = Path("/")) -> None:
        """`spared`: on whose file system nothing is taken."""
        self._spared = spared
        self._path = folder / BALLAST

    def fill(self, size_bytes: int) -> int:
        """Take so many bytes, or what is left if that is less; returns how many. Blocks.

        Raises ConfigError where the folder is on the file system that is spared, LaunchError if the disk refuses.
        """
        folder = self._path.parent
        if folder.stat().st_dev == self._spared.stat().st_dev:
            raise ConfigError(
                f"{folder} is on the machine's own file system, which is not filled up",
                remedy="put run.dir on a file system of its own, such as a small tmpfs",
            )
        self.empty()
        return self._fill(size_bytes, NUM_TRIES)

    def _fill(self, size_bytes: int, num_tries: int) -> int:
        wanted = min(size_bytes, shutil.disk_usage(self._path.parent).free)
        try:
            return self._take(wanted)
        except LaunchError:
            if wanted == size_bytes or num_tries == 1:
                raise
        return self._fill(size_bytes, num_tries - 1)  # others have written meanwhile: less is left

    def _take(self, num_bytes: int) -> int:
        try:
            with self._path.open("wb") as file:
                if num_bytes:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            self.empty()
            raise LaunchError(f"{self._path} cannot be written: {error.strerror}", remedy="ask for less") from error
        return num_bytes

    def empty(self) -> None:
        """Give it all back."""
        self._path.unlink(missing_ok=True)
