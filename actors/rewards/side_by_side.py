"""An async reward function in a worker process beside the actor: all its calls share that process's loop.

A call that blocks the loop is interrupted there and fails with its place (see `worker.py`). When the process ends, and
it is known which call did it, that one fails and the others are made again; else each of them is made again alone, in a
process that has no other, so that nobody is blamed for another's deed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import msgspec

from ..user_call import GRACE_S
from ..user_process import SpokeGarbage, UserProcess, WorkerGone
from .call import Answers, BadReward, Outcomes, checked
from .pool import CAUSE_CHARS, RewardPool
from .protocol import Cancel, Failed, Judge, Reply, Scored, Stuck, WorkerSpec, from_side_by_side

SLACK_S = GRACE_S + 5.0
"""For the worker to end a call whose time is over; then its process is killed."""

MAX_ALONE = 4


class _Lost(Exception):
    """The worker ended."""

    def __init__(self, *, is_known_whose: bool) -> None:
        super().__init__()
        self.is_known_whose = is_known_whose
        """Another call did it."""


class _Worker(UserProcess):
    """Many calls at a time."""

    MODULE = "myxa.actors.rewards.worker"

    calls: dict[int, asyncio.Future[Reply]]
    is_retired: bool


class SideBySide:
    """`score` may be called concurrently."""

    def __init__(self, spec: WorkerSpec, max_block_s: float) -> None:
        self._spec = msgspec.structs.replace(spec, max_block_s=max_block_s)
        self._alone = RewardPool(MAX_ALONE, spec)
        self._workers: dict[_Worker, asyncio.Task[None]] = {}
        """With what reads from each."""
        self._starting = asyncio.Lock()
        self._loading: _Worker | None = None
        self._numbers = itertools.count(1)
        self._is_closed = False

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        """Judge what belongs into one call. Raises as `RewardPool.score`."""
        while True:
            worker = await self._take()
            try:
                reply = await self._ask(worker, answers, timeout_s)
            except _Lost as lost:
                if lost.is_known_whose:
                    continue
                return await self._alone.score(answers, timeout_s)
            if isinstance(reply, Scored):
                return checked(reply.outcomes, len(answers))
            raise BadReward(reply.cause[:CAUSE_CHARS])

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes now alive."""
        return (*(worker.pid for worker in self._workers if worker.is_alive), *self._alone.pids)

    async def close(self) -> None:
        """Kill all workers and wait for their end. Calls that still run fail."""
        self._is_closed = True
        if self._loading is not None:
            self._loading.kill()
        async with self._starting:  # none is under way then
            readers = list(self._workers.values())
        for worker in self._workers:
            worker.kill()
        await self._alone.close()
        await asyncio.gather(*readers)

    async def _take(self) -> _Worker:
        async with self._starting:
            fit = [one for one in self._workers if one.is_alive and not one.is_retired]
            return fit[0] if fit else await self._start()

    async def _start(self) -> _Worker:
        if self._is_closed:
            raise BadReward("was called after the rewarder was closed")
        worker = self._loading = await _Worker.start()
        worker.calls, worker.is_retired = {}, False
        try:
            if self._is_closed:  # meanwhile
                raise BadReward("was called while the rewarder was closed")
            await worker.load(self._spec, f'reward function "{self._spec.fn}"')
        except BaseException:
            worker.kill()
            await worker.gone()
            raise
        finally:
            self._loading = None
        self._workers[worker] = asyncio.ensure_future(self._read(worker))  # noqa: TID251 -- awaited by `close`
        return worker

    async def _ask(self, worker: _Worker, answers: Answers, timeout_s: float) -> Reply:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        worker.calls[number] = future
        try:
            await worker.send(Judge(number, answers, timeout_s))
            async with asyncio.timeout(timeout_s + SLACK_S):
                return await future
        except WorkerGone:
            raise _Lost(is_known_whose=False) from None
        except TimeoutError:
            worker.kill()
            raise _Lost(is_known_whose=False) from None
        except (TypeError, ValueError) as error:
            raise BadReward(f"cannot be sent its answers: {error}") from error
        finally:
            del worker.calls[number]
            if not future.done() and worker.is_alive:
                with contextlib.suppress(WorkerGone):
                    await worker.send(Cancel(number))
            if worker.is_retired and not worker.calls:
                worker.kill()

    async def _read(self, worker: _Worker) -> None:
        culprit = -1
        try:
            while True:
                message = from_side_by_side.decode(await worker.receive())
                if isinstance(message, Stuck):
                    culprit = message.number
                    self._answer(worker, culprit, Failed(f"blocked its process at {message.place}, which was killed"))
                else:
                    worker.is_retired |= message.is_hanging
                    self._answer(worker, message.number, message.reply)
        except (WorkerGone, SpokeGarbage, msgspec.MsgspecError, ValueError):
            worker.kill()
        for future in worker.calls.values():
            if not future.done():
                future.set_exception(_Lost(is_known_whose=culprit >= 0))
        await worker.gone()
        del self._workers[worker]

    @staticmethod
    def _answer(worker: _Worker, number: int, reply: Reply) -> None:
        future = worker.calls.get(number)
        if future is not None and not future.done():
            future.set_result(reply)
