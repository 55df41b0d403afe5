"""How messages lie in a stream of bytes: each behind its length. Pure; see `session/frames.py` for what is in them.

    length (8 bytes, little endian) | message: a batch or a chunk, as over ZeroMQ | zeros up to a multiple of 8

So an envelope that comes alone lies at a multiple of 8 in what was read, and its arrays are used where they are.
SOCK_SEQPACKET was considered: it keeps messages apart by itself, but takes none that is larger than the socket's buffer
(208 KiB by default; a batch has up to 512), and gives one for each system call, where a stream gives all that came.
"""

from __future__ import annotations

import struct

from ..session.frames import LIMITS, SOLE_BYTES, VERSION

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
