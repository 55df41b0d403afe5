"""Encoders and decoders of one handler's types, compiled once: value <-> JSON body and array frames (see `payload.py`).

What a call carries is decoded straight into its types, without a tree of dicts between. Whatever is unusual (numbers
that JSON cannot say, values that do not fit) goes the long way through `payload.py`, which also words the errors.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np

from ..core.actor import Actor
from ..core.handlers import HandlerSpec, handlers_of
from ..core.refs import ref_class
from .payload import ArrayReader, Buffer, UndecodableError, cannot_travel, decode_value, lift, nonfinite

_NO_FRAMES: tuple[memoryview, ...] = ()


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
        """Body and array frames. Frames are views of the caller's arrays: copy them before returning to it.

        Raises BadRequest naming what cannot travel.
        """
        if self._has_arrays:
            return self._encode_arrays(value)
        try:
            body = _encode_plain((value,))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise cannot_travel(value, error) from error
        if self._may_be_odd and body.find(b"null") >= 0:  # `in` takes twice as long
            return self._encode_arrays(value)
        return body, _NO_FRAMES

    def _encode_arrays(self, value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
        """With arrays, or perhaps with numbers that JSON cannot say."""
        lifted: list[memoryview] = []

        def hook(item: Any) -> Any:
            return lift(item, lifted) if self._has_arrays else _scalar(item)

        try:
            body = msgspec.json.encode((value,), enc_hook=hook)
            if self._may_be_odd and b"null" in body and (odd := nonfinite(value)):
                lifted.clear()
                body = msgspec.json.encode((value, odd), enc_hook=lambda item: lift(item, lifted))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise cannot_travel(value, error) from error
        return body, tuple(lifted) if lifted else _NO_FRAMES

    def decode(self, body: Buffer, frames: tuple[Buffer, ...]) -> Any:
        """The value. Raises UndecodableError; never anything else, whatever the bytes."""
        if not frames and not self._has_arrays:
            try:
                return self._decode(body)[0]
            except (LookupError, TypeError, ValueError, RecursionError):
                return decode_value(body, [], self._kind)
        views = [memoryview(frame) for frame in frames]
        reader = _current.reader = ArrayReader(views)
        try:
            value = self._decode(body)[0]
        except (LookupError, TypeError, ValueError, RecursionError):
            return decode_value(body, views, self._kind)
        finally:
            _current.reader = _NOBODY  # else the arrays' memory would be kept until the next message
        if len(reader.claimed) != len(views):
            raise UndecodableError(f"{len(views)} arrays came, {len(reader.claimed)} are declared in the type")
        return value


class Codecs:
    """Of one handler."""

    __slots__ = ("reply", "request")

    def __init__(self, spec: HandlerSpec) -> None:
        self.request = Codec(spec.request)
        self.reply = Codec(spec.reply)


class _Compiled(dict[HandlerSpec, Codecs]):
    """A dictionary, because asking it costs less than a call of ours."""

    def __missing__(self, spec: HandlerSpec) -> Codecs:
        made = self[spec] = Codecs(spec)
        return made


codecs_of = _Compiled().__getitem__
"""Of a handler; compiled on first use."""


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
    """Whose arrays are being read: decoders are shared, and their hook is not told."""

    reader = _NOBODY


_current = _Current()


def _read_array(kind: Any, item: Any) -> Any:
    return _current.reader.read(kind, item)


def _scalar(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        raise TypeError("an array stands where its type declares none")
    return lift(item, [])


_encode_plain = msgspec.json.Encoder(enc_hook=_scalar).encode
_MAY_BE_ODD = (msgspec.inspect.FloatType, msgspec.inspect.AnyType, msgspec.inspect.RawType)


def _leaves(info: Any, seen: set[int]) -> list[Any]:
    """All types without parts that occur in a type."""
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
