"""A process that runs a user's code beside an actor, and the pipes to it: length-prefixed msgpack frames, typed on both
sides.

    actor ── subreaper ── worker    `python -m myxa.actors.subreaper <pid> <grace> :<module>`; `module.main()` is the
                                    worker

`WorkerPool` holds the workers of one function, a reward's or a workflow's, and knows which call has which worker. Calls
that share a worker run in its loop (`loop.py`).

A process that hangs is killed with all that it started; its exit is reported. Written by hand, small and typed, since
`concurrent.futures.ProcessPoolExecutor` pickles, cannot kill one hung worker (the whole pool breaks), and cannot say
which task a dead worker had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Callable
from typing import Any, BinaryIO, Self, TypeVar, cast

import msgspec
import numpy as np

from ...core.errors import ConfigError, MyxaError, UserCodeError

_log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
START_TIMEOUT_S = 120.0
"""For importing the user's module: it may be heavy."""
END_TIMEOUT_S = 8.0
"""For a subreaper to end all that its worker started, and then itself, with the worker's exit code."""


class WorkerGone(Exception):
    """The worker's end of the pipe closed; the text says how it ended."""


class SpokeGarbage(Exception):
    """What came through the pipe is no reply: the function writes where it should not, or its memory is damaged."""


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The user's code is loaded."""

    pid: int
    """Of the process that calls it; the one that was started is its subreaper."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The user's code could not be loaded; the worker ends."""

    message: str
    remedy: str
    is_config: bool
    """A mistake in the run file, not in the user's code."""

    @classmethod
    def of(cls, error: MyxaError) -> Self:
        """What to report of it."""
        return cls(error.message, error.remedy, isinstance(error, ConfigError))


class Cancel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The result of that call is not wanted any more."""

    call: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what says how a call ended."""

    call: int
    is_hanging: bool = False
    """Something of it still runs: its worker gets no further calls."""


