"""A worker process that judges completions, one call at a time; `actors/keeper.py` starts it.

Speaks over its standard input and output; what the reward function prints goes to standard error, the actor's log.
The function runs in the main thread, where math-verify's time limits (signals) work.
"""

from __future__ import annotations

import asyncio
import os

from ...algos.rewards import BUILTINS
from ...core.errors import MyxaError
from ..user_process import LoadFailed, Ready, own_pipes, read_frame, write_frame
from .call import BadReward, RewardFn, await_reward, call_reward, load_reward
from .protocol import Failed, Reply, Scored, answers_decoder, spec_decoder


def main() -> None:
    """Load what the first frame names, then judge frame by frame until the input ends."""
    incoming, outgoing = own_pipes()
    first = read_frame(incoming)
    if first is None:
        return
    spec = spec_decoder.decode(first)
    try:
        reward = load_reward(
            spec.fn,
            pattern=spec.pattern,
            args=spec.args,
            takes_group=spec.takes_group,
            strip_thinking=spec.strip_thinking,
            keys=spec.keys,
        )
    except MyxaError as error:
        write_frame(outgoing, LoadFailed.of(error))
        return
    if spec.fn in BUILTINS and (prepare := BUILTINS[spec.fn].prepare) is not None:
        prepare()
    write_frame(outgoing, Ready(os.getpid()))
    own_pid = os.getpid()
    with asyncio.Runner() as runner:
        while (body := read_frame(incoming)) is not None:
            reply = _judge(reward, body, runner)
            if os.getpid() != own_pid:  # a copy that the function forked and let return
                os._exit(0)
            write_frame(outgoing, reply)


def _judge(reward: RewardFn, body: bytes, runner: asyncio.Runner) -> Reply:
    answers = answers_decoder.decode(body)
    try:
        if reward.is_async:
            return Scored(runner.run(await_reward(reward, answers)))
        return Scored(call_reward(reward, answers))
    except BadReward as error:
        return Failed(str(error))
