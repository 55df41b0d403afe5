"""A worker process that judges completions, one call at a time, or those of an async function side by side;
`actors/user_code/subreaper.py` starts it.

What the reward function prints goes to standard error, the actor's log. The function runs in the main thread, where
math-verify's time limits (signals) work. Side by side, one that blocks the loop is interrupted (`user_code/loop.py`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, BinaryIO

from ...algos.rewards.builtin import BUILTINS
from ..user_code.calls import TookTooLong, UserRaised, within
from ..user_code.loop import CALL, Blocked, DaemonThreads, Outgoing, Watch, read_in_thread
from ..user_code.process import begin, read_frame, write_frame
from .call import (
    CallFailed,
    Judge,
    JudgeStuck,
    Outcomes,
    Replied,
    RewardFn,
    await_reward,
    call_reward,
    load_reward,
    raised,
    spec_decoder,
    to_worker,
)


def main() -> None:
    """Load what the first frame names, then judge frame by frame until the input ends."""
    (reward, max_block_s), incoming, outgoing = begin(_loaded)
    with asyncio.Runner() as runner:
        if max_block_s:
            runner.run(_SideBySide(reward, max_block_s, Outgoing(outgoing)).run(incoming))
            return
        own_pid = os.getpid()
        while (body := read_frame(incoming)) is not None:
            reply = _reply(reward, body, runner)
            if os.getpid() != own_pid:  # a copy that the function forked and let return
                os._exit(0)
            write_frame(outgoing, reply)


def _loaded(first: bytes) -> tuple[RewardFn, float]:
    spec = spec_decoder.decode(first)
    reward = load_reward(spec)
    if spec.fn in BUILTINS and (prepare := BUILTINS[spec.fn].prepare) is not None:
        prepare()
    return reward, spec.max_block_s


def _reply(reward: RewardFn, body: bytes, runner: asyncio.Runner) -> Replied:
    judge = to_worker.decode(body)
    assert isinstance(judge, Judge)
    try:
        is_async, answers = reward.is_async, judge.answers
        outcomes = runner.run(await_reward(reward, answers)) if is_async else call_reward(reward, answers)
        return Replied(judge.number, outcomes)
    except CallFailed as error:
        return Replied(judge.number, cause=str(error))


class _Call:
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []


class _SideBySide:
    """Calls of an async function, as many at a time as there are."""

    def __init__(self, reward: RewardFn, max_block_s: float, out: Outgoing) -> None:
        self._reward, self._max_block_s, self._out = reward, max_block_s, out
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._doing: dict[asyncio.Task[Any] | None, int] = {}
        """The tasks that the function runs in, those left out that it made itself."""

    async def run(self, incoming: BinaryIO) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_default_executor(DaemonThreads())
        Watch(loop, self._max_block_s, self._tell_stuck)
        await read_in_thread(incoming, self._take).wait()
        os._exit(0)  # results of running calls are not wanted any more

    def _take(self, body: bytes) -> None:
        message = to_worker.decode(body)
        if isinstance(message, Judge):
            self._tasks[message.number] = self._loop.create_task(self._judge(message))
        elif (task := self._tasks.get(message.number)) is not None:
            task.cancel()

    async def _judge(self, judge: Judge) -> None:
        call = _Call()
        CALL.set(call)
        outcomes: Outcomes = ()
        cause, is_hanging = "", False
        try:
            outcomes = await within(self._call(judge), judge.timeout_s)
        except TookTooLong as late:
            is_hanging = late.hangs
            more = ", and still runs although it was cancelled; its process ends with the calls beside it"
            cause = f"took longer than {judge.timeout_s:g} s{more if late.hangs else ''}"
        except UserRaised as error:
            cause = str(raised(error.cause))
        except (CallFailed, Blocked) as error:
            cause = str(error)
        except asyncio.CancelledError:
            cause = "was cancelled"
        finally:
            self._tasks.pop(judge.number)
        is_hanging |= any(thread.is_alive() for thread in call.threads)
        self._out.put(Replied(judge.number, outcomes, cause, is_hanging))

    async def _call(self, judge: Judge) -> Outcomes:
        task = asyncio.current_task()
        self._doing[task] = judge.number
        try:
            return await await_reward(self._reward, judge.answers)
        finally:
            del self._doing[task]

    def _tell_stuck(self, place: str) -> None:
        number = self._doing.get(asyncio.current_task(self._loop), -1)
        self._out.put(JudgeStuck(number, place))
        self._out.flush()
