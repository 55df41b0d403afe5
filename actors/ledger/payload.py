"""Groups and unfinished samples as bytes: a msgpack header with the raw little-endian arrays in it.

Never pickle: a ledger is read by whoever resumes the run. msgspec types both directions; arrays come back writable.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np

from ...core.errors import LedgerError
from ...core.samples import Group, Sample


def _array_out(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} cannot be stored in the ledger")


def _array_in(kind: Any, value: bytes) -> np.ndarray[Any, Any]:
    dtype = get_args(get_args(kind)[1])[0]
    return np.frombuffer(bytearray(value), dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_out)
_groups = msgspec.msgpack.Decoder(Group, dec_hook=_array_in)
_partials = msgspec.msgpack.Decoder(tuple[Sample, ...], dec_hook=_array_in)


def encode(value: Group | tuple[Sample, ...]) -> bytes:
    """Bytes of a group or of unfinished samples. Raises ValueError if the prompt's metadata cannot be written."""
    try:
        return _encoder.encode(value)
    except (NotImplementedError, OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error


def decode_group(group_id: int, data: bytes) -> Group:
    """A group back from its bytes. Raises LedgerError naming the group when they are damaged."""
    try:
        return _groups.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LedgerError(f"payload of group {group_id} is damaged: {error}") from error


def decode_partial(group_id: int, data: bytes) -> tuple[Sample, ...]:
    """Unfinished samples back from their bytes. Raises LedgerError naming the group when they are damaged."""
    try:
        return _partials.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LedgerError(f"unfinished samples of group {group_id} are damaged: {error}") from error
