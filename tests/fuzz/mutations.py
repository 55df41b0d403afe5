"""Frames that are nearly right: valid envelopes of every kind, and what can be done to them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import orjson
from tests.fuzz.typed_values import random_json, random_value

from myxa.core.errors import EngineError, Overloaded
from myxa.core.handlers import HandlerTable
from myxa.core.ids import PeerKey
from myxa.transport.codec import codecs_of
from myxa.transport.session.faults import encode_fault
from myxa.transport.session.frames import (
    HEADER_BYTES,
    Envelope,
    Kind,
    batch,
    chunk_header,
    encode,
)
from myxa.transport.session.session import PROTOCOL, Hello, write_hello
from myxa.transport.wire import Endpoints

HEADER = struct.Struct("<2sBBHHIQIIIIII4x")
"""Written down once more on purpose: the oracle must not use the code under test."""
MAGIC, VERSION, KIND, FLAGS, METHOD, ACTOR, CORR, SRC_NODE, SRC_EPOCH, DST_EPOCH, TTL, NUM_FRAMES, BODY_LEN = range(13)
CORRS = 2000
CHUNK = 300


class Corpus:
    """Valid envelopes from one incarnation to another, made once."""

    def __init__(self, rng: random.Random, me: PeerKey, to: PeerKey, tables: list[HandlerTable], size: int) -> None:
        self._rng = rng
        self.me, self.to = me, to
        self.corr = 0
        self._tables = tables
        self.calls = [self._call() for _ in range(size)]
        self.others = [self._other() for _ in range(size // 3)]

    def _head(self, kind: Kind, **more: Any) -> Envelope:
        rng = self._rng
        fields: dict[str, Any] = {
            "kind": kind, "src_node": self.me.node_id, "src_epoch": self.me.epoch, "dst_epoch": self.to.epoch,
            "corr": rng.randrange(1, CORRS),
            "ttl_ms": rng.choice((0xFFFFFFFF, 0, 5, 1000)),
        }  # fmt: skip
        return Envelope(**{**fields, **more})

    def _call(self) -> bytes:
        rng = self._rng
        actor = rng.randrange(len(self._tables))
        spec = rng.choice(self._tables[actor].specs)
        tree = {f: random_value(t, rng) for f, t in spec.request.__annotations__.items()}
        body, views = codecs_of(spec).request.encode(spec.request(**tree))
        frames = tuple(bytes(v) for v in views)
        return bytes(encode(self._head(
            Kind.CALL, actor=actor, method=spec.index, body=body, frames=frames, ttl_ms=0xFFFFFFFF,
        )))  # fmt: skip

    def _other(self) -> bytes:
        rng = self._rng
        kind = rng.choice([k for k in Kind if k not in (Kind.CALL, Kind.HELLO, Kind.GOODBYE)])
        error = rng.choice((EngineError("no"), Overloaded("full")))
        body = rng.choice((b"[1]", b"[null]", encode_fault(error), b""))
        return bytes(encode(self._head(kind, actor=rng.randrange(40), body=body)))

    def numbered(self, data: bytes) -> bytes:
        """From the incarnation that it is now; calls with the next number, for an older one would be a copy."""
        fields = list(HEADER.unpack_from(data))
        fields[SRC_NODE], fields[SRC_EPOCH] = self.me.node_id, self.me.epoch
        if fields[KIND] == Kind.CALL:
            self.corr += 1
            fields[CORR] = self.corr
        return HEADER.pack(*fields) + data[HEADER.size :]

    def hello(self, endpoints: Endpoints, attempt: int, name: str = "rogue") -> bytes:
        body = write_hello(Hello(
            name=name, protocol=PROTOCOL, to_node=self.to.node_id, to_epoch=self.to.epoch, endpoints=endpoints,
            attempt=attempt,
        ))  # fmt: skip
        envelope = Envelope(
            kind=Kind.HELLO, src_node=self.me.node_id, src_epoch=self.me.epoch, dst_epoch=self.to.epoch, body=body
        )
        return bytes(encode(envelope))


# -- on envelopes


def flip(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    for _n in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_header(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    data[rng.randrange(min(HEADER_BYTES, len(data)))] = rng.randrange(256)
    return data


def cut(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    return data[: rng.randrange(len(data))]


def lengthen(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    return data + rng.randbytes(rng.randrange(1, 80))


def lie(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    """About numbers of frames and bytes."""
    position, size = rng.choice(((36, 4), (40, 4), (4, 2), (6, 2), (8, 4), (HEADER_BYTES, 4)))
    value = rng.choice((0, 1, 0xFFFF, 1 << (8 * size - 1), (1 << 8 * size) - 1, rng.getrandbits(8 * size)))
    data[position : position + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return data


def splice(rng: random.Random, data: bytearray, corpus: Corpus) -> bytearray:
    other = rng.choice(corpus.calls)
    position = rng.randrange(min(len(data), len(other)))
    return data[:position] + bytearray(other[position:])


def other_body(rng: random.Random, data: bytearray, corpus: Corpus) -> bytearray:
    """A right envelope around a body that is something else."""
    fields = list(HEADER.unpack_from(data))
    body = rng.choice((
        orjson.dumps([random_json(rng, 4)]), orjson.dumps(random_json(rng, 4)), b"[" * rng.randrange(3000),
        b'[{"a":' * rng.randrange(400) + b"1", rng.randbytes(rng.randrange(60)),
        orjson.dumps([{"node": "launcher/0", "epoch": 1}, [[["node"], "nan"]]]),
    ))  # fmt: skip
    fields[FLAGS], fields[NUM_FRAMES], fields[BODY_LEN] = 0, 0, len(body)
    return bytearray(HEADER.pack(*fields)) + body


def other_node(rng: random.Random, data: bytearray, _: Corpus) -> bytearray:
    """One value in the JSON body becomes another."""
    position, size = data.find(b"[{"), len(data)
    if position < 0 or position + 4 >= size:
        return data
    spot = rng.randrange(position + 2, size)
    data[spot : spot + 1] = rng.choice((b'"', b"[", b"9", b"-", b"null", b"}", b"1e999", b"\xff"))
    fields = list(HEADER.unpack_from(data))
    if fields[NUM_FRAMES] == 0:
        fields[BODY_LEN] = max(0, fields[BODY_LEN] + len(data) - size)
        HEADER.pack_into(data, 0, *fields)
    return data


def descriptor(rng: random.Random, data: bytearray, corpus: Corpus) -> bytearray:
    """Arrays that are announced wrongly: dtype, shape, number."""
    fields = list(HEADER.unpack_from(data))
    name = rng.choice(("float32", "object", "O", "V8", "datetime64", "bfloat16", "int8", "", "float32\x00"))
    shape = [rng.choice((0, 1, 2, -1, 2**31, 2**63, 2**64, 1.5, "1")) for _ in range(rng.randrange(40))]
    array = [name, shape, rng.choice((0, 0, 1, -1, 2**70, "0"))]
    body = json.dumps([rng.choice(({"item": {"name": "x", "values": array}}, {"data": array}))]).encode()
    raw = bytes(rng.choice((0, 4, 8, 64)))
    fields[FLAGS], fields[NUM_FRAMES], fields[BODY_LEN] = 0, 1, len(body)
    head = HEADER.pack(*fields) + struct.pack("<I", len(raw)) + body
    return bytearray(head) + bytes(-len(head) % 8) + raw


ENVELOPE_MUTATIONS: tuple[Callable[[random.Random, bytearray, Corpus], bytearray], ...] = (
    flip, flip, flip_header, cut, descriptor, lengthen, lie, splice, other_body, other_body, other_node, other_node,
)  # fmt: skip


# -- on messages of ZeroMQ


def as_messages(rng: random.Random, envelopes: list[bytes]) -> list[bytes]:
    """How envelopes travel: a batch, or chunks; sometimes with lies about it."""
    shape = rng.randrange(20)
    if shape < 15:
        return [batch([bytearray(e) for e in envelopes])]
    if shape == 15:
        message = bytearray(batch([bytearray(e) for e in envelopes]))
        message[rng.randrange(min(len(message), 12))] = rng.randrange(256)
        return [bytes(message)]
    if shape == 16:
        return [rng.randbytes(rng.randrange(200))]
    if shape == 17:
        return [bytes([rng.choice(b"BC")]) + rng.randbytes(rng.randrange(120))]
    return broken_chunks(rng, envelopes[0])


def broken_chunks(rng: random.Random, envelope: bytes) -> list[bytes]:
    """Right ones, or one twice, one missing, two changed about, a total that is a lie."""
    envelope = envelope or b"?"
    total = len(envelope)
    pieces = [(position, envelope[position : position + CHUNK]) for position in range(0, total, CHUNK)]
    fate = rng.randrange(6)
    position = rng.randrange(len(pieces))
    if fate == 0:
        pieces.insert(position, pieces[position])
    elif fate == 1:
        del pieces[position]
    elif fate == 2:
        rng.shuffle(pieces)
    elif fate == 3:
        total = rng.choice((0, 1, 1 << 30, 1 << 62, total - 1, total + 1))
    return [chunk_header(offset, total) + piece for offset, piece in pieces]
