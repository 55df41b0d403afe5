"""The wire: what is encoded comes back, and no bytes whatsoever make decoding raise."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.transport.session.frames import (
    LIMITS,
    Assemblies,
    Envelope,
    FrameLimits,
    Kind,
    Malformed,
    batch,
    chunk_header,
    decode,
    encode,
    peek,
    split,
)
from myxa.transport.wire import Lane

U32 = st.integers(0, 0xFFFFFFFF)
U16 = st.integers(0, 0xFFFF)
names = st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), min_size=1, max_size=20)

envelopes = st.builds(
    Envelope,
    kind=st.sampled_from(Kind),
    src_node=U32,
    src_epoch=U32,
    dst_epoch=U32,
    corr=st.integers(0, 2**64 - 1),
    actor=U32,
    method=U16,
    ttl_ms=U32,
    body=st.binary(max_size=300),
    frames=st.lists(st.one_of(st.binary(max_size=40), st.binary(min_size=1000, max_size=1100)), max_size=5).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(envelopes)
def test_what_is_encoded_comes_back(envelope):
    assert decode(memoryview(encode(envelope))) == envelope


@settings(max_examples=60, deadline=None)
@given(st.lists(envelopes, min_size=1, max_size=6))
def test_a_batch_comes_apart_as_it_was_put_together(several):
    encoded = [encode(e) for e in several]
    parts = split(memoryview(batch(encoded)))
    assert isinstance(parts, list)
    assert [decode(p) for p in parts] == several


@settings(max_examples=250, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_never_raise(data):
    decode(memoryview(data))
    for tag in (b"", b"B", b"C", b"my\x01"):
        parts = split(memoryview(tag + data))
        if isinstance(parts, list):
            for part in parts:
                decode(part)
        decode(memoryview(tag + data))


@settings(max_examples=100, deadline=None)
@given(envelopes, st.randoms(use_true_random=False))
def test_cut_and_damaged_envelopes_never_raise(envelope, rng):
    encoded = encode(envelope)
    for _ in range(20):
        position = rng.randrange(len(encoded))
        assert isinstance(decode(memoryview(encoded)[:position]), Malformed)
        assert isinstance(decode(memoryview(encoded + bytes(1 + position % 9))), Malformed)
        damaged = bytearray(encoded)
        for _ in range(1 + position % 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        decode(memoryview(damaged))
        together = bytearray(batch([encoded, damaged]))
        assert isinstance(split(memoryview(together)[: rng.randrange(len(together))]), Malformed)
        together[rng.randrange(12)] = rng.randrange(256)
        split(memoryview(together))


@settings(max_examples=100, deadline=None)
@given(envelopes, U32)
def test_the_time_that_is_left_is_set_at_sending(envelope, ttl):
    assert decode(memoryview(encode(envelope, ttl))) == msgspec.structs.replace(envelope, ttl_ms=ttl)


def test_limits_are_checked_before_anything_is_read():
    data = memoryview(encode(Envelope(kind=Kind.CALL, body=b"x" * 1000)))
    assert isinstance(decode(data, FrameLimits(body=999)), Malformed)
    assert isinstance(decode(data, FrameLimits(message=1000)), Malformed)
    assert isinstance(split(memoryview(batch([encode(Envelope(kind=Kind.PING))] * (LIMITS.batch + 1)))), Malformed)


def test_large_frames_begin_on_a_cache_line():
    data = encode(Envelope(kind=Kind.CALL, body=b"abc", frames=(b"x" * 5000, b"y" * 5000)))
    for start in (data.index(b"x" * 5000), data.index(b"y" * 5000)):
        assert start % 64 == 0


def chunks_of(data, size):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return [chunk_header(i * size, len(data)) + piece for i, piece in enumerate(pieces)]


class Whole:
    """Takes what chunks make; implements `wire.InboundSink` as far as `Assemblies` asks for it."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.given_up: list[tuple[bytes, int]] = []

    def is_known(self, source, lane):
        return source != b"stranger"

    def malformed(self, source, lane, reason):
        self.wrong.append(reason)

    def overflowed(self, source, lane, head, total):
        self.given_up.append((head, total))


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=500), st.integers(1, 64))
def test_chunks_make_the_whole(data, size):
    sink, assemblies = cast(Any, Whole()), Assemblies()
    results = [assemblies.envelopes(sink, b"a", Lane.BULK, memoryview(chunk)) for chunk in chunks_of(data, size)]
    assert [list(envelopes_of_chunk) for envelopes_of_chunk in results] == [[]] * (len(results) - 1) + [[data]]
    assert assemblies.num_bytes == 0 and not sink.wrong


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.binary(max_size=20)), max_size=8))
def test_chunks_in_any_order_never_raise(parts):
    sink, assemblies = cast(Any, Whole()), Assemblies()
    for offset, total, data in parts:
        for envelope in assemblies.envelopes(sink, b"a", Lane.BULK, memoryview(chunk_header(offset, total) + data)):
            assert len(envelope) == total


def test_announcing_a_large_envelope_costs_nothing():
    sink, assemblies = cast(Any, Whole()), Assemblies()
    for i in range(1000):
        assert not assemblies.envelopes(sink, b"%d" % i, Lane.BULK, memoryview(chunk_header(0, LIMITS.message) + b"x"))
    assert assemblies.num_bytes == 1000
    assert not assemblies.envelopes(sink, b"stranger", Lane.BULK, memoryview(chunk_header(0, 500) + b"x"))
    assert assemblies.num_bytes == 1000 and "before HELLO" in sink.wrong[0]


def test_all_half_received_envelopes_together_are_bounded():
    sink, assemblies = cast(Any, Whole()), Assemblies(limit_bytes=100)

    def came(source: bytes, offset: int, total: int, data: bytes):
        return list(assemblies.envelopes(sink, source, Lane.BULK, memoryview(chunk_header(offset, total) + data)))

    head = encode(Envelope(kind=Kind.CALL, corr=77))
    assert came(b"a", 0, 500, bytes(head)) == []
    assert came(b"a", len(head), 500, bytes(90)) == []
    [(beginning, total)] = sink.given_up
    assert peek(beginning) == (Kind.CALL, 77) and total == 500
    assert assemblies.num_bytes == 0
    assert came(b"a", len(head) + 90, 500, bytes(90)) == []  # the rest of it is dropped without a word
    assert len(sink.given_up) == 1 and not sink.wrong
    assert came(b"a", 0, 3, b"abc") == [b"abc"]  # the next one is welcome
    assert came(b"a", 9, 500, b"abc") == [] and "out of order" in sink.wrong[0]
    came(b"b", 0, 50, b"abc")
    assemblies.forget(b"b")
    assert assemblies.num_bytes == 0


@pytest.mark.parametrize(("at", "value"), [(0, 0), (2, 9), (3, 0), (3, 99), (5, 255)])
def test_unknown_magic_version_kind_and_flags_are_malformed(at, value):
    data = bytearray(encode(Envelope(kind=Kind.CALL, corr=5)))
    data[at] = value
    assert isinstance(decode(memoryview(data)), Malformed)
