"""What a rewarder and its worker processes say to each other: length-prefixed msgpack frames over two pipes.

Own, small and typed, instead of `concurrent.futures.ProcessPoolExecutor`: that one pickles, cannot kill one hung worker
(the whole pool breaks), and cannot say which task a dead worker had.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from ...algos.rewards import RewardOutcome
from ...core.completions import Completion
from .call import ALONE, Keys

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker: what it is to call."""

    fn: str
    pattern: str
    args: dict[str, Any]
    takes_group: bool = False
    keys: Keys = ALONE


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The function is loaded."""

    pid: int
    """Of the process that calls it; the one that was started is its keeper."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The function could not be loaded; the worker ends."""

    message: str
    remedy: str
    is_config: bool
    """A mistake in the run file, not in the user's code."""


class Scored(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The outcome of each completion that was sent."""

    outcomes: tuple[RewardOutcome, ...]


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The function raised or returned nonsense."""

    cause: str


Reply = Ready | LoadFailed | Scored | Failed

spec_encoder = msgspec.msgpack.Encoder()
spec_decoder = msgspec.msgpack.Decoder(WorkerSpec)
answers_decoder = msgspec.msgpack.Decoder(tuple[Completion, ...])
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: object) -> bytes:
    """A message with its length in front. Raises ValueError over the limit."""
    body = spec_encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body
