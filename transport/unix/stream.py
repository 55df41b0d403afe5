"""How messages lie in a stream of bytes: each behind its length. Pure; see `session/frames.py` for what is in them.

    length (4 bytes, little endian) | message: a batch or a chunk, as over ZeroMQ

SOCK_SEQPACKET was considered: it keeps messages apart by itself, but takes none that is larger than the socket's buffer
(208 KiB by default; a batch has up to 512), and gives one for each system call, where a stream gives all that came.
"""

from __future__ import annotations

import struct

from ..session.frames import LIMITS, SOLE_BYTES, VERSION

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_MESSAGE = LIMITS.control_message + 64 * 1024
"""As over ZeroMQ. Whoever announces more speaks something else."""
SOLE_AT = LENGTH_BYTES + SOLE_BYTES
"""Where the envelope begins in a message of one."""
SOLE_HEAD = int.from_bytes(struct.pack("<cBH", b"B", VERSION, 1), "little")
read_sole = struct.Struct("<III").unpack_from
"""Length of the message, its head (`SOLE_HEAD` for a message of one), length of that one: most messages at one look."""


def framed(message: bytes | memoryview) -> bytes:
    return _LENGTH.pack(len(message)) + message


def length_at(data: memoryview, at: int) -> int:
    """Of the message whose length lies there."""
    return int(_LENGTH.unpack_from(data, at)[0])
