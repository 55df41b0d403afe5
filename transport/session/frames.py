"""The wire: envelopes, batches of them, chunks of large ones. Sans-IO; decoding never raises on input.

    envelope   header (48 bytes, little endian) | frame lengths | body | aligned raw frames
    batch      ('B' left length envelope)...     what leaves for one peer in one turn of the loop
    chunk      'C' offset total bytes             a large envelope in pieces of 64 KiB; one at a time per connection

Routing, expiry and staleness are decided from the header before any body is read. `Assemblies` joins received chunks:
at most one envelope of `FrameLimits.message` per connection, and `limit_bytes` over all; over that limit an envelope is
dropped with its remaining chunks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from ..wire import InboundSink, Lane

Buffer = bytes | bytearray | memoryview

MAGIC = b"my"
VERSION = 5
NO_TTL = 0xFFFFFFFF

_MAGIC = int.from_bytes(MAGIC, "little")  # a number costs less than two bytes, to make and to compare
_HEADER = struct.Struct("<HBBHHIQIIIIII4x")
_PIECE = struct.Struct("<cBHI")
_CHUNK = struct.Struct("<c7xQQ")

HEADER_BYTES = _HEADER.size
CHUNK_HEADER_BYTES = _CHUNK.size
_PIECE_BYTES, _CHUNK_TAG = _PIECE.size, ord("C")


class FrameLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is refused before it is sent and malformed when it arrives. Sizes in bytes."""

    bulk_from: int = 256 * 1024
    """Larger envelopes travel on the bulk lane."""
    control_message: int = 1 << 20
    """Message (a batch) on the control lane."""
    chunk: int = 64 * 1024
    """Piece of a large envelope on the bulk lane. Both loops handle one a turn, so a small call waits for little."""
    control_body: int = 1 << 20
    """Body of an envelope on the control lane. Senders put everything larger than `bulk_from` on the other lane."""
    body: int = 64 << 20
    """Of an envelope on the bulk lane: groups and plans of thousands of samples are megabytes without arrays."""
    message: int = 900 << 20
    """A group's bytes fit one value of SQLite (1e9), too."""
    batch: int = 32
    """Envelopes in one message; they are taken in together."""
    arrays: int = 1 << 16

    def of_control(self) -> FrameLimits:
        """The same for what arrives on the control lane."""
        return msgspec.structs.replace(self, body=min(self.body, self.control_body))


LIMITS = FrameLimits()


class Kind(IntEnum):
    """What an envelope is."""

    HELLO = 1
    CALL = 2
    REPLY = 4
    ERROR = 5
    NACK = 6
    """Refused before it ran."""
    CANCEL = 7
    CREDIT = 8
    """Of a cancelled call: its units are free, no answer will come."""
    PING = 9
    PONG = 10
    GOODBYE = 11

    __hash__ = int.__hash__  # Enum's own is written in Python, and every envelope is dispatched by its kind


_KINDS = {int(kind): kind for kind in Kind}


class Envelope(msgspec.Struct, frozen=True, gc=False):
    """One message of the session layer."""

    kind: Kind
    src_node: int = 0
    src_epoch: int = 0
    dst_epoch: int = 0
    corr: int = 0
    """Correlation number, unique per sending incarnation; an answer copies it."""
    actor: int = 0
    """Index in the callee's actor table (see `Kind` for other uses)."""
    method: int = 0
    ttl_ms: int = NO_TTL
    """Budget that was left at sending; relative, so clocks need not agree."""
    body: Buffer = b""
    frames: tuple[Buffer, ...] = ()


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are no envelope, and what of them could be read (for a refusal)."""

    reason: str
    corr: int = 0
    src_node: int = 0
    src_epoch: int = 0


class EnvelopeChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a large envelope."""

    offset: int
    total: int
    data: memoryview


# -- envelope


