"""The wire: envelopes, batches of them, chunks of large ones. Pure functions bytes <-> records; never raises on input.

    envelope   header (48 bytes, little endian) | key | trace | chain | frame lengths | body | aligned raw frames
    batch      'B' count lengths envelopes        everything for one peer in one loop turn is one ZeroMQ frame
    chunk      'C' index offset total bytes       a large envelope in pieces of 1 MiB; one at a time per connection

Routing, expiry and staleness are decided from the header before any JSON is parsed. `struct` was preferred to
msgpack here because exact lengths make every disagreement visible. ZeroMQ multipart was considered for raw frames:
it costs a getsockopt per part, and a part's address is odd, so arrays would have to be copied anyway.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

Buffer = bytes | bytearray | memoryview

MAGIC = b"my"
VERSION = 1
NO_TTL = 0xFFFFFFFF
KEY_BYTES = 16
TRACE_BYTES = 24

_HEADER = struct.Struct("<2sBBHHIQIIIIIII")
_TTL = struct.Struct("<I")
_TTL_OFFSET = 32
_CREDIT_OFFSET = 44
_CHAIN = struct.Struct("<H")
_BATCH = struct.Struct("<cBH")
_CHUNK = struct.Struct("<c3xIQQ")

HEADER_BYTES = _HEADER.size
CHUNK_HEADER_BYTES = _CHUNK.size


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What is refused before it is sent and malformed when it arrives. Sizes in bytes."""

    bulk_from: int = 256 * 1024
    """Larger envelopes travel on the bulk lane."""
    control_message: int = 1 << 20
    """ZeroMQ message on the control lane."""
    chunk: int = 1 << 20
    """Piece of a large envelope on the bulk lane."""
    body: int = 64 << 20
    message: int = 1 << 30
    """One envelope with its arrays."""
    batch: int = 512
    """Envelopes in one ZeroMQ message."""


LIMITS = Limits()


class Kind(IntEnum):
    """What an envelope is."""

    HELLO = 1
    CALL = 2
    CAST = 3
    REPLY = 4
    ERROR = 5
    """The handler raised; of a stream, `actor` is how many items there were."""
    NACK = 6
    """Refused before it ran."""
    ITEM = 7
    """Of a stream; `actor` is its number."""
    END = 8
    """Of a stream; `actor` is how many items there were."""
    CANCEL = 9
    CREDIT = 10
    """corr 0: only the piggybacked counters; else demand of a stream: `actor` is how many items may come in all."""
    PING = 11
    PONG = 12
    GOODBYE = 13


# Which optional parts are there, and what may be done with the message. Plain numbers: IntFlag costs a microsecond.
_HAS_KEY, _HAS_TRACE, _HAS_CHAIN, _IDEMPOTENT = 1, 2, 4, 8
_OPTIONS = _HAS_KEY | _HAS_TRACE | _HAS_CHAIN
_KNOWN_FLAGS = _OPTIONS | _IDEMPOTENT
_KINDS = {int(kind): kind for kind in Kind}


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
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
    credit: int = 0
    """Units given back so far, modulo 2**16: control lane in the low half, bulk lane in the high half."""
    is_idempotent: bool = False
    key: bytes = b""
    trace: bytes = b""
    chain: tuple[str, ...] = ()
    body: Buffer = b""
    frames: tuple[Buffer, ...] = ()


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are no envelope, and what of them could be read (for a refusal)."""

    reason: str
    corr: int = 0
    src_node: int = 0
    src_epoch: int = 0


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a large envelope."""

    index: int
    offset: int
    total: int
    data: memoryview


# -- envelope


