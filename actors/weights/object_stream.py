"""A writer of Python's object stream (protocol 3), for the one foreign server that insists on being handed one.

SGLang's `/update_weights_from_tensor` takes nothing else. It is the format that runs code of whoever wrote it when it
is read, so this package neither reads it nor imports the library that can: there is no reader here, and the
writer knows only what a bucket needs: None, bool, int, str, bytes, tuples, lists, dicts, names of things, and calls
of named things with such arguments. `cuda_ipc.py` is its only user; its bytes go to the server that the run was told
to use, over the same connection as every other order.

Opcodes: the documentation of `pickletools` in the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """Something the reader has: `module.attribute`."""

    module: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Made:
    """What a named thing returns for these arguments."""

    by: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """A value that was written before, to be put in as it is: see `write_part`."""

    stream: bytes


def write_part(value: object) -> Written:
    """A value that many streams will hold. Raises TypeError for a kind that cannot be written."""
    return Written(_write(value))


def write_object(value: object) -> bytes:
    """The stream of one value. Raises TypeError for a kind it does not know."""
    return b"\x80\x03" + _write(value) + b"."


def _write(value: object) -> bytes:
    writer = _WRITERS.get(type(value))
    if writer is None:
        raise TypeError(f"cannot write a {type(value).__name__}")
    return writer(value)


def _int(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _str(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _bytes(value: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(value)) + value


def _tuple(value: Sequence[object]) -> bytes:
    return b"(" + b"".join(map(_write, value)) + b"t"


def _list(value: Sequence[object]) -> bytes:
    return b"](" + b"".join(map(_write, value)) + b"e"


def _dict(value: Mapping[str, object]) -> bytes:
    return b"}(" + b"".join(_write(k) + _write(v) for k, v in value.items()) + b"u"


def _name(value: Name) -> bytes:
    return b"c" + value.module.encode("ascii") + b"\n" + value.attribute.encode("ascii") + b"\n"


def _made(value: Made) -> bytes:
    return _name(value.by) + _tuple(value.arguments) + b"R"


_WRITERS: Mapping[type, Callable[[Any], bytes]] = MappingProxyType(
    {
        type(None): lambda _: b"N",
        bool: lambda value: b"\x88" if value else b"\x89",
        int: _int,
        str: _str,
        bytes: _bytes,
        tuple: _tuple,
        list: _list,
        dict: _dict,
        Name: _name,
        Made: _made,
        Written: lambda value: value.stream,
    }
)
