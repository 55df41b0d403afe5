"""A few worker processes that judge completions. One that hangs is killed, one that crashed is replaced.

What a reward is, is the workers' business; how a worker is started, killed and waited for, that of
`actors/user_process.py`.
"""

from __future__ import annotations

import asyncio

import msgspec

from ..user_process import SpokeGarbage, UserProcess, WorkerGone
from .call import Answers, BadReward, Outcomes, checked
from .protocol import Reply, Scored, WorkerSpec, reply_decoder

CAUSE_CHARS = 2000


class RewardWorker(UserProcess):
    """One question at a time."""

    MODULE = "myxa.actors.rewards.worker"

    async def ask(self, message: object, timeout_s: float) -> Reply:
        """Send one message, read one reply. After any exception (TimeoutError, WorkerGone, SpokeGarbage) the worker is
        of no use."""
        async with asyncio.timeout(timeout_s):
            await self.send(message)
            try:
                return reply_decoder.decode(await self.receive())
            except msgspec.DecodeError as error:
                raise SpokeGarbage(str(error)) from None


class RewardPool:
    """At most `size` workers, started when they are first needed."""

    def __init__(self, size: int, spec: WorkerSpec) -> None:
        self._spec = spec
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._workers: set[RewardWorker] = set()
        self._idle: list[RewardWorker] = []
        self._is_closed = False
        self.num_started = 0

    async def score(self, answers: Answers, timeout_s: float) -> Outcomes:
        """Judge what belongs into one call. Raises BadReward if the function fails, hangs or ends its process twice;
        ConfigError or UserCodeError if a worker cannot load it.

        A worker that ends is not always the answers' fault (memory that earlier ones left, somebody's SIGKILL): a
        second one tries before they are blamed.
        """
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

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes now alive."""
        return tuple(worker.pid for worker in self._workers if worker.is_alive)

    async def close(self) -> None:
        """Kill all workers and wait for their end. Calls that still run fail."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in self._workers))
        self._workers.clear()
        self._idle.clear()

    async def _take(self) -> RewardWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
        return await self._start()

    async def _start(self) -> RewardWorker:
        if self._is_closed:
            raise BadReward("was called after the rewarder was closed")
        await self._forget_dead()
        worker = await RewardWorker.start()
        self.num_started += 1
        if self._is_closed:  # while it was being started: nobody else will wait for its end
            worker.kill()
            await worker.gone()
            raise BadReward("was called while the rewarder was closed")
        self._workers.add(worker)
        await worker.load(self._spec, f'reward function "{self._spec.fn}"')
        return worker

    async def _forget_dead(self) -> None:
        for worker in [one for one in self._workers if not one.is_alive]:
            await worker.gone()
            self._workers.discard(worker)  # not before: who is cancelled meanwhile leaves it to `close`

    async def _ask(self, worker: RewardWorker, answers: Answers, timeout_s: float) -> Reply:
        try:
            return await worker.ask(answers, timeout_s)
        except TimeoutError:
            raise BadReward(f"took longer than {timeout_s:g} s; its worker process was killed") from None
        except SpokeGarbage as garbage:
            raise BadReward(f"wrote into its worker's own pipe ({garbage}); the worker was killed") from None
        except (TypeError, ValueError) as error:
            raise BadReward(f"cannot be sent its answers: {error}") from error
