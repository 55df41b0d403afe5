"""The folder for sockets and process descriptions. It goes with the launcher, however the launcher ends.

Knows paths, permissions and one helper process. Must not know what the files hold.
`tempfile.TemporaryDirectory` was considered: it leaves its folder when the process is killed. Here a shell waits on
a pipe whose other end only the launcher holds, and removes the folder when that end closes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from ..core.errors import LaunchError

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path that the kernel takes."""
SOCKET_NAME_ROOM = 56
"""Longest socket name below the folder that is planned for."""

_JANITOR = 'trap "" INT TERM HUP; cat >/dev/null; rm -rf -- "$1"'
_JANITOR_S = 10.0


class RuntimeDir:
    """A new folder, only for this user (0700), with a short path. Use as a context manager.

    Raises LaunchError if no base folder is writable and short enough for a socket's path.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="myxa-", dir=_short_base()))
        self._janitor = subprocess.Popen(
            ["/bin/sh", "-c", _JANITOR, "sh", str(self.path)],
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
        shutil.rmtree(self.path, ignore_errors=True)
        if self._janitor.stdin is not None:
            self._janitor.stdin.close()
        try:
            self._janitor.wait(_JANITOR_S)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()


def _short_base() -> str:
    bases = [base for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp") if base]
    for base in bases:
        room = MAX_SOCKET_PATH - len("/myxa-12345678/") - SOCKET_NAME_ROOM
        if len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return base
    raise LaunchError(
        f"no folder for sockets: {', '.join(bases)} are not writable or have too long names",
        remedy="set TMPDIR to a short path",
    )
