"""The folder for sockets and process descriptions. It goes with the launcher, however the launcher ends.

Knows paths, permissions and one helper process. Must not know what the files hold.
`tempfile.TemporaryDirectory` was considered: it leaves its folder when the process is killed. Here a shell waits on
a pipe whose other end only the launcher holds, and removes the folder when that end closes. Where the shell was killed
too, the next launcher of this user removes it: each keeps a file in its folder locked as long as it lives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO

from ..core.errors import LaunchError
from ..core.file_lock import take_lock

PREFIX = "myxa-"
"""How the names of these folders begin."""
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""
SOCKET_NAME_ROOM = 56
"""Longest socket name below the folder that is planned for."""

MEMORY = Path("/dev/shm")
"""Where files lie in the host's memory."""

_LOCK = ".lock"
_JANITOR = 'trap "" INT TERM HUP; cat >/dev/null; [ -e "$1" ] || exit 0; rm -rf -- "$@"; sleep 2; rm -rf -- "$@"'
"""Twice where the launcher was killed: a child that dies of it may be writing there still."""
_JANITOR_S = 10.0


class RuntimeDir:
    """A new folder, only for this user (0700), with a short path. Use as a context manager.

    Raises LaunchError if no base folder is writable and short enough for a socket's path.
    """

    def __init__(self) -> None:
        base = short_base()
        _remove_deserted(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock = _lock_in(self.path)
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", str(self.path), str(ram_folder(self.path))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def __enter__(self) -> RuntimeDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder. Harmless to call again."""
        for folder in (self.path, ram_folder(self.path)):
            shutil.rmtree(folder, ignore_errors=True)
        self._lock.close()
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        try:
            self._janitor.wait(_JANITOR_S)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()


def ram_folder(runtime: Path) -> Path:
    """A folder in the host's memory that belongs to a runtime folder and goes with it. Whoever wants it makes it."""
    return MEMORY / f"{runtime.name}.ram"


def _lock_in(folder: Path) -> IO[str]:
    """A locked file that appears locked, so that nobody takes the folder for deserted meanwhile."""
    draft = folder / f"{_LOCK}.new"
    handle = take_lock(draft)
    if handle is None:
        raise LaunchError(f"{folder}, which was just made, is used by another process")
    draft.rename(folder / _LOCK)
    return handle


def _remove_deserted(base: Path) -> None:
    """Folders of launchers that were killed together with the shell that was to remove them."""
    for lock in base.glob(f"{PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            handle = take_lock(lock, "r")
        except OSError:  # somebody else was faster
            continue
        if handle is not None:  # else it lives
            with handle:
                for folder in (lock.parent, ram_folder(lock.parent)):
                    shutil.rmtree(folder, ignore_errors=True)


def short_base() -> str:
    """Where runtime folders are made. Raises LaunchError if no base folder is writable and short enough."""
    bases = [base for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp") if base]
    for base in bases:
        room = MAX_SOCKET_PATH - len("/myxa-12345678/") - SOCKET_NAME_ROOM
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return base
    raise LaunchError(
        f"no folder for sockets: {', '.join(bases)} are not writable or have too long names",
        remedy="set TMPDIR to a short path",
    )
