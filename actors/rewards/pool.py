"""Worker processes for a reward function.

A plain function gets a few workers with one call each at a time: one that hangs is killed, one that crashed is
replaced. All calls of an async function share the loop of one worker. When that ends because of a known call, that call
fails and the others are repeated; otherwise each is repeated alone in a process. What the function prints goes to the
actor's log.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import defaultdict
from typing import BinaryIO

import msgspec

from ...algos.rewards.builtin import BUILTINS
from ..user_code.process import Blocked, Lost, SharedLoop, TookTooLong, UserCall, WorkerPool, run_worker
from .call import (
    Answers,
    CallFailed,
    Judge,
    Outcomes,
    Replied,
    RewardSpec,
    call_reward,
    from_worker,
    load_reward,
    spec_decoder,
    to_worker,
)

CAUSE_CHARS = 2000
STARTS_AT_ONCE = os.cpu_count() or 1
"""Reward workers that import at the same time: a start is all imports."""
SLACK_S = 5.0
"""For the worker to end a call whose time is over; then its process is killed."""
MAX_ALONE = 4


class RewardPool(WorkerPool):
    """`score` may be called concurrently."""

    def __init__(self, spec: RewardSpec, size: int, at_once: int = 1 << 30) -> None:
        """`size`: workers for one call each; 0: one for all calls of an async function, `at_once` at a time."""
        self._is_shared = not size
        self._room = asyncio.Semaphore(size or at_once)
        self._room_alone = asyncio.Semaphore(MAX_ALONE)
        self.seconds = defaultdict[str, float](float)
        """See `Guarded.seconds`."""
        super().__init__(
            __name__,
            msgspec.structs.replace(spec, max_block_s=0.0) if size else spec,
            f'reward function "{spec.fn}"',
            from_worker,
            max_workers=size or 1,
            max_calls=1 if size else math.inf,
            starts_at_once=STARTS_AT_ONCE if size else 1,
            max_block_s=0.0 if size else spec.max_block_s,
        )

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        """Judge what belongs into one call. Raises CallFailed if the function fails, hangs or ends its process twice
        (its end may be the fault of earlier answers), ConfigError or UserCodeError if a worker cannot load it."""
        is_alone, began_s = False, time.monotonic()
        while True:
            try:
                async with self._room_alone if is_alone else self._room:
                    reply = await self._ask(answers, timeout_s, began_s, is_alone=is_alone)
                break
            except Lost as lost:
                if lost.culprit >= 0:
                    continue  # for another call
                if is_alone:
                    raise CallFailed(f"ended its worker process ({lost})", is_deadly=True) from None
                is_alone = True
        if reply.cause:
            raise CallFailed(reply.cause[:CAUSE_CHARS])
        return reply.outcomes

    async def _ask(self, answers: Answers, timeout_s: float, began_s: float, *, is_alone: bool) -> Replied:
        async with self.calling(is_alone=is_alone) as call:
            sent_s = time.monotonic()
            try:
                await call.worker.send(Judge(call.number, answers, timeout_s))
                async with asyncio.timeout(timeout_s + SLACK_S if self._is_shared else timeout_s):
                    reply: Replied | Lost = await call.inbox.get()
            except TimeoutError:
                call.worker.kill()
                if self._is_shared and not is_alone:
                    raise Lost("it said nothing") from None
                cause = f"took longer than {timeout_s:g} s; its worker process was killed"
                raise CallFailed(cause, is_late=True) from None
            except (TypeError, ValueError) as error:
                call.is_over = True  # it has not begun
                raise CallFailed(f"cannot be sent its answers: {error}") from error
        if isinstance(reply, Replied):
            away_s = time.monotonic() - sent_s
            lasted_s = min(max(reply.lasted_s, 0.0), away_s)
            self.seconds["queue"] += sent_s - began_s
            self.seconds["function"] += lasted_s
            self.seconds["messages"] += away_s - lasted_s
            return reply
        if reply.culprit == call.number:
            raise CallFailed(str(reply))
        raise reply


# -- the worker's side


def main() -> None:
    """Load what the first frame names, then judge until the input ends."""
    run_worker(_Worker)


class _Worker(SharedLoop["_Call"]):
    """Calls of an async function, as many at a time as there are, or of a plain one, one after another."""

    def __init__(self, first: bytes, outgoing: BinaryIO) -> None:
        spec = spec_decoder.decode(first)
        super().__init__(spec.max_block_s, outgoing, to_worker)
        self.reward = load_reward(spec)
        if spec.fn in BUILTINS and (prepare := BUILTINS[spec.fn].prepare) is not None:
            prepare()

    def take(self, message: Judge) -> None:
        """A plain function holds the loop anyway: no task is made for a call that may take a microsecond."""
        if self.reward.is_async:
            self.calls[message.call] = _Call(self, message)
            return
        began_s, cause = time.monotonic(), ""
        outcomes: Outcomes = ()
        try:
            call_reward(self.reward, message.answers).send(None)
        except StopIteration as end:
            outcomes = end.value
        except CallFailed as failed:
            cause = str(failed)
        self.put(Replied(call=message.call, outcomes=outcomes, cause=cause, lasted_s=time.monotonic() - began_s))


class _Call(UserCall):
    def __init__(self, worker: _Worker, judge: Judge) -> None:
        super().__init__(worker.loop)
        self._worker, self._judge = worker, judge

    async def run(self) -> None:
        judge, cause, began_s = self._judge, "", time.monotonic()
        outcomes: Outcomes = ()
        try:
            outcomes = await self.within(call_reward(self._worker.reward, judge.answers), judge.timeout_s)
        except TookTooLong as late:
            cause = f"took longer than {judge.timeout_s:g} s{f' at {late}' if str(late) else ''}"
        except (CallFailed, Blocked) as error:
            cause = str(error)
        except asyncio.CancelledError:
            cause = "was cancelled"
        del self._worker.calls[judge.call]
        self._worker.put(Replied(
            call=judge.call, outcomes=outcomes, cause=cause, is_hanging=self.is_hanging,
            lasted_s=time.monotonic() - began_s,
        ))  # fmt: skip
