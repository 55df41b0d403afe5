"""A process that runs a user's code beside an actor, and the pipes to it: length-prefixed frames of msgpack.

    actor ── subreaper ── worker    `python -m myxa.actors.subreaper <pid> <grace> :<module>`; `module.main()` is the
                                    worker

`WorkerPool` is the actor's side: the workers of one function, and which call has which worker. `SharedLoop` is the
worker's side: an event loop that runs many calls side by side. A process that hangs is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Generic, TypeVar, cast

import msgspec
import numpy as np

from ...core.errors import ConfigError, MyxaError, UserCodeError
from .functions import LIBRARIES, PACKAGE

_log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20
START_TIMEOUT_S = 120.0
"""For importing the user's module: it may be heavy."""
MAX_STARTS = 2
SILENT_S = 20.0
"""A worker that says nothing for so long, beyond the time that its own watch needs, is killed: C code holds its
interpreter."""
END_TIMEOUT_S = 8.0
"""For a subreaper to end all that its worker started, and then itself, with the worker's exit code."""


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First frame of a worker: the user's code is loaded, or could not be."""

    pid: int = 0
    """Of the process that calls it; the one that was started is its subreaper."""
    message: str = ""
    """Why not; the worker ends."""
    remedy: str = ""
    is_config: bool = False
    """A mistake in the run file, not in the user's code."""


