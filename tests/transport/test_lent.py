"""Large envelopes whose arrays are read as they are sent: the same bytes, and never those of a later moment."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.keepers import Keeper, KeeperContract

from myxa.transport.session.frames import (
    CHUNK_HEADER_BYTES,
    LIMITS,
    Envelope,
    EnvelopeChunk,
    Kind,
    Lent,
    encode,
    encoded_bytes,
    fill_chunk,
    split,
)

pytestmark = pytest.mark.timeout(60)

envelopes = st.builds(
    Envelope,
    kind=st.just(Kind.CALL),
    corr=st.integers(0, 2**63),
    key=st.sampled_from([b"", bytes(range(16))]),
    trace=st.sampled_from([b"", bytes(range(24))]),
    chain=st.lists(st.text("abcé", min_size=1, max_size=5), max_size=3).map(tuple),
    body=st.binary(max_size=50),
    frames=st.lists(st.sampled_from([0, 1, 7, 1023, 1024, 3000]).map(lambda n: bytes(i % 251 for i in range(n))), min_size=1, max_size=4).map(tuple),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(envelopes, st.integers(0, 9000), st.integers(0, 5000), st.booleans())
def test_any_piece_is_that_of_the_whole(envelope, offset, size, is_kept):
    whole, lent = bytes(encode(envelope)), Lent(envelope)
    assert len(lent) == len(whole) == encoded_bytes(envelope)
    if is_kept:
        lent.keep()
    assert lent[3] == whole[3]
    offset = min(offset, len(whole))
    piece = bytearray(b"\xff" * min(size, len(whole) - offset))
    lent.read_into(memoryview(piece), offset)
    assert bytes(piece) == whole[offset : offset + len(piece)]


def test_chunks_of_both_forms_are_the_same():
    envelope = Envelope(kind=Kind.CALL, body=b"[1]", frames=(bytes(range(256)) * 10_000, b"x" * 100))
    whole, lent, scratch = encode(envelope), Lent(envelope), bytearray()
    found = bytearray()
    for offset in range(0, len(whole), LIMITS.chunk):
        made = bytes(fill_chunk(scratch, whole, offset))
        assert bytes(fill_chunk(scratch, lent.disguised, offset)) == made
        chunk = split(memoryview(made))
        assert isinstance(chunk, EnvelopeChunk)
        assert (chunk.index, chunk.offset, chunk.total) == (offset // LIMITS.chunk, offset, len(whole))
        found += chunk.data
    assert found == whole
    assert len(scratch) == CHUNK_HEADER_BYTES + LIMITS.chunk


def test_what_is_kept_does_not_change_with_its_owner():
    array = bytearray(b"before" * 1000)
    envelope = Envelope(kind=Kind.CALL, body=b"[1]", frames=(array,))
    whole, lent = bytes(encode(envelope)), Lent(envelope)
    lent.keep()
    array[:] = bytes(len(array))
    piece = bytearray(len(whole))
    lent.read_into(memoryview(piece), 0)
    assert piece == whole
    lent.release()
    lent.keep()


@pytest.mark.parametrize("kind", ["ipc"], indirect=True)
async def test_a_call_that_ends_while_it_is_sent_sends_what_it_began_with(world):
    actor = Keeper()
    near, _ = await world.pair(actor)
    ref = near.ref(KeeperContract, "callee")
    assert await ref.keep(np.ones(10)) == 10
    count = 4 << 20
    num_cut = 0
    for _ in range(5):
        data = np.ones(count)
        task = asyncio.ensure_future(ref.keep(data))
        parcel = None
        while parcel is None or not parcel.is_sent:
            await asyncio.sleep(0)
            calls = [c for c in near._session.calls._pending.values() if c.order.method == "keep"]
            parcel = calls[0].parcel if calls else None
        num_cut += bool(parcel.data._parts)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        data[:] = 7
        await ref.kept()
    assert num_cut
    await ref.keep(np.ones(20))  # after all of them on the bulk lane, or on control: then wait for those
    for _ in range(100):
        if len(actor.arrays) == 7:
            break
        await asyncio.sleep(0.02)
    assert {float(array.sum()) for array in actor.arrays} <= {10.0, 20.0, float(count)}
