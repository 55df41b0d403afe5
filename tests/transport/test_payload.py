"""Values and arrays: what is encoded comes back equal, of the declared dtype, in memory of its own."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from myxa.core.errors import BadRequest
from myxa.transport.codec import BFloat16Array, UndecodableError, decode_value, encode_value

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64", "complex64")  # fmt: skip


class Pair(msgspec.Struct, frozen=True):
    left: np.ndarray
    right: npt.NDArray[np.float32] | None = None
    facts: dict[str, float] = {}


def through(value: Any, kind: Any) -> Any:
    body, frames = encode_value(value)
    return decode_value(body, [memoryview(bytes(f)) for f in frames], kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_plain_values_come_back(value):
    assert through(value, Any) == value


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(DTYPES).flatmap(
        lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
    )
)
def test_arrays_come_back(array):
    back = through(Pair(left=array), Pair).left
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    assert back.flags.aligned


arrays_of_descriptor = st.tuples(
    st.sampled_from(["int32", "float32", "bfloat16", "object", "int33", ""]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.integers(-2, 3),
)


@settings(max_examples=100, deadline=None)
@given(arrays_of_descriptor, st.lists(st.binary(max_size=24), max_size=3))
def test_wrong_descriptors_are_refused(descriptor, frames):
    import orjson

    body = orjson.dumps([{"left": descriptor}])
    try:
        pair = decode_value(body, [memoryview(f) for f in frames], Pair)
    except UndecodableError:
        return
    assert pair.left.nbytes == len(frames[0]) == sum(map(len, frames))


def test_numbers_that_json_cannot_say():
    value = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    back = through(value, dict[str, float])
    assert math.isnan(back["a"])
    assert (back["b"], back["c"], back["d"]) == (math.inf, -math.inf, 1.0)
    assert math.isnan(through(math.nan, float))
    assert through({"x": [None, math.inf]}, Any) == {"x": [None, math.inf]}


def test_bfloat16_travels_as_bits():
    bits = np.array([0x3F80, 0x7FC0], np.uint16).view(BFloat16Array)

    class Weights(msgspec.Struct):
        w: BFloat16Array

    back = through(Weights(bits), Weights).w
    assert isinstance(back, BFloat16Array)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(bits))
    with pytest.raises(UndecodableError, match="expected an array of bfloat16, got uint16"):
        through(Weights(np.asarray(bits)), Weights)  # pyright: ignore[reportArgumentType]


def test_layouts_that_are_not_contiguous_or_not_little_endian():
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base.T, base[::2, ::-1], base.astype(">i4"), np.asfortranarray(base)):
        np.testing.assert_array_equal(through(Pair(left=array), Pair).left, array)


def test_numpy_scalars_become_numbers():
    value = {"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)}
    assert through(value, dict[str, Any]) == {"a": 0.5, "b": 3, "c": True}


@pytest.mark.parametrize(
    "value",
    [np.array(["a"]), np.array([object()]), object(), {1, 2}.__iter__, 2**70, "\ud800", np.array(["2020"], "M8[D]")],
    ids=["text", "object", "any", "method", "huge", "surrogate", "date"],
)
def test_what_cannot_travel_is_refused_where_it_is_sent(value):
    with pytest.raises(BadRequest, match="cannot travel"):
        encode_value({"x": value})


def test_an_array_where_none_is_declared_is_refused():
    with pytest.raises(UndecodableError, match="1 arrays came, 0 are declared"):
        through({"x": np.zeros(3)}, dict[str, Any])
