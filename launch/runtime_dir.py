"""The folder for sockets and process descriptions: a scratch folder (core/files.py) that goes with its launcher, or, if
that was killed, with the next launcher of this host.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError
from ..core.files import SCRATCH, locked_folder, locked_scratch, remove_dead_scratch, write_durably
from ..transport.address import make_private

PURPOSE = "run"
PREFIX = f"{SCRATCH}{PURPOSE}-"
"""How the names of these folders begin."""
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""
SOCKET_NAME_ROOM = 48
"""Longest socket name below the folder that is planned for."""
LOOK_S = 0.5
"""How often a launcher looks whether its folder is there."""
LOCK_S = 1.0
_log = logging.getLogger("myxa.launcher")


class RuntimeDir:
    """A new folder, only for this user (0700), with a short path. Use as a context manager.

    Raises LaunchError if no base folder is writable and short enough for a socket's path.
    """

    def __init__(self) -> None:
        base = short_base()
        remove_dead_scratch(base)
        self._held = ExitStack()
        self.path = Path(self._held.enter_context(locked_scratch(PURPOSE, base)).name)
        self._inode = self.path.stat().st_ino

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(self, *error: Any) -> None:
        """Remove the folder, and what killed actors left in others."""
        self._held.close()
        remove_dead_scratch()

    @asynccontextmanager
    async def kept(self, files: Sequence[Path]) -> AsyncGenerator[None]:
        """While this lasts, the folder and these files in it, as they are now, are made again when they are gone."""
        import asyncio  # commands start without it

        task = asyncio.get_running_loop().create_task(
            self._keep({path: path.read_bytes() for path in files if path.is_file()})
        )
        try:
            yield
        finally:
            task.cancel()

    async def _keep(self, files: Mapping[Path, bytes]) -> None:
        import asyncio

        reported = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self._make_again(files)
                reported = ""
            except (OSError, LaunchError) as error:
                if reported != str(error):
                    _log.warning("%s is gone and cannot be made again: %s", self.path, error)
                reported = str(error)

    def _make_again(self, files: Mapping[Path, bytes]) -> None:
        if not self.path.exists() or self.path.stat().st_ino != self._inode:
            make_private(self.path)
            self._held.enter_context(locked_folder(self.path, LOCK_S))
            self._inode = self.path.stat().st_ino
            _log.warning("%s was removed under the run; it is there again", self.path)
        for path, data in files.items():
            if not path.exists():
                write_durably(path, data, 0o600)


def short_base() -> str:
    """Where runtime folders are made. Raises LaunchError if no base folder is writable and short enough."""
    bases = tempfile.gettempdir(), "/tmp"  # not XDG_RUNTIME_DIR, which may go at logout
    for base in bases:
        room = MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/") - SOCKET_NAME_ROOM
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return base
    raise LaunchError(
        f"no folder for sockets: {', '.join(bases)} are not writable or have too long names",
        remedy="set TMPDIR to a short path",
    )
