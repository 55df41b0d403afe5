"""The wire: what is encoded comes back, and no bytes whatsoever make decoding raise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxa.transport.session.frames import (
    Assembly,
    Envelope,
    EnvelopeChunk,
    FrameLimits,
    Kind,
    Malformed,
    batch,
    chunk_header,
    decode,
    encode,
    split,
)

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
    chain=st.lists(names, max_size=4).map(tuple),
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
    whole = encode(envelope)
    for _ in range(20):
        at = rng.randrange(len(whole))
        assert isinstance(decode(memoryview(whole)[:at]), Malformed)
        assert isinstance(decode(memoryview(whole + bytes(1 + at % 9))), Malformed)
        damaged = bytearray(whole)
        for _ in range(1 + at % 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        decode(memoryview(damaged))
        together = bytearray(batch([whole, damaged]))
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
    assert isinstance(split(memoryview(batch([encode(Envelope(kind=Kind.PING))] * 3)), FrameLimits(batch=2)), Malformed)


def test_large_frames_begin_on_a_cache_line():
    data = encode(Envelope(kind=Kind.CALL, body=b"abc", frames=(b"x" * 5000, b"y" * 5000)))
    for start in (data.index(b"x" * 5000), data.index(b"y" * 5000)):
        assert start % 64 == 0


def chunks_of(data, size):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return [chunk_header(i, i * size, len(data)) + piece for i, piece in enumerate(pieces)]


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=500), st.integers(1, 64))
def test_chunks_make_the_whole(data, size):
    assembly = Assembly()
    results = []
    for message in chunks_of(data, size):
        chunk = split(memoryview(message))
        assert isinstance(chunk, EnvelopeChunk)
        results.append(assembly.add(chunk))
    assert results[-1] == data
    assert all(r is None for r in results[:-1])
    assert assembly.num_bytes == 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 60), st.binary(max_size=20)), max_size=8)
)
def test_chunks_in_any_order_never_raise(parts):
    assembly = Assembly()
    for index, offset, total, data in parts:
        chunk = split(memoryview(chunk_header(index, offset, total) + data))
        if isinstance(chunk, EnvelopeChunk):
            result = assembly.add(chunk)
            assert result is None or isinstance(result, Malformed) or len(result) == total


@pytest.mark.parametrize(("at", "value"), [(0, 0), (2, 9), (3, 0), (3, 99), (5, 255)])
def test_unknown_magic_version_kind_and_flags_are_malformed(at, value):
    data = bytearray(encode(Envelope(kind=Kind.CALL, corr=5)))
    data[at] = value
    assert isinstance(decode(memoryview(data)), Malformed)
