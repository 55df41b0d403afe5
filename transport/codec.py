"""Values <-> JSON body plus raw array frames, and the codecs of one handler's types, compiled once. Pure functions.

Body: `[value]` or `[value, nonfinite]` in JSON. A numpy array inside `value` is `[dtype, shape, frame]`, and its bytes
travel raw. NaN and infinity travel as `nonfinite`: pairs of (path, text). The dtype table is closed and nothing is
unpickled. What a call carries is decoded straight into its types; what does not fit takes the slow path, which words
the errors.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import typing
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from ..core.actor import Actor
from ..core.errors import BadRequest
from ..core.handlers import HandlerSpec, handlers_of
from ..core.refs import ref_class
from .session.frames import LIMITS

Buffer = bytes | bytearray | memoryview
AnyArray = npt.NDArray[Any]

MAX_NDIM = 32

_CARRIERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


_TRAVELS: dict[np.dtype[Any], tuple[str, np.dtype[Any]]] = {
    np.dtype(name): (name, carrier) for name, carrier in _CARRIERS.items()
}
"""dtype -> its name on the wire and what its bytes are there; asking a dtype for its name costs more than the rest."""
_ODD_FLOAT = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""A 64-bit float of msgpack that is infinite or no number; no text in UTF-8 has these bytes."""


class BFloat16Array(np.ndarray[Any, np.dtype[np.uint16]]):
    """bfloat16 bits in a uint16 array: numpy has no bfloat16. Make one with `bits.view(BFloat16Array)`."""


class UndecodableError(ValueError):
    """Bytes that do not make a value of the wanted type."""


def lift(item: Any, lifted: list[memoryview]) -> Any:
    """What the body has for `item`, which JSON cannot express; an array's bytes are added to `lifted`."""
    if isinstance(item, np.ndarray):
        array = typing.cast("AnyArray", item)
        form = _TRAVELS.get(array.dtype) or _TRAVELS.get(array.dtype.newbyteorder("="))
        if form is None:
            raise TypeError(f"an array of dtype {array.dtype} is not on the closed list of dtypes")
        name, carrier = ("bfloat16", form[1]) if isinstance(item, BFloat16Array) else form
        if len(lifted) >= LIMITS.arrays:
            raise ValueError(f"it holds more than {LIMITS.arrays} arrays")
        raw = np.ascontiguousarray(array, dtype=carrier)
        lifted.append(raw.reshape(-1).view(np.uint8).data)
        return [name, list(array.shape), len(lifted) - 1]
    if isinstance(item, np.generic):
        return typing.cast("np.generic[Any]", item).item()
    raise TypeError(f"{type(item).__module__}.{type(item).__qualname__} is of no type that travels")


def nonfinite(value: Any) -> list[tuple[list[str | int], str]]:
    try:
        if not _ODD_FLOAT.search(msgspec.msgpack.encode(value, enc_hook=_without_arrays)):
            return []
    except OverflowError:  # a whole number of more than 64 bits, which JSON can say
        pass
    return _nonfinite(msgspec.to_builtins(value, enc_hook=_without_arrays, str_keys=True))


def _without_arrays(item: Any) -> Any:
    return None if isinstance(item, np.ndarray) else lift(item, [])


def _nonfinite(tree: Any) -> list[tuple[list[str | int], str]]:
    places: list[tuple[list[str | int], str]] = []
    todo: list[tuple[list[str | int], Any]] = [([], tree)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, float) and not math.isfinite(node):
            places.append((path, repr(node)))
        elif isinstance(node, dict):
            todo.extend(([*path, key], item) for key, item in typing.cast("dict[str, Any]", node).items())
        elif isinstance(node, list | tuple):
            todo.extend(([*path, i], item) for i, item in enumerate(typing.cast("list[Any]", node)))
    return places


