"""What travels instead of an array's bytes. Pure functions bytes <-> records.

A body with handles is a line of JSON that begins with `{`, then the usual body, which begins with `[`. The frame of an
array that lies elsewhere is empty. Headers, credit and the session know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from ..payload import Buffer, UndecodableError

MAX_ARRAY_BYTES = 1 << 40
MAX_HANDLES = 4096
_FIRST = ord("{")

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(gt=0, le=MAX_ARRAY_BYTES)]


class PullHandle(msgspec.Struct, frozen=True, kw_only=True, tag="pull", forbid_unknown_fields=True):
    """An array in the sender's private memory."""

    frame: Number
    """Index of the empty frame it stands for."""
    address: Number
    num_bytes: Size
    word: Number
    """Address of its generation word."""
    generation: Number


class SlabHandle(msgspec.Struct, frozen=True, kw_only=True, tag="slab", forbid_unknown_fields=True):
    """An array in a slab of the sender."""

    frame: Number
    path: str
    slab_id: Number
    offset: Number
    num_bytes: Size
    slot: Number
    generation: Number
    ticket: Number
    """Of the lease."""
    is_awaited: bool = True
    """The sender waits to hear that it was read; else it ends the offer itself, with its call."""


Handle = PullHandle | SlabHandle


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    arrays: Annotated[list[Handle], msgspec.Meta(max_length=MAX_HANDLES)]


_decoder = msgspec.json.Decoder(_Line)


def has_handles(body: Buffer) -> bool:
    """Whether arrays of this message lie elsewhere."""
    return len(body) > 0 and body[0] == _FIRST


def join(handles: Sequence[Handle], body: Buffer) -> bytes:
    """A body with handles."""
    return b"".join([msgspec.json.encode(_Line(list(handles))), b"\n", body])


def part(body: Buffer, num_frames: int) -> tuple[list[Handle], memoryview]:
    """Handles and the usual body. Raises UndecodableError; never anything else, whatever the bytes."""
    line, newline, _ = bytes(body).partition(b"\n")
    if not newline:
        raise UndecodableError("a line of handles without an end")
    try:
        handles = _decoder.decode(line).arrays
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UndecodableError(f"handles: {error}") from error
    frames = [handle.frame for handle in handles]
    if len(set(frames)) != len(frames) or any(frame >= num_frames for frame in frames):
        raise UndecodableError(f"handles for frames {frames[:8]} of a message with {num_frames}")
    return handles, memoryview(body)[len(line) + 1 :]