def encode(envelope: Envelope) -> bytearray:
    """The bytes of an envelope, in memory of its own: arrays may change as soon as this returns."""
    body, frames = envelope.body, envelope.frames
    options, flags = _options(envelope)
    table = struct.pack(f"<{len(frames)}I", *map(len, frames)) if frames else b""
    start = HEADER_BYTES + len(options) + len(table)
    end = start + len(body)
    places: list[int] = []
    for frame in frames:
        end = _aligned(end, len(frame))
        places.append(end)
        end += len(frame)
    data = bytearray(end)
    _HEADER.pack_into(
        data, 0, MAGIC, VERSION, envelope.kind, flags, envelope.method, envelope.actor, envelope.corr,
        envelope.src_node, envelope.src_epoch, envelope.dst_epoch, envelope.ttl_ms,
        len(frames), len(body), envelope.credit,
    )  # fmt: skip
    data[HEADER_BYTES:start] = options + table
    data[start : start + len(body)] = body
    for place, frame in zip(places, frames, strict=True):
        data[place : place + len(frame)] = frame
    return data


def stamp(data: bytearray, ttl_ms: int, credit: int) -> None:
    """Set what is known only at the moment of sending."""
    _TTL.pack_into(data, _TTL_OFFSET, ttl_ms)
    _TTL.pack_into(data, _CREDIT_OFFSET, credit)


def decode(data: memoryview, limits: Limits = LIMITS) -> Envelope | Malformed:
    """An envelope whose body and frames are views of `data`."""
    if len(data) < HEADER_BYTES:
        return Malformed(reason=f"{len(data)} bytes are no envelope")
    magic, version, kind, flags, method, actor, corr, src_node, src_epoch, *rest = _HEADER.unpack_from(data)
    dst_epoch, ttl, num_frames, body_len, credit = rest
    if magic != MAGIC:
        return Malformed(reason="wrong magic")

    def bad(reason: str) -> Malformed:
        return Malformed(reason=reason, corr=corr, src_node=src_node, src_epoch=src_epoch)

    if version != VERSION:
        return bad(f"wire version {version}, not {VERSION}")
    if kind not in _KINDS or flags & ~_KNOWN_FLAGS:
        return bad(f"unknown kind {kind} or flags {flags:#x}")
    if len(data) > limits.message or body_len > limits.body:
        return bad(f"{len(data)} bytes with a body of {body_len} are over the limit")
    try:
        key, trace, chain, offset = _read_options(data, flags)
        body, frames = _read_parts(data, offset, num_frames, body_len)
    except ValueError as error:
        return bad(str(error))
    return Envelope(
        kind=_KINDS[kind], src_node=src_node, src_epoch=src_epoch, dst_epoch=dst_epoch, corr=corr, actor=actor,
        method=method, ttl_ms=ttl, credit=credit, is_idempotent=bool(flags & _IDEMPOTENT),
        key=key, trace=trace, chain=chain, body=body, frames=frames,
    )  # fmt: skip


def _options(envelope: Envelope) -> tuple[bytes, int]:
    flags = _IDEMPOTENT if envelope.is_idempotent else 0
    if not (envelope.key or envelope.trace or envelope.chain):
        return b"", flags
    parts: list[bytes] = []
    if envelope.key:
        flags |= _HAS_KEY
        parts.append(envelope.key)
    if envelope.trace:
        flags |= _HAS_TRACE
        parts.append(envelope.trace)
    if envelope.chain:
        flags |= _HAS_CHAIN
        text = "\n".join(envelope.chain).encode()
        parts += [_CHAIN.pack(len(text)), text]
    return b"".join(parts), flags


def _read_options(data: memoryview, flags: int) -> tuple[bytes, bytes, tuple[str, ...], int]:
    if not flags & _OPTIONS:
        return b"", b"", (), HEADER_BYTES
    offset = HEADER_BYTES
    key = trace = b""
    chain: tuple[str, ...] = ()
    if flags & _HAS_KEY:
        key, offset = _cut(data, offset, KEY_BYTES)
    if flags & _HAS_TRACE:
        trace, offset = _cut(data, offset, TRACE_BYTES)
    if flags & _HAS_CHAIN:
        length, offset = _cut(data, offset, _CHAIN.size)
        text, offset = _cut(data, offset, _CHAIN.unpack(length)[0])
        chain = tuple(text.decode().split("\n"))
    return key, trace, chain, offset