class Stuck(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Code that cannot be interrupted holds the worker, which ends now."""

    place: str
    call: int
    """Whose code it is; negative: unknown."""


class Lost(Exception):
    """The worker ended while it had the call; the text says how."""

    def __init__(self, how: str, stuck: Stuck | None = None, *, garbage: str = "") -> None:
        """`stuck`: what it ended for. `garbage`: what it wrote into its own pipe."""
        super().__init__(how if stuck is None else f"its code cannot be interrupted at {stuck.place}: {how}")
        self.stuck = stuck
        self.garbage = garbage


def _plain(value: Any) -> Any:
    """Arrays with type and shape, so that a wrong one is seen where it arrives."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        if array.dtype.kind in "biuf":
            return [array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()]
    elif isinstance(value, np.generic):
        return cast("Any", value.item())
    raise TypeError(f"a value of type {type(cast('object', value)).__name__} cannot be sent between processes")


def array_in(kind: Any, value: Any) -> Any:
    """The `dec_hook` for arrays. Raises ValueError for what is none."""
    dtype, shape, data = value
    if np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_start_decoder: msgspec.msgpack.Decoder[Ready | LoadFailed] = msgspec.msgpack.Decoder(Ready | LoadFailed)


def frame(message: object) -> bytes:
    """A message with its length in front. Raises ValueError over the limit, TypeError for what cannot be sent."""
    body = encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


class UserProcess:
    """A worker and its subreaper, seen from the actor."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_killed = False
        self.calls: dict[int, Call] = {}
        self.ending: set[int] = set()
        """Calls that were given up, and have not ended yet."""
        self.is_ready = False
        self.is_retired = False
        """It gets no further calls: something of an ended one still runs in it, or it was made for one."""
        self._reaping: asyncio.Future[None] | None = None
        self.pid = process.pid
        """Of the process that runs the user's code, once it has reported; of its subreaper before."""

    @classmethod
    async def start(cls, module: str, grace_s: float = 0.0) -> Self:
        """A worker that waits for its first frame. In its own session: what is typed at a terminal is not for
        it. `grace_s`: what it has to clean up when this process dies."""
        command = (sys.executable, "-m", "myxa.actors.subreaper", str(os.getpid()), str(grace_s), f":{module}")
        return cls(await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True))

    async def load(self, spec: object, what: str) -> None:
        """Have it load what the spec names; `what` that is, for messages. Kills it and raises ConfigError or
        UserCodeError if it cannot."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self.send(spec)
                reply = _start_decoder.decode(await self.receive())
        except TimeoutError:
            self.kill()
            raise UserCodeError(
                f"a worker process could not load {what} within {START_TIMEOUT_S:g} s",
                remedy="make its module quicker to import",
            ) from None
        except (WorkerGone, SpokeGarbage, msgspec.MsgspecError) as gone:
            self.kill()
            raise UserCodeError(
                f"a worker process ended ({gone}) while it loaded {what}", remedy="see the actor's log"
            ) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(reply, LoadFailed):
            self.kill()
            raise (ConfigError if reply.is_config else UserCodeError)(reply.message, remedy=reply.remedy)
        self.pid = reply.pid

    def end_input(self) -> None:
        """Tell the worker that nothing more comes: it ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._is_killed

    async def send(self, message: object) -> None:
        """Raises WorkerGone, and ValueError or TypeError for what cannot be sent."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(frame(message))
            await stdin.drain()
        except ConnectionError:
            raise WorkerGone(await self.how_it_ended()) from None

    async def receive(self) -> bytes:
        """The body of the next frame. Raises WorkerGone and SpokeGarbage."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise SpokeGarbage(f"a reply of {size} bytes")
            return await stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerGone(await self.how_it_ended()) from None

    async def how_it_ended(self) -> str:
        """In words."""
        code = await self._exit_code()
        if code is None:
            return f"its subreaper, process {self._process.pid}, cannot be killed"
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
            self._signal(signal.SIGKILL)  # the subreaper was stopped from outside
        return self._process.returncode

    def kill(self) -> None:
        """Have its subreaper end it and everything it started, at once."""
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
        """Wait until an ended or killed worker has been reaped and its pipes are closed."""
        # In its own task, one for all who wait: asyncio has one future for a pipe's end, and cancels it with any
        # of those who wait for it, for the others too.
        if self._reaping is None:
            self._reaping = asyncio.ensure_future(self._reap())  # noqa: TID251 -- kept here, and ends by its deadlines
        await asyncio.shield(self._reaping)

    async def _reap(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        if await self._exit_code() is None:
            _log.warning("worker process %d cannot be killed: does it wait for a device that is gone?", self.pid)
            return
        with contextlib.suppress(ConnectionError):
            await stdin.wait_closed()


class Call:
    """One call in a worker."""

    def __init__(self, worker: UserProcess, number: int) -> None:
        self.worker = worker
        self.number = number
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        """What the worker says of it, `Ended` or `Lost` at last."""
        self.place = ""
        """Where it waits, as far as the worker says it."""
        self.is_over = False
        """Nothing of it is left in the worker."""


T = TypeVar("T")


class WorkerPool:
    """At most `max_workers` processes for one function of the user's, started as they are needed."""

    def __init__(
        self,
        module: str,
        spec: object,
        what: str,
        decoder: msgspec.msgpack.Decoder[Any],
        *,
        max_workers: int,
        max_calls: float,
        starts_at_once: int = 1,
    ) -> None:
        """`module`: of the worker. `what` the spec names, for messages. `decoder`: of the worker's messages.
        `max_calls`: of one worker, before a further one is started; 1: a call that is given up ends its worker."""
        self._module = module
        self._spec = spec
        self._what = what
        self._decoder = decoder
        self._max_workers = max_workers
        self._max_calls = max_calls
        self._starting = asyncio.Semaphore(starts_at_once)
        self._number = 0
        self.workers: set[UserProcess] = set()
        self._readers: dict[UserProcess, asyncio.Task[None]] = {}
        self.is_closed = False
        self.grace_s = 0.0
        """For the workers to clean up when their input ends, or this process."""
        self.silent_s: float | None = None
        """A worker that says nothing for so long is killed; None: it may say nothing."""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self.workers if worker.is_ready and worker.is_alive)

    @contextlib.asynccontextmanager
    async def calling(self, *, is_alone: bool = False) -> AsyncGenerator[Call]:
        """A call in one of the workers, cancelled there unless it is over when the block is left. `is_alone`: in a
        worker of its own. Raises UserCodeError or ConfigError where no worker can be started."""
        worker = await self.take(is_alone=is_alone)
        self._number += 1
        call = worker.calls[self._number] = Call(worker, self._number)
        try:
            yield call
        finally:
            del worker.calls[call.number]
            if not call.is_over and worker.is_alive:
                if self._max_calls == 1:
                    worker.kill()
                else:
                    worker.ending.add(call.number)
                    with contextlib.suppress(WorkerGone):
                        await worker.send(Cancel(call.number))
            self._mind(worker)

    async def take(self, *, is_alone: bool = False) -> UserProcess:
        """The worker for a call, which the caller enters in its `calls` at once."""
        async with self._starting:
            if is_alone:
                worker = await self._start()
                worker.is_retired = True
                return worker
            fit = [one for one in self.workers if one.is_ready and one.is_alive and not one.is_retired]
            least = min(fit, key=_num_calls, default=None)
            if least is not None and (_num_calls(least) < self._max_calls or len(fit) >= self._max_workers):
                return least
            return await self._start()

    async def _start(self) -> UserProcess:
        self._refuse_when_closed()
        worker = await UserProcess.start(self._module, self.grace_s)
        self.workers.add(worker)
        try:
            self._refuse_when_closed()
            await worker.load(self._spec, self._what)
            self._refuse_when_closed()
        except BaseException:
            worker.kill()
            await worker.gone()
            self.workers.discard(worker)  # not before: where this is cancelled meanwhile, `close` waits for it
            raise
        worker.is_ready = True
        self._readers[worker] = asyncio.ensure_future(self._read(worker))  # noqa: TID251 -- ended by `close`
        return worker

    def _refuse_when_closed(self) -> None:
        if self.is_closed:
            raise UserCodeError(f"{self._what} was called after its actor ended")

    async def _read(self, worker: UserProcess) -> None:
        lost = await self._until_lost(worker)
        for call in worker.calls.values():
            call.is_over = True
            call.inbox.put_nowait(lost)
        if worker.is_alive and not worker.is_retired and not self.is_closed:
            _log.warning("worker process %d of %s ended: %s", worker.pid, self._what, lost)
        worker.kill()
        await worker.gone()
        self.workers.discard(worker)
        del self._readers[worker]

    async def _until_lost(self, worker: UserProcess) -> Lost:
        """Pass on its messages until it is gone or of no use."""
        stuck: Stuck | None = None
        while True:
            try:
                async with asyncio.timeout(self.silent_s):
                    message = self._decoder.decode(await worker.receive())
            except TimeoutError:
                worker.kill()
                return Lost(f"it said nothing for {self.silent_s:g} s: {await worker.how_it_ended()}", stuck)
            except (SpokeGarbage, msgspec.MsgspecError, ValueError) as garbage:
                return Lost(f"it wrote into its own pipe ({garbage}) and was killed", garbage=str(garbage))
            except WorkerGone as gone:
                return Lost(str(gone), stuck)
            if isinstance(message, Stuck):
                stuck = message
            else:
                self.hear(worker, message)

    def hear(self, worker: UserProcess, message: Any) -> None:
        """Pass on what it says of one of its calls."""
        call = worker.calls.get(message.call)
        if call is not None:
            call.inbox.put_nowait(message)
        if isinstance(message, Ended):
            worker.ending.discard(message.call)
            worker.is_retired |= message.is_hanging
            if call is not None:
                call.is_over = True
            self._mind(worker)

    def _mind(self, worker: UserProcess) -> None:
        if worker.is_retired and not worker.calls:
            worker.kill()

    async def close(self) -> None:
        """End all workers; what runs in them may clean up."""
        self.is_closed = True
        workers, readers = list(self.workers), list(self._readers.values())
        if self.grace_s and readers:
            for worker in workers:
                worker.end_input()
            await asyncio.wait(readers, timeout=self.grace_s)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in workers), *readers, return_exceptions=True)


def _num_calls(worker: UserProcess) -> int:
    return len(worker.calls) + len(worker.ending)


# -- the worker's side


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes under new numbers that children do not inherit; input becomes empty, output becomes the log."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb", buffering=0)


def begin(load: Callable[[bytes], T]) -> tuple[T, BinaryIO, BinaryIO]:
    """What `load` makes of the first frame, which is reported, and the worker's pipes. Ends the process where nothing
    comes, or it cannot be loaded."""
    incoming, outgoing = own_pipes()
    if (first := read_frame(incoming)) is None:
        sys.exit()
    try:
        loaded = load(first)
    except MyxaError as error:
        write_frame(outgoing, LoadFailed.of(error))
        sys.exit()
    write_frame(outgoing, Ready(os.getpid()))
    return loaded, incoming, outgoing


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME_BYTES:
        return None
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, message: object) -> None:
    """The whole frame. Raises as `frame`."""
    data = memoryview(frame(message))
    while data:
        data = data[stream.write(data) :]
