"""Unix sockets and how messages lie in their streams. Knows no loop and no envelopes; see `session/frames.py`.

    length (8 bytes, little endian) | message: a batch or a chunk, as over ZeroMQ | zeros up to a multiple of 8

So an envelope that comes alone lies at a multiple of 8 in what was read, and its arrays are used where they are.
SOCK_SEQPACKET was considered: it keeps messages apart by itself, but takes none that is larger than the socket's buffer
(208 KiB by default; a batch has up to 512), and gives one for each system call, where a stream gives all that came.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from pathlib import Path

from ..session.frames import LIMITS, SOLE_BYTES, VERSION

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


_LENGTH = struct.Struct("<Q")
LENGTH_BYTES = _LENGTH.size
_PADS = tuple(bytes(-length % 8) for length in range(8))
MAX_MESSAGE = LIMITS.control_message + 64 * 1024
"""As over ZeroMQ. Whoever announces more speaks something else."""
SOLE_AT = LENGTH_BYTES + SOLE_BYTES
"""Where the envelope begins in a message of one."""
SOLE_HEAD = int.from_bytes(struct.pack("<cBH", b"B", VERSION, 1), "little")
_SOLE = struct.Struct("<QII")
read_sole = _SOLE.unpack_from
"""Length of the message, its head (`SOLE_HEAD` for a message of one), length of that one: most messages at one look."""


def framed(message: bytes | memoryview) -> bytes:
    length = len(message)
    return b"".join((_LENGTH.pack(length), message, _PADS[length & 7]))


def framed_sole(envelope: bytes | bytearray) -> bytes:
    """The same for a message of one envelope."""
    size = len(envelope)
    return b"".join((_SOLE.pack(size + SOLE_BYTES, SOLE_HEAD, size), envelope, _PADS[size & 7]))


def end_of_sole(data: memoryview, size: int) -> int | None:
    """Where the envelope ends, if the first `size` bytes are a message of one and nothing else."""
    if size < SOLE_AT:
        return None
    length, head, num_bytes = read_sole(data)
    end = SOLE_AT + num_bytes
    return end if head == SOLE_HEAD and length == num_bytes + SOLE_BYTES and size == end + 7 & -8 else None


def padded(length: int) -> int:
    """What a message of that length takes up behind it."""
    return (length + 7) & -8


def length_at(data: memoryview, at: int) -> int:
    """Of the message whose length lies there."""
    return int(_LENGTH.unpack_from(data, at)[0])