class Cancel(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The result of that call is not wanted any more."""

    call: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what says how a call ended."""

    call: int
    is_hanging: bool = False
    """Something of it still runs: its worker gets no further calls."""


class Waits(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The worker's loop turns, or code that held it was interrupted."""

    place: str
    """Where the call waits that waits longest for anything but the actor; empty: none does, or it is unknown."""


class Stuck(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Code that cannot be interrupted holds the worker, which ends now."""

    place: str
    call: int
    """Whose code it is; negative: unknown."""


class Lost(Exception):
    """The worker ended while it had the call; the text says how."""

    def __init__(self, how: str, culprit: int = -1) -> None:
        """`culprit`: number of the call that it ended for; negative: unknown."""
        super().__init__(how)
        self.culprit = culprit


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
_started = msgspec.msgpack.Decoder(Started)


def frame(message: object) -> bytes:
    """A message with its length in front. Raises ValueError over the limit, TypeError for what cannot be sent."""
    body = encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are over the limit of {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


class UserProcess:
    """A worker and its subreaper, seen from the actor. Its pool's task for it waits for its end."""

    def __init__(self, *, is_alone: bool) -> None:
        self.is_alone = is_alone
        self.calls: dict[int, Call] = {}
        self.is_ready = False
        self.is_retired = False
        """Something of an ended call still runs in it: it gets no further calls, and ends with those that it has."""
        self.pid = 0
        """Of the process that runs the user's code, once it is ready."""
        self.is_killed = False
        self.culprit = -1
        """The call that it was killed for."""
        self._process: Process | None = None

    async def start(self, python: tuple[str, ...], module: str, grace_s: float, env: Mapping[str, str] | None) -> None:
        """Have it wait for its first frame. In its own session: what is typed at a terminal is not for it. `grace_s`:
        what it has to clean up when this process dies. `env`: None: this process's."""
        command = (*python, "-m", "myxa.actors.subreaper", str(os.getpid()), str(grace_s), f":{module}")
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=env
        )
        if self.is_killed:
            self._process.terminate()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self.is_killed

    async def send(self, message: object) -> None:
        """Raises ValueError or TypeError for what cannot be sent. That it is gone is seen where it is read."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(frame(message))
            await self._process.stdin.drain()

    async def receive(self) -> bytes:
        """The body of the next frame. Raises Lost."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a reply of {size} bytes")
            return await self._process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Lost(await self._how_it_ended(), self.culprit) from None

    async def _how_it_ended(self) -> str:
        code = await self.gone()
        if code is None:
            return f"its subreaper, process {self.pid}, cannot be killed"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def end_input(self) -> None:
        """Tell the worker that nothing more comes: it ends by itself."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self, culprit: int = -1) -> None:
        """Have its subreaper end it and everything it started, at once. `culprit`: the call that it is ended for."""
        if not self.is_killed:
            self.is_killed, self.culprit = True, culprit
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()

    async def gone(self) -> int | None:
        """Wait until an ended or killed worker has been reaped; its exit code, None if SIGKILL has not ended it."""
        self.end_input()
        if self._process is None:
            return 0
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_TIMEOUT_S):
                    return await self._process.wait()
            with contextlib.suppress(ProcessLookupError):  # the subreaper was stopped from outside
                os.killpg(self._process.pid, signal.SIGKILL)
        _log.warning("worker process %d cannot be killed: does it wait for a device that is gone?", self.pid)
        return None


class Call:
    """One call in a worker."""

    def __init__(self, worker: UserProcess, number: int) -> None:
        self.worker = worker
        self.number = number
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        """What the worker says of it, `Ended` or `Lost` at last."""
        self.is_over = False
        """Nothing of it is left in the worker."""


T = TypeVar("T")


@dataclass(eq=False)
class WorkerPool:
    """At most `max_workers` processes for one function of the user's, started as they are needed."""

    module: str
    """Its `main` is a worker."""
    spec: object
    what: str
    """That the spec names, for messages."""
    decoder: msgspec.msgpack.Decoder[Any]
    """Of the worker's messages."""
    _: KW_ONLY
    max_workers: int
    max_calls: float
    """Of one worker, before a further one is started; 1: a call that is given up ends its worker."""
    starts_at_once: int = 1
    grace_s: float = 0.0
    """For the workers to clean up when their input ends, or this process."""
    max_block_s: float = 0.0
    """Of the workers' loops; 0: they may be silent."""

    def __post_init__(self) -> None:
        self._python: tuple[str, ...] = (sys.executable,)
        self._env: Mapping[str, str] | None = None
        self._starting = asyncio.Semaphore(self.starts_at_once)
        self._silent_s = SILENT_S + 5 * self.max_block_s if self.max_block_s else None
        self.on_waits: Callable[[str], None] = lambda place: None
        """Called with where a call waits: function and file."""
        self._number = 0
        self.workers: dict[UserProcess, asyncio.Task[None]] = {}
        """With the tasks that live as long as they do."""
        self.is_closed = False

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
            if is_alone or (self.max_calls == 1 and not call.is_over):
                worker.kill()
            elif not call.is_over and worker.is_alive:
                await worker.send(Cancel(call.number))
            _mind(worker)

    def resize(self, num: int) -> None:
        """So many workers at most. Surplus ones get no further calls, and end with those that they have."""
        self.max_workers = num
        for worker in sorted(self._fit(), key=lambda worker: -len(worker.calls))[num:]:
            worker.is_retired = True
            _mind(worker)

    async def take(self, *, is_alone: bool = False) -> UserProcess:
        """For a call that is entered at once. One that ends while it loads: a second one tries."""
        async with self._starting:
            num_lost = 0
            while True:
                fit = self._fit()
                least = min(fit, key=lambda worker: len(worker.calls), default=None)
                if not is_alone and least and (len(least.calls) < self.max_calls or len(fit) >= self.max_workers):
                    return least
                if self.is_closed:
                    raise UserCodeError(f"{self.what} was called after its actor ended")
                worker = UserProcess(is_alone=is_alone)
                started = asyncio.get_running_loop().create_future()
                self.workers[worker] = asyncio.ensure_future(self._live(worker, started))  # noqa: TID251 -- ends with it
                try:
                    await started
                except Lost as lost:
                    num_lost += 1
                    if num_lost < MAX_STARTS:
                        continue
                    raise UserCodeError(
                        f"a worker process ended ({lost}) while it loaded {self.what}",
                        remedy=f"see the actor's log; {self._python[0]} must have this myxa",
                    ) from None
                except BaseException:
                    worker.kill()
                    raise
                if not worker.is_retired:  # by a resize, while it started
                    return worker

    def _fit(self) -> list[UserProcess]:
        """Workers that take calls."""
        return [
            worker
            for worker in self.workers
            if worker.is_ready and worker.is_alive and not (worker.is_alone or worker.is_retired)
        ]

    async def _live(self, worker: UserProcess, started: asyncio.Future[None]) -> None:
        try:
            try:
                await worker.start(self._python, self.module, self.grace_s, self._env)
                await self._load(worker)
            except Exception as error:  # noqa: BLE001 -- raised where it is waited for
                if not started.done():
                    started.set_exception(error)
                return
            worker.is_ready = True
            if not started.done():
                started.set_result(None)
            lost = await self._until_lost(worker)
            for call in worker.calls.values():
                call.is_over = True
                call.inbox.put_nowait(lost)
            if not (worker.is_killed or worker.is_alone or worker.is_retired or self.is_closed):
                _log.warning("worker process %d of %s ended: %s", worker.pid, self.what, lost)
        finally:
            worker.kill()
            await worker.gone()
            del self.workers[worker]

    async def _load(self, worker: UserProcess) -> None:
        """Have it load what the spec names. Raises ConfigError or UserCodeError if it cannot, Lost if it ends."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await worker.send(self.spec)
                reply = _started.decode(await worker.receive())
        except TimeoutError:
            raise UserCodeError(
                f"a worker process could not load {self.what} within {START_TIMEOUT_S:g} s",
                remedy="make its module quicker to import",
            ) from None
        except ValueError as garbage:
            raise Lost(str(garbage)) from None
        if not reply.pid:
            raise (ConfigError if reply.is_config else UserCodeError)(reply.message, remedy=reply.remedy)
        worker.pid = reply.pid

    async def _until_lost(self, worker: UserProcess) -> Lost:
        """Pass on its messages until it is gone or of no use."""
        stuck: Stuck | None = None
        while True:
            try:
                async with asyncio.timeout(self._silent_s):
                    body = await worker.receive()
                message = self.decoder.decode(body)
            except TimeoutError:
                worker.kill()
                return Lost(f"it said nothing for {self._silent_s:g} s: C code holds its interpreter, or it is stopped")
            except ValueError as garbage:  # the function writes where it should not, or its memory is damaged
                return Lost(f"it wrote into its own pipe ({garbage}) and was killed")
            except Lost as lost:
                return lost if stuck is None else Lost(f"its code blocked it at {stuck.place}: {lost}", stuck.call)
            if isinstance(message, Stuck):
                stuck = message
            elif isinstance(message, Waits):
                if message.place:
                    self.on_waits(message.place)
            elif (call := worker.calls.get(message.call)) is not None:
                call.is_over = isinstance(message, Ended)
                call.inbox.put_nowait(message)
            if isinstance(message, Ended):
                worker.is_retired |= message.is_hanging
                _mind(worker)

    async def close(self) -> None:
        """End all workers; what runs in them may clean up."""
        self.is_closed = True
        workers = dict(self.workers)
        if self.grace_s and workers:
            for worker in workers:
                worker.end_input()
            await asyncio.wait(workers.values(), timeout=self.grace_s)
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.gone() for worker in workers), *workers.values(), return_exceptions=True)


def _mind(worker: UserProcess) -> None:
    if worker.is_retired and not worker.calls:
        worker.end_input()  # what was given up may clean up


# -- the worker's side

GRACE_S = 2.0
"""For cancelled code to clean up; then it is left alone."""
MAX_INTERRUPTS = 3
"""Of one call, before this process is given up."""
STUCK_EXIT = 70
MAX_THREADS = 1024


def run_worker(load: Callable[[bytes, BinaryIO], SharedLoop[Any]]) -> None:
    """Report what comes of `load(first frame, outgoing pipe)`, run that loop until the input ends, and end this
    process. The two pipes get new numbers that children do not inherit; input becomes empty, output becomes the log."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    if (first := read_frame(incoming)) is None:
        sys.exit()
    try:
        with asyncio.Runner() as runner:
            runner.run(load(first, outgoing).run(incoming))
            os._exit(0)  # threads that hang would be waited for
    except MyxaError as error:
        is_config = isinstance(error, ConfigError)
        write_frame(outgoing, Started(message=error.message, remedy=error.remedy, is_config=is_config))
        sys.exit()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame; None at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def write_frame(stream: BinaryIO, message: object) -> None:
    """The whole frame. Raises as `frame`."""
    data = memoryview(frame(message))
    while data:
        data = data[stream.write(data) :]


class Blocked(BaseException):
    """Raised into code that holds the loop. No Exception, so that user code does not take it for one of its own."""


class TookTooLong(Exception):
    """The text says where the code was."""


class UserCall(ABC):
    """One of those that share the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.threads: set[int] = set()
        """That its code runs in now."""
        self.part: asyncio.Task[Any] | None = None
        """Its code that is awaited now."""
        self._is_left_alone = self._is_cancelled = False
        self.task = loop.create_task(self._begun())

    async def _begun(self) -> None:
        CALL.set(self)
        await self.run()

    @abstractmethod
    async def run(self) -> None:
        """All of it, and the report of its end."""

    async def within(self, part: Awaitable[T], limit_s: float) -> T:
        """The user's part of it: its result, or what it raises. Raises TookTooLong, and CancelledError if this call is
        cancelled; the part is then cancelled too and waited for, though not for ever."""
        raised: list[BaseException] = []

        async def guarded() -> Any:
            try:
                return await part
            except BaseException as error:  # noqa: BLE001 -- raised below: some would end the loop
                raised.append(error)

        until_s = asyncio.get_running_loop().time() + limit_s
        task = self.part = asyncio.ensure_future(guarded())  # noqa: TID251 -- awaited here
        try:
            while not task.done() and (left_s := self.left_s(until_s)) > 0:
                await asyncio.wait({task}, timeout=left_s)
            if not task.done():
                raise TookTooLong(self.place())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_S)
                self._is_left_alone |= not task.done()
            self.part = None
        if raised:
            raise raised[0]
        return task.result()

    def left_s(self, until_s: float) -> float:
        """For the part that runs, or until this is to be asked again. `until_s`: its limit, on the loop's clock."""
        return until_s - asyncio.get_running_loop().time()

    def cancel(self) -> None:
        """Once: what it cleans up is not cut."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    @property
    def is_hanging(self) -> bool:
        """Whether something of it still runs, beside its task."""
        return self._is_left_alone or bool(self.threads)

    def place(self) -> str:
        """Where its code waits; empty: unknown."""
        running = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        frames = [frame for thread in self.threads & running.keys() for frame in _above(running[thread])]
        return user_place([*frames, *(_awaited(self.part.get_coro()) if self.part is not None else ())])


CALL: ContextVar[UserCall | None] = ContextVar("call", default=None)
"""That the running code belongs to."""


def is_cancelled(error: BaseException) -> bool:
    """Whether the running task is to end, which is not the doing of the user's code in it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _above(frame: FrameType | None) -> Iterator[FrameType]:
    """It, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited(coro: Any) -> Iterable[FrameType]:
    frames: list[FrameType] = []
    while coro is not None:
        frames += [part for name in ("cr_frame", "gi_frame", "ag_frame") if (part := getattr(coro, name, None))]
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        coro = next((part for name in names if (part := getattr(coro, name, None)) is not None), None)
    return reversed(frames)


def user_place(frames: Iterable[FrameType]) -> str:
    """`Env.step (env.py:22)`: the innermost frame of the user's own code, else of a library; empty: there is none."""
    outside_frames = [frame for frame in frames if not frame.f_code.co_filename.startswith(PACKAGE)]
    own_frames = [frame for frame in outside_frames if not frame.f_code.co_filename.startswith(LIBRARIES)]
    for frame in own_frames or outside_frames:
        return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return ""


class CallThreads(ThreadPoolExecutor):
    """Each is noted with the call that it works for."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        threads = call.threads if (call := CALL.get()) is not None else set[int]()

        def run() -> T:
            threads.add(thread := threading.get_ident())
            try:
                return fn(*args, **kwargs)
            finally:
                threads.discard(thread)

        return super().submit(run)


C = TypeVar("C", bound=UserCall)


class SharedLoop(ABC, Generic[C]):
    """The calls of this process.

    main thread   the loop: async parts of all calls
    threads       plain parts, and what `asyncio.to_thread` is given
    incoming      reads what the actor says
    watch         interrupts (SIGUSR1) code that holds the loop too long: that call fails, with its place
    """

    def __init__(self, max_block_s: float, outgoing: BinaryIO, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        """`max_block_s`: 0 for code that may hold the loop. `decoder`: of the actor's messages."""
        self._max_block_s = max_block_s
        self._decoder = decoder
        self._outgoing, self._sending = outgoing, threading.Lock()
        self._main, self._pid = threading.get_ident(), os.getpid()
        self._never = threading.Event()
        self._beat_s = 0.0
        """When the loop turned last, or code that holds it was interrupted."""
        self._num_interrupts = 0
        self._interrupted: UserCall | None = None
        self.calls: dict[int, C] = {}

    async def run(self, incoming: BinaryIO) -> None:
        """Until the input ends; then all calls are ended, what they clean up included. Raises as `begin`."""
        self.loop = asyncio.get_running_loop()
        self.loop.set_default_executor(CallThreads(MAX_THREADS))  # one that hangs delays no other
        async with contextlib.AsyncExitStack() as stack:
            await self.begin(stack)
            self.put(Started(self._pid))
            await self._until_over(incoming)

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        """What calls need beside them, until the last one has ended. Raises MyxaError."""

    async def _until_over(self, incoming: BinaryIO) -> None:
        over = asyncio.Event()

        def read() -> None:
            while (body := read_frame(incoming)) is not None:
                self.loop.call_soon_threadsafe(self._take, body)
            self.loop.call_soon_threadsafe(over.set)

        threading.Thread(target=read, name="incoming", daemon=True).start()
        if self._max_block_s:
            signal.signal(signal.SIGUSR1, self._interrupt)
            self._beat()
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        await over.wait()
        for call in self.calls.values():
            call.cancel()
        if self.calls:
            await asyncio.wait([call.task for call in self.calls.values()])

    @abstractmethod
    def take(self, message: Any) -> None:
        """What the actor says, but for `Cancel`."""

    def _take(self, body: bytes) -> None:
        message = self._decoder.decode(body)
        if not isinstance(message, Cancel):
            self.take(message)
        elif (call := self.calls.get(message.call)) is not None:
            call.cancel()

    def place(self) -> str:
        """Where the call waits that waits longest: function and file."""
        return ""

    def put(self, message: object) -> None:
        """Send it; from any thread. Its reader never waits for this process."""
        if os.getpid() != self._pid:  # a copy that the user's code forked and let return
            os._exit(0)
        with self._sending, contextlib.suppress(OSError):  # the actor is gone; the end of the input says so too
            write_frame(self._outgoing, message)

    def _beat(self) -> None:
        self._beat_s, self._num_interrupts = time.monotonic(), 0
        self.loop.call_later(self._max_block_s / 4, self._beat)
        self.put(Waits(self.place()))

    def _watch(self) -> None:
        was_late = False
        while True:
            self._never.wait(self._max_block_s / 4)
            was_late, is_late = self._is_late(3), was_late  # twice: the loop turns first where all stood still
            if self._num_interrupts >= MAX_INTERRUPTS or (is_late and was_late):
                place = user_place(_above(sys._current_frames().get(self._main)))  # pyright: ignore[reportPrivateUsage]
                task, calls = asyncio.current_task(self.loop), list(self.calls.items())
                self.put(Stuck(place, next((number for number, c in calls if task in (c.task, c.part)), -1)))
                os._exit(STUCK_EXIT)
            if self._is_late():
                signal.pthread_kill(self._main, signal.SIGUSR1)

    def _is_late(self, times: float = 1) -> bool:
        return time.monotonic() - self._beat_s > times * self._max_block_s

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        call = CALL.get()
        if call is None or self._sending.locked() or not self._is_late():
            return
        # The loop runs what is due before it beats again: each call has its own count, and is no silence of them all.
        self._num_interrupts = self._num_interrupts + 1 if call is self._interrupted else 1
        self._interrupted, self._beat_s, place = call, time.monotonic(), user_place(_above(frame))
        self.put(Waits(place))
        raise Blocked(f"blocked its process for {self._max_block_s:g} s at {place}")