def _cut(data: memoryview, offset: int, length: int) -> tuple[bytes, int]:
    end = offset + length
    if end > len(data):
        raise ValueError("cut short")
    return bytes(data[offset:end]), end


def _read_parts(
    data: memoryview, offset: int, num_frames: int, body_len: int
) -> tuple[memoryview, tuple[memoryview, ...]]:
    total = len(data)
    start = offset + 4 * num_frames
    end = start + body_len
    if end > total:
        raise ValueError("cut short")
    body = data[start:end]
    frames: list[memoryview] = []
    if num_frames:
        for length in struct.unpack_from(f"<{num_frames}I", data, offset):
            place = _aligned(end, length)
            end = place + length
            if end > total:
                raise ValueError("cut short")
            frames.append(data[place:end])
    if end != total:
        raise ValueError(f"{total - end} bytes too many")
    return body, tuple(frames)


def _aligned(offset: int, length: int) -> int:
    """Where a frame of that length begins: on a cache line if it is worth it."""
    step = 64 if length >= 1024 else 8
    return -(-offset // step) * step


# -- batches and chunks


def batch(envelopes: list[bytearray]) -> bytes:
    """Several envelopes as one ZeroMQ message."""
    count = len(envelopes)
    lengths = struct.pack(f"<{count}I", *map(len, envelopes))
    return b"".join([_BATCH.pack(b"B", VERSION, count), lengths, *envelopes])


def chunk_header(index: int, offset: int, total: int) -> bytes:
    """What precedes a piece of a large envelope."""
    return _CHUNK.pack(b"C", index, offset, total)


def split(data: memoryview, limits: Limits = LIMITS) -> list[memoryview] | Chunk | Malformed:
    """The envelopes of a batch, or a chunk."""
    tag = bytes(data[:1])
    if tag == b"C":
        return _read_chunk(data, limits)
    if tag != b"B" or len(data) < _BATCH.size:
        return Malformed(reason="neither batch nor chunk")
    _, version, count = _BATCH.unpack_from(data)
    offset = _BATCH.size + 4 * count
    if version != VERSION or not 1 <= count <= limits.batch or offset > len(data):
        return Malformed(reason=f"batch of {count}, version {version}")
    envelopes: list[memoryview] = []
    for length in struct.unpack_from(f"<{count}I", data, _BATCH.size):
        envelopes.append(data[offset : offset + length])
        offset += length
    if offset != len(data):
        return Malformed(reason="lengths in the batch do not add up")
    return envelopes


def _read_chunk(data: memoryview, limits: Limits) -> Chunk | Malformed:
    if len(data) <= CHUNK_HEADER_BYTES:
        return Malformed(reason="empty chunk")
    _, index, offset, total = _CHUNK.unpack_from(data)
    piece = data[CHUNK_HEADER_BYTES:]
    if total > limits.message or offset + len(piece) > total or len(piece) > limits.chunk:
        return Malformed(reason=f"chunk of {len(piece)} bytes at {offset} of {total}")
    return Chunk(index=index, offset=offset, total=total, data=piece)


class Assembly:
    """Puts the chunks of one connection together; they must come in order."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._index = 0
        self._filled = 0

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return len(self._data)

    def add(self, chunk: Chunk) -> bytearray | Malformed | None:
        """The whole envelope with its last chunk, else None. Out of order: Malformed, and it starts anew."""
        if chunk.index == 0:
            self._data, self._index, self._filled = bytearray(chunk.total), 0, 0
        if chunk.index != self._index or chunk.offset != self._filled or chunk.total != len(self._data):
            self._data, self._index, self._filled = bytearray(), 0, 0
            return Malformed(reason=f"chunk {chunk.index} out of order")
        self._data[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        self._index += 1
        self._filled += len(chunk.data)
        if self._filled < chunk.total:
            return None
        data, self._data = self._data, bytearray()
        self._index = self._filled = 0
        return data
