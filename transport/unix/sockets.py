"""Every call that makes a Unix socket, in one place, and who is at its other end. Knows no loop and no envelopes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from pathlib import Path

SCHEME = "unix://"
BACKLOG = 4096
"""Connections that a process may leave waiting while its loop does not turn; the kernel allows no more by default."""

_CREDENTIALS = struct.Struct("=iII")
_WHY = {
    errno.ECONNREFUSED: "nobody listens there",
    errno.ENOENT: "nobody listens there: its socket file is gone",
}
_STUCK = frozenset((errno.EAGAIN, errno.ECONNABORTED))


def can_be_told_apart() -> bool:
    """Whether this system says which user is at the other end; else this way is not gone."""
    return hasattr(socket, "SO_PEERCRED")


def path_of(endpoint: str) -> str:
    return endpoint.removeprefix(SCHEME)


def make_listener(path: Path) -> socket.socket:
    """Bound, listening, never blocking. Raises OSError."""
    made = _new_socket()
    try:
        made.bind(os.fspath(path))
        path.chmod(0o600)  # its folder is closed to others already
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def connect(path: str) -> socket.socket:
    """A connection: on Unix sockets the kernel makes it at once or not at all. Raises OSError."""
    made = _new_socket()
    try:
        made.connect(path)
    except OSError:
        made.close()
        raise
    return made


def credentials(connection: socket.socket) -> tuple[int, int]:
    """(process, user) of the other end when it connected or began to listen, as the kernel says."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def shut(connection: socket.socket) -> None:
    """End it at once, also where a forked process holds a copy. What the kernel has taken, the other side will find."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def is_stuck(error: OSError) -> bool:
    """It listens and accepts nobody: as many as may wait there do."""
    return error.errno in _STUCK


def why_not(error: OSError) -> str:
    """In words, why no connection could be made."""
    if is_stuck(error):
        return "it accepts no connection: as many as may wait for that do"
    return _WHY.get(error.errno or 0) or f"cannot connect: {error}"


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
