"""Values and arrays: what is encoded comes back equal, of the declared types, in memory of its own, or is refused."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.inproc import InprocNetwork

from myxa.core.actor import Actor
from myxa.core.errors import BadRequest
from myxa.core.handlers import call, handlers_of
from myxa.core.refs import ref_class
from myxa.core.samples import Group, Message, Prompt, Sample
from myxa.transport.codec import BFloat16Array, Codec, UndecodableError, codecs_of, compile_loaded, decode_value
from myxa.transport.node import Node
from myxa.transport.session.frames import LIMITS, Envelope, FrameLimits, Kind, Malformed, decode, encode


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: int
    name: str = ""
    share: float | None = None
    facts: dict[str, Any] = {}


class Arrays(msgspec.Struct, frozen=True):
    left: npt.NDArray[np.float32]
    right: npt.NDArray[np.int32] | None = None
    share: float = 0.0


class Anything(msgspec.Struct, frozen=True):
    array: np.ndarray


class Weights(msgspec.Struct):
    w: BFloat16Array


def through(value: Any, kind: Any) -> Any:
    codec = Codec(kind)
    body, frames = codec.encode(value)
    return codec.decode(body, tuple(bytes(f) for f in frames))


plain = st.builds(
    Plain,
    count=st.integers(-(2**63), 2**63 - 1),
    name=st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
    share=st.none() | st.floats(),
    facts=st.dictionaries(st.text("ab", max_size=2), st.none() | st.floats() | st.booleans(), max_size=3),
)


def text_of(value: Any) -> str:
    return repr(msgspec.to_builtins(value, enc_hook=lambda a: (str(a.dtype), a.tolist())))


@settings(max_examples=100, deadline=None)
@given(plain)
def test_plain_values_come_back(value):
    body, frames = Codec(Plain).encode(value)
    assert frames == ()
    assert text_of(Codec(Plain).decode(body, ())) == text_of(decode_value(body, [], Plain)) == text_of(value)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), max_size=9), st.none() | st.lists(st.integers(-5, 5), max_size=3), st.floats())
def test_arrays_come_back_writable(left, right, share):
    value = Arrays(np.array(left, np.float32), None if right is None else np.array(right, np.int32), share)
    back = through(value, Arrays)
    assert text_of(back) == text_of(value)
    assert back.left.flags.writeable
    assert back.left.flags.aligned


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
     "complex64"],
)  # fmt: skip
def test_every_dtype_and_layout_comes_back(dtype):
    base = np.arange(24).astype(dtype).reshape(4, 6)
    layouts = (base, base.T, base[::2, ::-1], base.astype(base.dtype.newbyteorder(">")), np.asfortranarray(base))
    for array in (*layouts, base[:0], np.array(base[0, 0])):
        back = through(Anything(array), Anything).array
        assert back.dtype == dtype
        np.testing.assert_array_equal(back, array)


def test_bfloat16_travels_as_bits():
    bits = np.array([0x3F80, 0x7FC0], np.uint16).view(BFloat16Array)
    back = through(Weights(bits), Weights).w
    assert isinstance(back, BFloat16Array)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(bits))
    with pytest.raises(UndecodableError, match="expected an array of bfloat16, got uint16"):
        through(Weights(np.asarray(bits)), Weights)  # pyright: ignore[reportArgumentType]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=120), st.lists(st.binary(max_size=16), max_size=2))
def test_arbitrary_bodies_are_decoded_or_refused_as_the_long_way_does(body, frames):
    for kind in (Plain, Arrays, Group, None, Any, tuple[Plain, ...]):
        codec = Codec(kind)
        for text in (body, b"[" + body + b"]", b'[{"left":["float32",[1],0]},' + body, b'[{"count":1},' + body):
            outcomes = []
            for way in (codec.decode, lambda b, f, kind=kind: decode_value(b, [memoryview(x) for x in f], kind)):
                try:
                    outcomes.append(text_of(way(text, tuple(frames))))
                except UndecodableError:
                    outcomes.append("refused")
            assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), np.array(["a"]), np.array([object()]), object(), {1, 2}.__iter__, "\ud800",
     np.array(["2020"], "M8[D]")],
    ids=["undeclared", "text", "object", "any", "method", "surrogate", "date"],
)  # fmt: skip
def test_what_cannot_travel_is_refused_where_it_is_sent(value):
    with pytest.raises(BadRequest, match="cannot travel"):
        Codec(Plain).encode(Plain(1, facts={"a": value}))


def test_scalars_of_numpy_and_numbers_that_json_cannot_say():
    codec = Codec(Plain)
    facts = {"f": np.float32(0.5), "i": np.int64(3), "n": math.nan, "o": [-math.inf], "x": None}
    back = codec.decode(*codec.encode(Plain(np.int64(2), facts=facts)))  # pyright: ignore[reportArgumentType]
    assert (back.count, back.facts["f"], back.facts["i"], back.facts["x"]) == (2, 0.5, 3, None)
    assert math.isnan(back.facts["n"])
    assert back.facts["o"] == [-math.inf]
    assert math.isnan(through(math.nan, float))


def test_the_errors_name_the_place():
    codec = Codec(Plain)
    with pytest.raises(UndecodableError, match=r"Expected `int`, got `str` - at `\$\.count`"):
        codec.decode(b'[{"count":"many"}]', ())
    with pytest.raises(UndecodableError, match="1 arrays came, 0 are declared"):
        codec.decode(b'[{"count":1}]', (b"abc",))
    with pytest.raises(UndecodableError, match="2 arrays came, 1 are declared"):
        Codec(Arrays).decode(b'[{"left":["float32",[1],0]}]', (b"abcd", b"x"))


def test_nothing_of_a_message_is_kept():
    class Body(bytes):
        pass

    body = Body(b'[{"left":["float32",[2],0]}]')
    memory = np.zeros(8, np.uint8)
    seen = weakref.ref(memory)
    value = Codec(Arrays).decode(body, (memory.data,))
    del memory, value
    gc.collect()
    assert seen() is None


def a_sample(index: int) -> Sample:
    ids = np.arange(2, dtype=np.int32)
    return Sample(
        group_id=1, index=index, prompt_ids=ids, response_ids=ids, logprobs=ids.astype(np.float32),
        loss_mask=np.ones(2, np.uint8), versions=ids, finish="stop", turns=("an answer of some words",),
    )  # fmt: skip


class Heavy(Actor):
    @call(deadline=30)
    async def weigh(self, group: Group) -> int:
        return len(group.samples)


async def test_a_group_of_thousands_of_samples_travels_on_the_bulk_lane():
    network = InprocNetwork()
    far = await Node.attach(name="far", network=network)
    near = await Node.attach(name="near", rdzv=far.rendezvous, network=network)
    await far.start(Heavy(), "heavy")
    prompt = Prompt(group_id=1, row=0, pass_index=0, messages=(Message(role="user", content="?"),))
    group = Group(
        prompt=prompt, samples=tuple(a_sample(i) for i in range(4096)), rewards=np.zeros(4096, np.float32),
        reward_parts=({"len": 1.0},) * 4096,
    )  # fmt: skip
    assert len(Codec(Group).encode(group)[0]) > LIMITS.control_body
    assert await near.ref(Heavy, "heavy").weigh(group) == 4096
    await near.close()
    await far.close()


def test_a_body_over_the_limit_of_the_control_lane_is_not_even_read():
    data = memoryview(encode(Envelope(kind=Kind.CALL, body=b" " * (LIMITS.control_body + 1))))
    assert isinstance(decode(data, LIMITS.of_control()), Malformed)
    assert isinstance(decode(data, LIMITS), Envelope)
    raised = FrameLimits(control_body=2 << 20).of_control()
    assert isinstance(decode(data, raised), Envelope)


def test_what_is_loaded_is_compiled_and_never_again():
    class Contract(Actor):
        @call()
        async def ask(self, plain: Plain) -> Arrays:
            raise NotImplementedError

    class Role(Contract):
        async def ask(self, plain: Plain) -> Arrays:
            return Arrays(np.zeros(plain.count, np.float32))

    compile_loaded(Contract)
    misses = [cached.cache_info().misses for cached in (handlers_of, ref_class, codecs_of)]
    for cls in (Contract, Role):
        ref_class(cls)
        assert [spec.name for spec in handlers_of(cls).specs] == ["ask"]
        _ = [codecs_of(spec) for spec in handlers_of(cls).specs]
    assert [cached.cache_info().misses for cached in (handlers_of, ref_class, codecs_of)] == misses