def encode(envelope: Envelope, ttl_ms: int | None = None) -> bytes | bytearray:
    """An envelope in memory of its own: arrays may change then. `ttl_ms`: known only when it is sent."""
    body, frames = envelope.body, envelope.frames
    head = _HEADER.pack(
        _MAGIC, VERSION, envelope.kind, 0, envelope.method, envelope.actor, envelope.corr,
        envelope.src_node, envelope.src_epoch, envelope.dst_epoch, envelope.ttl_ms if ttl_ms is None else ttl_ms,
        len(frames), len(body),
    )  # fmt: skip
    if not frames:
        return head + body if type(body) is bytes else b"".join((head, body))
    table = struct.pack(f"<{len(frames)}I", *map(len, frames))
    data = bytearray(encoded_bytes(envelope))
    end = 0
    for part in (head, table, body):
        data[end : end + len(part)] = part
        end += len(part)
    for frame in frames:
        place = aligned(end, len(frame))
        end = place + len(frame)
        data[place:end] = frame
    return data


def encoded_bytes(envelope: Envelope) -> int:
    end = HEADER_BYTES + 4 * len(envelope.frames) + len(envelope.body)
    for frame in envelope.frames:
        end = aligned(end, len(frame)) + len(frame)
    return end


def decode(data: memoryview, limits: FrameLimits = LIMITS) -> Envelope | Malformed:
    """An envelope whose body and frames are views of `data`."""
    size = len(data)
    if size < HEADER_BYTES:
        return Malformed(reason=f"{size} bytes are no envelope")
    (
        magic, version, number, flags, method, actor, corr, src_node, src_epoch, dst_epoch, ttl, num_frames, body_len,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != _MAGIC:
        return Malformed(reason="wrong magic")
    kind = _KINDS.get(number)
    try:
        if version != VERSION:
            raise ValueError(f"wire version {version}, not {VERSION}")
        if kind is None or flags:
            raise ValueError(f"unknown kind or flags {flags:#x}")
        if size > limits.message or body_len > limits.body:
            raise ValueError(f"{size} bytes with a body of {body_len} are over the limit")
        body, frames = _read_parts(data, num_frames, body_len)
    except ValueError as error:
        return Malformed(reason=str(error), corr=corr, src_node=src_node, src_epoch=src_epoch)
    return Envelope(kind, src_node, src_epoch, dst_epoch, corr, actor, method, ttl, body, frames)


# -- batches and chunks


def batch(envelopes: Sequence[bytes | bytearray]) -> bytes:
    num_left = len(envelopes)
    parts: list[bytes | bytearray] = []
    for envelope in envelopes:
        parts += _PIECE.pack(b"B", VERSION, num_left, len(envelope)), envelope
        num_left -= 1
    return b"".join(parts)


def chunk_header(offset: int, total: int) -> bytes:
    return _CHUNK.pack(b"C", offset, total)


def split(data: memoryview) -> list[memoryview] | EnvelopeChunk | Malformed:
    size, place, num_left = len(data), 0, 0
    if size and data[0] == _CHUNK_TAG:
        return _read_chunk(data)
    envelopes: list[memoryview] = []
    while place + _PIECE_BYTES <= size:
        tag, version, num_left, length = _PIECE.unpack_from(data, place)
        start = place + _PIECE_BYTES
        place = start + length
        if tag != b"B" or version != VERSION or place > size or len(envelopes) >= LIMITS.batch:
            return Malformed(reason=f"neither batch nor chunk, or of version {version}")
        envelopes.append(data[start:place])
    return envelopes if place == size and num_left == 1 else Malformed(reason="lengths in the batch do not add up")


def _read_chunk(data: memoryview) -> EnvelopeChunk | Malformed:
    if len(data) <= CHUNK_HEADER_BYTES:
        return Malformed(reason="empty chunk")
    _, offset, total = _CHUNK.unpack_from(data)
    piece = data[CHUNK_HEADER_BYTES:]
    if total > LIMITS.message or offset + len(piece) > total or len(piece) > LIMITS.chunk:
        return Malformed(reason=f"chunk of {len(piece)} bytes at {offset} of {total}")
    return EnvelopeChunk(offset=offset, total=total, data=piece)


def peek(data: bytes) -> tuple[int, int] | None:
    """Kind and correlation number of an envelope that is cut short; None if it begins like none."""
    if len(data) < HEADER_BYTES:
        return None
    magic, version, kind, _, _, _, corr, *_ = _HEADER.unpack_from(data)
    return (kind, corr) if magic == _MAGIC and version == VERSION and kind in _KINDS else None


def _read_parts(data: memoryview, num_frames: int, body_len: int) -> tuple[memoryview, tuple[memoryview, ...]]:
    """Body and arrays: views of `data`."""
    start = HEADER_BYTES + 4 * num_frames
    end = start + body_len
    if num_frames > LIMITS.arrays or end > len(data):
        raise ValueError(f"{num_frames} arrays are too many" if num_frames > LIMITS.arrays else "cut short")
    body = data[start:end]
    frames: list[memoryview] = []
    for length in struct.unpack_from(f"<{num_frames}I", data, HEADER_BYTES) if num_frames else ():
        place = aligned(end, length)
        end = place + length
        frames.append(data[place:end])
    if end != len(data):
        raise ValueError("cut short" if end > len(data) else f"{len(data) - end} bytes too many")
    return body, tuple(frames)


def aligned(offset: int, length: int) -> int:
    """Where a frame of that length begins: on a cache line if it is worth it."""
    step = 64 if length >= 1024 else 8
    return -(-offset // step) * step


def fill_chunk(scratch: bytearray, data: Buffer, offset: int) -> memoryview:
    """The chunk that begins at `offset`, with its header, in memory that is used again for the next one."""
    size = min(LIMITS.chunk, len(data) - offset)
    end = CHUNK_HEADER_BYTES + size
    if len(scratch) < end:
        scratch.extend(bytes(end - len(scratch)))
    chunk = memoryview(scratch)[:end]
    chunk[:CHUNK_HEADER_BYTES] = chunk_header(offset, len(data))
    chunk[CHUNK_HEADER_BYTES:] = memoryview(data)[offset : offset + size]
    return chunk


class Assemblies:
    """Joins the chunks of all connections of one receiver; those of a connection must come in order."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        """`limit_bytes` None: a quarter of the machine's memory, at least 2 GiB."""
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._limit_bytes = max(2 << 30, memory_bytes // 4) if limit_bytes is None else limit_bytes
        self._parts: dict[bytes, bytearray | None] = {}
        """Connection -> what has come of its envelope; None: it was given up, its further chunks are dropped."""

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self._parts.values() if part)

    def envelopes(self, sink: InboundSink, source: bytes, lane: Lane, message: memoryview) -> Sequence[memoryview]:
        """Those in a message; what is malformed or given up is reported to the sink."""
        parts = split(message)
        if isinstance(parts, EnvelopeChunk):
            envelope = self._join(sink, source, lane, parts)
            parts = envelope if isinstance(envelope, Malformed) else [envelope] if envelope is not None else []
        if isinstance(parts, Malformed):
            sink.malformed(source, lane, parts.reason)
            return ()
        return parts

    def _join(
        self, sink: InboundSink, source: bytes, lane: Lane, chunk: EnvelopeChunk
    ) -> memoryview | Malformed | None:
        if not sink.is_known(source, lane):
            return Malformed(reason="a chunk before HELLO")
        if chunk.offset == 0:
            self._parts[source] = bytearray()
        part = self._parts.get(source, b"")
        if part is None:
            return None
        if chunk.offset != len(part) or not isinstance(part, bytearray):
            self.forget(source)
            return Malformed(reason=f"a chunk at {chunk.offset} out of order")
        try:
            if self.num_bytes + len(chunk.data) > self._limit_bytes:
                raise MemoryError  # as the kernel, whose limits may be narrower than ours
            part += chunk.data
        except MemoryError:
            self._parts[source] = None
            sink.overflowed(source, lane, bytes((part or chunk.data)[: 2 * HEADER_BYTES]), chunk.total)
            return None
        if len(part) < chunk.total:
            return None
        self.forget(source)
        return memoryview(part)

    def forget(self, source: bytes) -> None:
        self._parts.pop(source, None)
