"""What a rewarder and its worker processes say to each other, in the frames of `actors/user_process.py`."""

from __future__ import annotations

from typing import Any

import msgspec

from ...algos.rewards import RewardOutcome
from ...core.completions import Completion
from .call import ALONE, Keys


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker: what it is to call."""

    fn: str
    pattern: str
    args: dict[str, Any]
    takes_group: bool = False
    strip_thinking: bool = True
    keys: Keys = ALONE


class Scored(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The outcome of each completion that was sent."""

    outcomes: tuple[RewardOutcome, ...]


class Failed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The function raised or returned nonsense."""

    cause: str


Reply = Scored | Failed

spec_decoder = msgspec.msgpack.Decoder(WorkerSpec)
answers_decoder = msgspec.msgpack.Decoder(tuple[Completion, ...])
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
