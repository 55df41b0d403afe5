"""A worker process that judges completions, one call at a time; `keeper.py` starts it.

Speaks over its standard input and output; what the reward function prints goes to standard error, the actor's log.
The function runs in the main thread, where math-verify's time limits (signals) work.
"""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO

from ...core.errors import ConfigError, MyxaError
from .call import BadReward, RewardFn, await_reward, call_reward, load_reward
from .protocol import (
    LENGTH,
    MAX_FRAME_BYTES,
    Failed,
    LoadFailed,
    Ready,
    Reply,
    Scored,
    answers_decoder,
    frame,
    spec_decoder,
)


def main() -> None:
    """Load what the first frame names, then judge frame by frame until the input ends."""
    incoming, outgoing = _own_pipes()
    first = _read(incoming)
    if first is None:
        return
    spec = spec_decoder.decode(first)
    try:
        reward = load_reward(
            spec.fn, pattern=spec.pattern, args=spec.args, takes_group=spec.takes_group, keys=spec.keys
        )
    except MyxaError as error:
        _write(outgoing, LoadFailed(error.message, error.remedy, isinstance(error, ConfigError)))
        return
    _write(outgoing, Ready(os.getpid()))
    with asyncio.Runner() as runner:
        while (body := _read(incoming)) is not None:
            _write(outgoing, _judge(reward, body, runner))


def _judge(reward: RewardFn, body: bytes, runner: asyncio.Runner) -> Reply:
    answers = answers_decoder.decode(body)
    try:
        if reward.is_async:
            return Scored(runner.run(await_reward(reward, answers)))
        return Scored(call_reward(reward, answers))
    except BadReward as error:
        return Failed(str(error))


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under new numbers that children do not inherit; input becomes empty, output becomes the log."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb", buffering=0)


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def _write(stream: BinaryIO, reply: Reply) -> None:
    data = memoryview(frame(reply))
    while data:
        data = data[stream.write(data) :]
