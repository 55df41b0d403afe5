"""Worker processes for a reward function.

A plain function gets a few workers with one call each at a time: one that hangs is killed, one that crashed is
replaced. All calls of an async function share the loop of one worker; a call that blocks it is interrupted there and
fails with its place (`worker.py`). When that process ends because of a known call, that call fails and the others are
repeated; otherwise each is repeated alone in a process, so that no call is blamed for another's crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os

import msgspec

from ..user_code.calls import GRACE_S
from ..user_code.process import PoolWorker, SpokeGarbage, WorkerGone, WorkerPool
from .call import (
    Answers,
    CallFailed,
    CancelJudge,
    Judge,
    JudgeStuck,
    Outcomes,
    Replied,
    RewardSpec,
    checked,
    from_worker,
)

CAUSE_CHARS = 2000
STARTS_AT_ONCE = os.cpu_count() or 1
"""Reward workers that import at the same time: a start is all imports."""
SLACK_S = GRACE_S + 5.0
"""For the worker to end a call whose time is over; then its process is killed."""
MAX_ALONE = 4


class _Lost(Exception):
    """The worker ended while it had the call; the text says how."""

    def __init__(self, how: str, *, is_others: bool) -> None:
        super().__init__(how)
        self.is_others = is_others
        """Another call did it."""


class RewardWorker(PoolWorker):
    """Runs `rewards/worker.py`."""

    MODULE = "myxa.actors.rewards.worker"

    calls: dict[int, asyncio.Future[Replied]]


class RewardPool(WorkerPool[RewardWorker]):
    """`score` may be called concurrently."""

    def __init__(self, spec: RewardSpec, size: int) -> None:
        """`size`: workers for one call each; 0: one for all calls of an async function."""
        self._alone = RewardPool(msgspec.structs.replace(spec, max_block_s=0.0), MAX_ALONE) if not size else None
        self._room = asyncio.Semaphore(size or 1 << 30)
        self._numbers = itertools.count(1)
        starts = STARTS_AT_ONCE if size else 1
        what, max_calls = f'reward function "{spec.fn}"', 1 if size else math.inf
        spec = spec if not size else msgspec.structs.replace(spec, max_block_s=0.0)
        super().__init__(RewardWorker, spec, what, max_workers=size or 1, max_calls=max_calls, starts_at_once=starts)

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        """Judge what belongs into one call. Raises CallFailed if the function fails, hangs or ends its process twice;
        ConfigError or UserCodeError if a worker cannot load it. A worker's end is not always the answers' fault (memory
        that earlier ones left, a SIGKILL from outside): a second worker tries before they are blamed."""
        is_again = False
        while True:
            try:
                async with self._room:
                    reply = await self._asked(await self.take(), answers, timeout_s)
                break
            except _Lost as lost:
                if self._alone is not None and not lost.is_others:
                    return await self._alone.score(answers, timeout_s)
                if self._alone is None and is_again:
                    raise CallFailed(f"ended its worker process ({lost})", is_deadly=True) from None
                is_again = True
        if reply.cause:
            raise CallFailed(reply.cause[:CAUSE_CHARS])
        return checked(reply.outcomes, len(answers))

    @property
    def pids(self) -> tuple[int, ...]:
        return (*super().pids, *(self._alone.pids if self._alone is not None else ()))

    async def close(self) -> None:
        await asyncio.gather(super().close(), *([] if self._alone is None else [self._alone.close()]))

    async def _asked(self, worker: RewardWorker, answers: Answers, timeout_s: float) -> Replied:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        worker.calls[number] = future
        try:
            await worker.send(Judge(number, answers, timeout_s))
            async with asyncio.timeout(timeout_s if self._alone is None else timeout_s + SLACK_S):
                return await future
        except WorkerGone as gone:
            raise _Lost(str(gone), is_others=False) from None
        except TimeoutError:
            worker.kill()
            if self._alone is None:
                raise CallFailed(f"took longer than {timeout_s:g} s; its worker process was killed") from None
            raise _Lost("it said nothing", is_others=False) from None
        except (TypeError, ValueError) as error:
            raise CallFailed(f"cannot be sent its answers: {error}") from error
        finally:
            del worker.calls[number]
            if (future.cancelled() or not future.done()) and worker.is_alive:
                if self._alone is None:
                    worker.kill()
                else:
                    with contextlib.suppress(WorkerGone):
                        await worker.send(CancelJudge(number))
            self.mind(worker)

    async def listen(self, worker: RewardWorker) -> None:
        lost: Exception
        culprit = -1
        try:
            while True:
                message = from_worker.decode(await worker.receive())
                if isinstance(message, JudgeStuck):
                    culprit = message.number
                    message = Replied(culprit, cause=f"blocked its process at {message.place}, which was killed")
                else:
                    worker.is_retired |= message.is_hanging
                future = worker.calls.get(message.number)
                if future is not None and not future.done():
                    future.set_result(message)
        except WorkerGone as gone:
            lost = _Lost(str(gone), is_others=culprit >= 0)
        except (SpokeGarbage, msgspec.MsgspecError, ValueError) as garbage:
            worker.kill()
            lost = _Lost("it wrote into its own pipe", is_others=False)
            if self._alone is None:
                lost = CallFailed(f"wrote into its worker's own pipe ({garbage}); the worker was killed")
        for future in worker.calls.values():
            if not future.done():
                future.set_exception(lost)
