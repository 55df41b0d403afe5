"""A few worker processes that judge completions. One that hangs is killed, one that crashed is replaced.

Knows processes and pipes; what a reward is, is the workers' business. See `protocol.py` for why this is not
`concurrent.futures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from ...core.errors import ConfigError, UserCodeError
from .call import Answers, BadReward, Outcomes, checked
from .protocol import LENGTH, MAX_FRAME_BYTES, LoadFailed, Ready, Reply, Scored, WorkerSpec, frame, reply_decoder

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For importing the user's module: it may be heavy."""
END_TIMEOUT_S = 8.0
"""For a keeper to end all that its worker started, and then itself, so that the worker's exit code can be told."""
CAUSE_CHARS = 2000


class WorkerGone(Exception):
    """The worker's end of the pipe closed; the text says how it ended."""


class SpokeGarbage(Exception):
    """What came through the pipe is no reply: the function writes where it should not, or its memory is damaged."""


class RewardWorker:
    """A worker and its keeper; one question at a time."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_killed = False
        self._reaping: asyncio.Future[None] | None = None
        self.pid = process.pid
        """Of the process that runs the function, once it has told; of its keeper before."""

    @classmethod
    async def start(cls) -> RewardWorker:
        """A process that waits for its `WorkerSpec`. In a session of its own: what is typed at a terminal is not for
        it."""
        command = (sys.executable, "-m", "myxa.actors.rewards.keeper", str(os.getpid()))
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True))

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._is_killed

    async def ask(self, message: object, timeout_s: float) -> Reply:
        """Send one message, read one reply. After any exception (TimeoutError, WorkerGone, SpokeGarbage) the worker is
        of no use."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(frame(message))
                await stdin.drain()
                (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
                if size > MAX_FRAME_BYTES:
                    raise SpokeGarbage(f"a reply of {size} bytes")
                return reply_decoder.decode(await stdout.readexactly(size))
        except msgspec.DecodeError as error:
            raise SpokeGarbage(str(error)) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerGone(await self._how_it_ended()) from None

    async def _how_it_ended(self) -> str:
        code = await self._exit_code()
        if code is None:
            return f"its keeper, process {self._process.pid}, cannot be killed"
        if code >= 0:
            return f"exit code {code}"
        return f"signal {signal.Signals(-code).name}"

    async def _exit_code(self) -> int | None:
        """Of one that has ended, or will soon; None: not even SIGKILL has ended it."""
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    return await self._process.wait()
            self._is_killed = True
            self._signal(signal.SIGKILL)  # somebody stopped the keeper
        return self._process.returncode

    def kill(self) -> None:
        """Have its keeper end it and everything it started, at once."""
        if self.is_alive:
            self._is_killed = True
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def gone(self) -> None:
        """Wait until a killed worker has been reaped and its pipes are closed."""
        # In a task of its own, one for all who wait: asyncio has one future for a pipe's end, and cancels it with any
        # of those who wait for it, for the others too.
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(self._reap())  # noqa: TID251 -- kept here, and ends by its deadlines
        await asyncio.shield(self._reaping)

    async def _reap(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        if await self._exit_code() is None:
            _log.warning("reward worker %d cannot be killed: does it wait for a device that is gone?", self.pid)
            return
        with contextlib.suppress(ConnectionError):
            await stdin.wait_closed()


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
        try:
            reply = await worker.ask(self._spec, START_TIMEOUT_S)
        except TimeoutError:
            worker.kill()
            raise UserCodeError(
                f'a worker process could not load reward function "{self._spec.fn}" within {START_TIMEOUT_S:g} s',
                remedy="make its module quicker to import",
            ) from None
        except (WorkerGone, SpokeGarbage) as gone:
            worker.kill()
            raise UserCodeError(
                f'a worker process ended ({gone}) while it loaded reward function "{self._spec.fn}"',
                remedy="see the actor's log",
            ) from None
        except BaseException:
            worker.kill()
            raise
        if isinstance(reply, LoadFailed):
            worker.kill()
            raise (ConfigError if reply.is_config else UserCodeError)(reply.message, remedy=reply.remedy)
        if not isinstance(reply, Ready):
            worker.kill()
            raise UserCodeError(
                f"a reward worker answered {type(reply).__name__} at its start", remedy="restart the run"
            )
        worker.pid = reply.pid
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
