"""The folder for sockets and process descriptions. It goes with the launcher, however that ends, and not before.

A shell waits on a pipe whose other end only the launcher holds, and removes the folder when that end closes. Where the
shell was killed too, the next launcher of this user removes it: each keeps a file in its folder locked until it ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError
from ..core.files import lock_now, remove_dead_scratch, take_lock, write_durably
from ..transport.address import make_private

PREFIX = "myxa-"
"""How the names of these folders begin."""
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""
SOCKET_NAME_ROOM = 56
"""Longest socket name below the folder that is planned for."""

_LOCK = ".lock"
_JANITOR = (
    'trap "" INT TERM HUP USR1 USR2; until cat >/dev/null; do sleep 0.2; done; '
    '[ -e "$1" ] || exit 0; rm -rf -- "$@"; sleep 2; rm -rf -- "$@"'
)
"""`cat` fails if it is killed, and ends well only with the launcher. The folder is removed twice, since a child that
dies of a launcher's end may be writing there still."""
_JANITOR_S = 10.0
LOOK_S = 0.5
"""How often a launcher looks whether its folder is there."""
_log = logging.getLogger("myxa.launcher")


class RuntimeDir:
    """A new folder, only for this user (0700), with a short path. Use as a context manager.

    Raises LaunchError if no base folder is writable and short enough for a socket's path.
    """

    def __init__(self) -> None:
        base = short_base()
        _remove_deserted(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._locks = _locks_in(self.path)
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", str(self.path)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
        )  # fmt: skip

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder, and what killed actors left in others. Harmless to call again."""
        remove_dead_scratch()
        shutil.rmtree(self.path, ignore_errors=True)
        self._locks.close()
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        try:
            self._janitor.wait(_JANITOR_S)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()

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
        if not (self.path / _LOCK).exists():
            make_private(self.path)
            self._locks.close()
            self._locks = _locks_in(self.path)
            _log.warning("%s was removed under the run; it is there again", self.path)
        for path, data in files.items():
            if not path.exists():
                write_durably(path, data, 0o600)


def _locks_in(folder: Path) -> ExitStack:
    """The folder itself, and a file that appears locked, so that the folder never looks deserted."""
    draft = folder / f"{_LOCK}.new"
    with ExitStack() as locks:
        handle = take_lock(draft)
        if handle is None:
            raise LaunchError(f"{folder}, which was just made, is used by another process")
        locks.enter_context(handle)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        locks.callback(os.close, descriptor)
        with suppress(OSError):  # a file system that does not lock folders
            lock_now(descriptor, is_shared=True)
        draft.rename(folder / _LOCK)
        return locks.pop_all()


def _remove_deserted(base: Path) -> None:
    """Folders of launchers that were killed together with the shell that was to remove them."""
    for lock in base.glob(f"{PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            handle = take_lock(lock, "r")
        except OSError:  # another process was faster
            continue
        if handle is not None:  # else its launcher runs
            with handle:
                shutil.rmtree(lock.parent, ignore_errors=True)


def short_base() -> str:
    """Where runtime folders are made. Raises LaunchError if no base folder is writable and short enough."""
    bases = tempfile.gettempdir(), "/tmp"  # not XDG_RUNTIME_DIR, which may go at logout
    for base in bases:
        room = MAX_SOCKET_PATH - len("/myxa-12345678/") - SOCKET_NAME_ROOM
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return base
    raise LaunchError(
        f"no folder for sockets: {', '.join(bases)} are not writable or have too long names",
        remedy="set TMPDIR to a short path",
    )
