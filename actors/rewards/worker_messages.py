"""What a rewarder and its worker processes say to each other, in the frames of `actors/user_code/process.py`."""

from __future__ import annotations

from typing import Any

import msgspec

from ...algos.rewards.outcome import RewardOutcome
from ...core.completions import Completion
from .call import ALONE, RewardKeys


class RewardWorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame to a worker: what it is to call."""

    fn: str
    pattern: str
    args: dict[str, Any]
    takes_group: bool = False
    strip_thinking: bool = True
    keys: RewardKeys = ALONE
    max_block_s: float = 0.0
    """Above 0: calls are sent as `Judge`, many at a time; so long may one of them hold the loop of all."""


class Judge(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One of the calls that run side by side."""

    number: int
    answers: tuple[Completion, ...]
    timeout_s: float


class CancelJudge(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The result of that call is not wanted any more."""

    number: int


class Scored(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The outcome of each completion that was sent."""

    outcomes: tuple[RewardOutcome, ...]


class JudgeFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The function raised or returned nonsense."""

    cause: str


Reply = Scored | JudgeFailed


class Replied(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How one of the calls that run side by side ended."""

    number: int
    reply: Reply
    is_hanging: bool = False
    """Something of it runs all the same."""


class JudgeStuck(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The call cannot be interrupted, and this process ends. `number`: negative if it is not known which."""

    number: int
    place: str


spec_decoder = msgspec.msgpack.Decoder(RewardWorkerSpec)
to_side_by_side: msgspec.msgpack.Decoder[Judge | CancelJudge] = msgspec.msgpack.Decoder(Judge | CancelJudge)
from_side_by_side: msgspec.msgpack.Decoder[Replied | JudgeStuck] = msgspec.msgpack.Decoder(Replied | JudgeStuck)
answers_decoder = msgspec.msgpack.Decoder(tuple[Completion, ...])
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