def decode_value(body: Buffer, frames: list[memoryview], kind: Any) -> Any:
    """Arrays are writable, aligned, with memory of their own. Raises UndecodableError and nothing else."""
    tree, odd = _split(body)
    reader = ArrayReader(frames)
    try:
        for path, text in odd:
            tree = _patch(tree, path, _NONFINITE[text])
        value = msgspec.convert(tree, kind, dec_hook=reader.read, str_keys=True)
    except (msgspec.ValidationError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UndecodableError(str(error)) from error
    if reader.claimed != set(range(len(frames))):
        raise UndecodableError(f"{len(frames)} arrays came, {len(reader.claimed)} are declared in the type")
    return value


def _split(body: Buffer) -> tuple[Any, list[tuple[list[str | int], str]]]:
    try:
        parts = orjson.loads(body)
        if not isinstance(parts, list):
            raise TypeError("it is no list")
        if len(parts := typing.cast("list[Any]", parts)) == 1:
            return parts[0], []
        tree, odd = parts
        return tree, msgspec.convert(odd, list[tuple[list[str | int], str]])
    except (TypeError, ValueError, RecursionError) as error:
        raise UndecodableError(f"the body is not [value, nonfinite] in JSON: {error}") from error


_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _patch(tree: Any, path: list[str | int], value: float) -> Any:
    if not path:
        return value
    node = tree
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return tree


class ArrayReader:
    """msgspec's decoding hook for the arrays of one message."""

    def __init__(self, frames: list[memoryview]) -> None:
        self._frames = frames
        self.claimed: set[int] = set()

    def read(self, kind: Any, item: Any) -> Any:
        dtype = _dtype_of(kind)
        if dtype is None:
            raise TypeError(f"a field of type {kind} cannot travel")
        name, shape, index = _descriptor(item)
        if dtype not in ("", name):
            raise ValueError(f"expected an array of {dtype}, got {name}")
        carrier = _CARRIERS.get("uint16" if name == "bfloat16" else name)
        if carrier is None or len(shape) > MAX_NDIM or any(n < 0 for n in shape):
            raise ValueError(f"dtype {name!r} with shape {shape} is not an array")
        if not 0 <= index < len(self._frames) or index in self.claimed:
            raise ValueError(f"array frame {index} is missing or claimed twice")
        frame = self._frames[index]
        if math.prod(shape) * carrier.itemsize != frame.nbytes:
            raise ValueError(f"{name}{list(shape)} does not fit {frame.nbytes} bytes")
        self.claimed.add(index)
        array: AnyArray = np.ndarray(shape, carrier, frame)
        if not (array.flags.aligned and array.flags.writeable):
            array = array.copy()
        return array.view(BFloat16Array) if name == "bfloat16" else array


def _descriptor(item: Any) -> tuple[str, tuple[int, ...], int]:
    if type(item) is list and list(map(type, item := typing.cast("list[Any]", item))) == [str, list, int]:
        name, shape, index = item
        if set(map(type, shape)) <= {int}:
            return name, tuple(shape), index
    raise ValueError(f"{str(item)[:80]!r} does not describe an array")


@functools.lru_cache(maxsize=256)
def _dtype_of(kind: Any) -> str | None:
    """Name of the dtype an annotation asks for; "" for any; None if it is no array at all."""
    if kind is BFloat16Array:
        return "bfloat16"
    if kind is np.ndarray:
        return ""
    if typing.get_origin(kind) is not np.ndarray:
        return None
    dtype_args = typing.get_args(typing.get_args(kind)[1])
    name = getattr(dtype_args[0], "__name__", "") if dtype_args else ""
    name = "bool" if name == "bool_" else name
    return name if name in _CARRIERS else ""


class Codec:
    """Of one type."""

    __slots__ = ("_decode", "_has_arrays", "_kind", "_may_be_odd")

    def __init__(self, kind: Any) -> None:
        leaves = _leaves(msgspec.inspect.type_info(kind), set())
        self._kind = kind
        self._has_arrays = any(isinstance(leaf, msgspec.inspect.CustomType) for leaf in leaves)
        self._may_be_odd = any(isinstance(leaf, _MAY_BE_ODD) for leaf in leaves)
        self._decode = msgspec.json.Decoder(tuple[kind], dec_hook=_read_array).decode

    def encode(self, value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
        """Body and frames, which are views of the caller's arrays. Raises BadRequest naming what cannot travel."""
        lifted: list[memoryview] = []

        def hook(item: Any) -> Any:
            if isinstance(item, np.ndarray) and not self._has_arrays:
                raise TypeError("there is an array where its type declares none")
            return lift(item, lifted)

        try:
            body = msgspec.json.encode((value,), enc_hook=hook)
            if self._may_be_odd and b"null" in body and (odd := nonfinite(value)):
                lifted.clear()
                body = msgspec.json.encode((value, odd), enc_hook=hook)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadRequest(
                f"a {type(value).__name__} cannot travel: {error}",
                remedy="use structs, numbers, text, tuples, dicts and numeric numpy arrays",
            ) from error
        return body, tuple(lifted)

    def decode(self, body: Buffer, frames: tuple[Buffer, ...]) -> Any:
        """The value. Raises UndecodableError; never anything else, whatever the bytes."""
        views = [memoryview(frame) for frame in frames]
        reader = _current.reader = ArrayReader(views) if views else _NOBODY
        try:
            value = self._decode(body)[0]
        except (LookupError, TypeError, ValueError, RecursionError):
            return decode_value(body, views, self._kind)
        finally:
            _current.reader = _NOBODY  # else the arrays' memory would be kept until the next message
        if len(reader.claimed) != len(views):
            raise UndecodableError(f"{len(views)} arrays came, {len(reader.claimed)} are declared in the type")
        return value


class Codecs(NamedTuple):
    """Of one handler."""

    request: Codec
    reply: Codec


@functools.cache
def codecs_of(spec: HandlerSpec) -> Codecs:
    return Codecs(Codec(spec.request), Codec(spec.reply))


def compile_loaded(base: type[Actor] = Actor) -> None:
    """For every actor class that is imported by now: its handlers, what refers to it, and codecs. A process that is
    forked afterwards has them, and they are half of what its start computes otherwise. Raises TypeError as
    `handlers_of`."""
    waiting = [base]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ref_class(cls)
        for spec in handlers_of(cls).specs:
            codecs_of(spec)


_NOBODY = ArrayReader([])


class _Current(threading.local):
    """Whose arrays are being read: decoders are shared, and their hook does not get the reader."""

    reader = _NOBODY


_current = _Current()


def _read_array(kind: Any, item: Any) -> Any:
    return _current.reader.read(kind, item)


_MAY_BE_ODD = (msgspec.inspect.FloatType, msgspec.inspect.AnyType, msgspec.inspect.RawType)


def _leaves(info: Any, seen: set[int]) -> list[Any]:
    if id(info) in seen:
        return []
    seen.add(id(info))
    parts: list[Any] = []
    for name in ("item_type", "key_type", "value_type", "type"):
        part = getattr(info, name, None)
        if part is not None:
            parts.append(part)
    for name in ("item_types", "types", "fields"):
        parts.extend(getattr(info, name, ()))
    if not parts:
        return [info]
    return [leaf for part in parts for leaf in _leaves(part, seen)]
