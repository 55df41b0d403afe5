"""How reward functions run outside the actor's loop: worker processes, or threads.

`RewardPool`: a few worker processes, one call each at a time. A worker that hangs is killed, one that crashed is
replaced. `SideBySide`: an async function in one worker process, all calls share its loop. A call that blocks the loop
is interrupted there and fails with its place (`worker.py`). When the process ends because of a known call, that call
fails and the others are repeated; otherwise each is repeated alone in its own process, so that no call is blamed
for another's crash. `BlockingCalls`: blocking calls in daemon threads. `loop.run_in_executor` is not used: its threads
are joined at the interpreter's end, so that one hung call would keep the process from ever ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from ..user_code.calls import GRACE_S
from ..user_code.process import SpokeGarbage, UserProcess, WorkerGone
from .call import Answers, BadReward, Outcomes, checked
from .worker_messages import (
    CancelJudge,
    Judge,
    JudgeFailed,
    JudgeStuck,
    Reply,
    RewardWorkerSpec,
    Scored,
    from_side_by_side,
    reply_decoder,
)

CAUSE_CHARS = 2000
STARTS_AT_ONCE = os.cpu_count() or 1
"""Reward workers that import at the same time."""


class RewardWorker(UserProcess):
    """One question at a time."""

    MODULE = "myxa.actors.rewards.worker"

    async def ask(self, message: object, timeout_s: float) -> Reply:
        """Send one message, read one reply. After any exception (TimeoutError, ...) the worker is of no use."""
        async with asyncio.timeout(timeout_s):
            await self.send(message)
            try:
                return reply_decoder.decode(await self.receive())
            except msgspec.DecodeError as error:
                raise SpokeGarbage(str(error)) from None


class RewardPool:
    """At most `size` workers, started when they are first needed; at most one a core starts at a time, for a start is
    all imports: calls meanwhile wait for it, or for a worker that is done."""

    def __init__(self, size: int, spec: RewardWorkerSpec) -> None:
        self._spec = spec
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._workers: set[RewardWorker] = set()
        self._idle: list[RewardWorker] = []
        self._num_starting = 0
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when a worker is idle or a start is over."""
        self._is_closed = False

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        """Judge what belongs into one call. Raises BadReward if the function fails, hangs or ends its process twice;
        ConfigError or UserCodeError if a worker cannot load it. A worker's end is not always the answers' fault (memory
        that earlier ones left, a SIGKILL from outside): a second worker tries before they are blamed."""
        async with self._room:
            try:
                reply = await self._with_a_worker(answers, timeout_s)
            except WorkerGone:
                try:
                    reply = await self._with_a_worker(answers, timeout_s)
                except WorkerGone as gone:
                    raise BadReward(f"ended its worker process ({gone})", is_deadly=True) from None
        if isinstance(reply, Scored):
            return checked(reply.outcomes, len(answers))
        raise BadReward(getattr(reply, "cause", f"sent {type(reply).__name__}")[:CAUSE_CHARS])

    async def _with_a_worker(self, answers: Answers, timeout_s: float) -> Reply:
        worker = await self._take()
        try:
            reply = await self._ask(worker, answers, timeout_s)
            self._idle.append(worker)
            return reply
        finally:
            if worker not in self._idle:
                worker.kill()
            self._tell_changed()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers if worker.is_alive)

    async def close(self) -> None:
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in self._workers))
        self._workers.clear()
        self._idle.clear()

    def _tell_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _take(self) -> RewardWorker:
        while True:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
            if self._num_starting < STARTS_AT_ONCE:
                break
            await self._changed.wait()
        self._num_starting += 1
        try:
            return await self._start()
        finally:
            self._num_starting -= 1
            self._tell_changed()

    async def _start(self) -> RewardWorker:
        if self._is_closed:
            raise BadReward("was called after the rewarder was closed")
        for worker in [one for one in self._workers if not one.is_alive]:
            await worker.gone()
            self._workers.discard(worker)  # not before: who is cancelled meanwhile leaves it to `close`
        worker = await RewardWorker.start()
        if self._is_closed:  # while it was being started: no other code will wait for its end
            worker.kill()
            await worker.gone()
            raise BadReward("was called while the rewarder was closed")
        self._workers.add(worker)
        await worker.load(self._spec, f'reward function "{self._spec.fn}"')
        return worker

    async def _ask(self, worker: RewardWorker, answers: Answers, timeout_s: float) -> Reply:
        try:
            return await worker.ask(answers, timeout_s)
        except TimeoutError:
            raise BadReward(f"took longer than {timeout_s:g} s; its worker process was killed") from None
        except SpokeGarbage as garbage:
            raise BadReward(f"wrote into its worker's own pipe ({garbage}); the worker was killed") from None
        except (TypeError, ValueError) as error:
            raise BadReward(f"cannot be sent its answers: {error}") from error


T = TypeVar("T")


class ThreadsBusy(Exception):
    """Every thread was still in an earlier call, or the system has none left."""


class BlockingCalls(Generic[T]):
    """At most `max_threads` calls at a time. A call that is given up keeps its place until it ends."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._room = asyncio.Semaphore(max_threads)
        self._name = name

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result or exception. Raises TimeoutError when it takes too long (the thread cannot be stopped),
        ThreadsBusy when there was no thread for it for so long, or none can be started."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._room.acquire()
        except TimeoutError:
            raise ThreadsBusy from None
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        thread = threading.Thread(target=self._work, args=(loop, call, result), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process, or the user, may have no more of them
            self._room.release()
            raise ThreadsBusy from error
        async with asyncio.timeout(timeout_s):
            return await result

    def _work(self, loop: asyncio.AbstractEventLoop, call: Callable[[], T], result: asyncio.Future[T]) -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 -- it is handed to the caller, whatever it is
            self._tell(loop, lambda error=error: _fail(result, error))
        else:
            self._tell(loop, lambda: _finish(result, value))

    def _tell(self, loop: asyncio.AbstractEventLoop, settle: Callable[[], None]) -> None:
        try:
            loop.call_soon_threadsafe(settle)
            loop.call_soon_threadsafe(self._room.release)
        except RuntimeError:
            return  # the loop was closed while the call ran


def _finish(result: asyncio.Future[T], value: T) -> None:
    if not result.done():
        result.set_result(value)


def _fail(result: asyncio.Future[T], error: BaseException) -> None:
    if not result.done():
        # A future cannot carry StopIteration, and the end of the thread must not end the loop.
        ordinary = isinstance(error, Exception) and not isinstance(error, StopIteration)
        result.set_exception(error if ordinary else RuntimeError(f"{type(error).__name__}: {error}"))


SLACK_S = GRACE_S + 5.0
"""For the worker to end a call whose time is over; then its process is killed."""

MAX_ALONE = 4


class _Lost(Exception):
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

    def __init__(self, spec: RewardWorkerSpec, max_block_s: float) -> None:
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
        return (*(worker.pid for worker in self._workers if worker.is_alive), *self._alone.pids)

    async def close(self) -> None:
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
                    await worker.send(CancelJudge(number))
            if worker.is_retired and not worker.calls:
                worker.kill()

    async def _read(self, worker: _Worker) -> None:
        culprit = -1
        try:
            while True:
                message = from_side_by_side.decode(await worker.receive())
                if isinstance(message, JudgeStuck):
                    culprit = message.number
                    self._answer(
                        worker, culprit, JudgeFailed(f"blocked its process at {message.place}, which was killed")
                    )
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
