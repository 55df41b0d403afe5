"""What follows the header of an envelope: options, lengths, body, aligned raw arrays. Pure functions; see `frames.py`.

Readers raise ValueError for bytes that do not fit, and nothing else.
"""

from __future__ import annotations

import struct

KEY_BYTES = 16
TRACE_BYTES = 24
HAS_KEY, HAS_TRACE, HAS_CHAIN = 1, 2, 4
"""Flags of the header. Plain numbers: IntFlag costs a microsecond."""
OPTIONS = HAS_KEY | HAS_TRACE | HAS_CHAIN

_CHAIN = struct.Struct("<H")


def options(key: bytes, trace: bytes, chain: tuple[str, ...]) -> tuple[bytes, int]:
    """Bytes and flags."""
    if not (key or trace or chain):
        return b"", 0
    flags = 0
    parts: list[bytes] = []
    if key:
        flags |= HAS_KEY
        parts.append(key)
    if trace:
        flags |= HAS_TRACE
        parts.append(trace)
    if chain:
        flags |= HAS_CHAIN
        text = "\n".join(chain).encode()
        parts += [_CHAIN.pack(len(text)), text]
    return b"".join(parts), flags


def read_options(data: memoryview, offset: int, flags: int) -> tuple[bytes, bytes, tuple[str, ...], int]:
    """Key, trace, chain, and where they end."""
    if not flags & OPTIONS:
        return b"", b"", (), offset
    key = trace = b""
    chain: tuple[str, ...] = ()
    if flags & HAS_KEY:
        key, offset = _cut(data, offset, KEY_BYTES)
    if flags & HAS_TRACE:
        trace, offset = _cut(data, offset, TRACE_BYTES)
    if flags & HAS_CHAIN:
        length, offset = _cut(data, offset, _CHAIN.size)
        text, offset = _cut(data, offset, _CHAIN.unpack(length)[0])
        chain = tuple(text.decode().split("\n"))
    return key, trace, chain, offset


def _cut(data: memoryview, offset: int, length: int) -> tuple[bytes, int]:
    end = offset + length
    if end > len(data):
        raise ValueError("cut short")
    return bytes(data[offset:end]), end


def read_parts(
    data: memoryview, offset: int, num_frames: int, body_len: int, max_frames: int
) -> tuple[memoryview, tuple[memoryview, ...]]:
    """Body and arrays: views of `data`."""
    total = len(data)
    start = offset + 4 * num_frames
    end = start + body_len
    if end > total:
        raise ValueError("cut short")
    if num_frames > max_frames:
        raise ValueError(f"{num_frames} arrays are too many")
    body = data[start:end]
    frames: list[memoryview] = []
    if num_frames:
        for length in struct.unpack_from(f"<{num_frames}I", data, offset):
            place = aligned(end, length)
            end = place + length
            if end > total:
                raise ValueError("cut short")
            frames.append(data[place:end])
    if end != total:
        raise ValueError(f"{total - end} bytes too many")
    return body, tuple(frames)


def aligned(offset: int, length: int) -> int:
    """Where a frame of that length begins: on a cache line if it is worth it."""
    step = 64 if length >= 1024 else 8
    return -(-offset // step) * step
