"""Virtual time for simulated processes: an asyncio loop, processes, their clocks and the log of events.

The loop has no outside world. Time jumps to the next timer, and sockets, threads, subprocesses and signals are refused
by name, so a run is a pure function of its seed. Callbacks of one process run in asyncio's order; the order between
processes is drawn at random. `aiotools.VirtualClock`, `looptime` and `pytest-asyncio`'s loops were considered: they
patch the clock of a selector loop, have no processes, and let real IO in.

asyncio copies the current context into every callback, timer and task. A context variable therefore says to which
process each of them belongs. A process moves through these states:

    RUNNING <-> PAUSED        RUNNING | PAUSED -> DEAD -> ENDING (its tasks are cancelled and cleared away)
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import heapq
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from myxa.core.errors import MyxaError


class SimulationError(MyxaError):
    """A simulated run did what cannot be simulated, came to a standstill, or broke an invariant."""


class ProcessState(Enum):
    """What becomes of a process's callbacks."""

    RUNNING = "running"
    PAUSED = "paused"
    """As after SIGSTOP: everything waits."""
    DEAD = "dead"
    """As after SIGKILL: nothing runs any more, no `finally` either."""
    ENDING = "ending"


class Process:
    """One incarnation."""

    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.state = ProcessState.RUNNING
        self.backlog: deque[asyncio.Handle] = deque()
        """Callbacks that were due while it did not run."""
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.paused_s = 0.0
        """Time it has stood still so far; grows when a pause ends."""
        self.stopped_at = 0.0
        """When the last pause began."""
        self.on_death: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def context(self) -> contextvars.Context:
        """A copy of the current context in which everything belongs to this process."""
        made = contextvars.copy_context()
        made.run(_current.set, self)
        return made

    @staticmethod
    def outside() -> contextvars.Context:
        """A copy of the current context that belongs to no process."""
        made = contextvars.copy_context()
        made.run(_current.set, None)
        return made

    def hold(self, handle: asyncio.Handle) -> None:
        """A callback came due while the process does not run. Of a dead one only the steps of tasks are of use, later,
        to clear these away."""
        if self.state is ProcessState.PAUSED or is_step(handle):
            self.backlog.append(handle)


def process_of(handle: asyncio.Handle) -> Process | None:
    """To whom a callback belongs; None: to the world outside."""
    context: contextvars.Context = getattr(handle, "_context")  # noqa: B009  # private, and the same since 3.7
    return context.get(_current)


def current_process() -> Process | None:
    """The process in whose context this code runs."""
    return _current.get()


def is_step(handle: asyncio.Handle) -> bool:
    """It is a step or a wake-up of a task."""
    return isinstance(owner_of(handle), asyncio.Task)


def owner_of(handle: asyncio.Handle) -> Any:
    """The object whose method is called back."""
    callback: Any = getattr(handle, "_callback")  # noqa: B009  # as asyncio's own debug output does
    return getattr(callback, "__self__", None)


_current: contextvars.ContextVar[Process | None] = contextvars.ContextVar("myxa_process", default=None)


START_S = 1000.0
"""Virtual time at the beginning; not 0, as it is not on a real machine."""
LIMIT_S = 3600.0
MAX_STEPS = 20_000_000

_REMEDY = "keep it out of simulated actors, or hand a simulated one in through the actor's constructor"


class SimLoop(asyncio.BaseEventLoop):
    """The event loop in virtual time, with the tasks and timers of each process."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int, *, limit_s: float = LIMIT_S) -> None:
        """`limit_s`: virtual time after which the run is taken to be endless."""
        super().__init__()
        self.seed = seed
        self.num_steps = 0
        """Callbacks run so far."""
        self.errors: list[dict[str, Any]] = []
        """What would have gone to the exception handler."""
        self._now = START_S
        self._end_s = START_S + limit_s
        self._random = random.Random(f"{seed}/schedule")
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    # -- running

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:
            self._advance()
        if self.num_steps > MAX_STEPS:
            raise SimulationError(f"{self.num_steps} callbacks and no end", remedy="is there a loop that never waits?")
        handles = list(self._ready)
        self._ready.clear()
        for handle in handles if len(handles) < 2 else self._shuffled(handles):
            if handle.cancelled():
                continue
            process = process_of(handle)
            if process is not None and process.state in (ProcessState.PAUSED, ProcessState.DEAD):
                process.hold(handle)
                continue
            self.num_steps += 1
            handle._run()  # as BaseEventLoop does

    def _shuffled(self, handles: list[asyncio.Handle]) -> list[asyncio.Handle]:
        """Some order that keeps the order within each process."""
        queues: dict[Process | None, deque[asyncio.Handle]] = {}
        for handle in handles:
            queues.setdefault(process_of(handle), deque()).append(handle)
        if len(queues) == 1:
            return handles
        waiting = list(queues.values())
        mixed: list[asyncio.Handle] = []
        while waiting:
            place = int(self._random.random() * len(waiting))
            mixed.append(waiting[place].popleft())
            if not waiting[place]:
                del waiting[place]
        return mixed

    def _advance(self) -> None:
        """Go to the next timer. Raises SimulationError if there is none, or none before the end of time."""
        timers = self._scheduled
        if self._timer_cancelled_count > 100 and 2 * self._timer_cancelled_count > len(timers):
            self._keep_timers(lambda handle: not handle.cancelled())
            timers = self._scheduled
        while timers and timers[0].cancelled():
            self._pop_timer()
            self._timer_cancelled_count -= 1
        if not timers:
            raise SimulationError(f"standstill: nothing will ever happen again; waiting: {self._waiting()}")
        now = self._now = max(self._now, timers[0].when())
        if now > self._end_s:
            raise SimulationError(f"the run did not end in time; waiting: {self._waiting()}")
        while timers and timers[0].when() <= now:
            handle = self._pop_timer()
            if handle.cancelled():
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(handle)

    def _pop_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # as BaseEventLoop does
        return handle

    def _keep_timers(self, is_wanted: Callable[[asyncio.TimerHandle], bool]) -> None:
        timers, self._scheduled = self._scheduled, []
        for handle in timers:
            if is_wanted(handle):
                self._scheduled.append(handle)
            else:
                handle._scheduled = False  # as BaseEventLoop does
                handle.cancel()
        heapq.heapify(self._scheduled)
        self._timer_cancelled_count = sum(handle.cancelled() for handle in self._scheduled)

    def _waiting(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        return ", ".join(names[:20]) or "nobody"

    # -- processes

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """As always; the task is noted with its process."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        context = options.get("context")
        process = current_process() if context is None else context.run(current_process)
        if process is not None:
            process.tasks.add(task)
        return task

    def resume(self, process: Process) -> None:
        """What the process missed comes now, in order."""
        self._ready.extend(process.backlog)
        process.backlog.clear()

    def timers(self, process: Process) -> list[asyncio.TimerHandle]:
        """Its timers that are still set."""
        return [h for h in self._scheduled if not h.cancelled() and process_of(h) is process]

    def drop_timers(self, process: Process) -> None:
        """A process died: its timers go with it."""
        self._keep_timers(lambda handle: not handle.cancelled() and process_of(handle) is not process)

    # -- the world outside

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        """From this thread only."""
        if self._thread_id is not None and threading.get_ident() != self._thread_id:
            raise SimulationError("a thread called into a simulated loop", remedy=_REMEDY)
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: Any) -> None:
        del event_list

    def _write_to_self(self) -> None:
        pass


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise SimulationError(f"loop.{name} reaches out of the simulation", remedy=_REMEDY)

    refuse.__name__ = name
    return refuse


_OUTSIDE = (
    "run_in_executor", "getaddrinfo", "getnameinfo", "create_connection", "create_server", "create_unix_connection",
    "create_unix_server", "create_datagram_endpoint", "connect_accepted_socket", "connect_read_pipe",
    "connect_write_pipe", "subprocess_exec", "subprocess_shell", "sendfile", "start_tls", "sock_sendfile", "sock_recv",
    "sock_recv_into", "sock_recvfrom", "sock_recvfrom_into", "sock_sendall", "sock_sendto", "sock_connect",
    "sock_accept", "add_reader", "remove_reader", "add_writer", "remove_writer", "add_signal_handler",
    "remove_signal_handler",
)  # fmt: skip
for _name in _OUTSIDE:
    setattr(SimLoop, _name, _refuse(_name))


def simulated_loop() -> SimLoop:
    """The running loop. Raises SimulationError if it is a real one."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, SimLoop):
        raise SimulationError(f"this runs on a real loop ({type(loop).__name__})", remedy="start it with simulator.run")
    return loop


WALL_S = 1_700_000_000.0
"""Wall time at virtual time 0."""


class SimClock:
    """Implements `core.clock.Clock` over a loop's virtual time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, offset_s: float = 0.0) -> None:
        """`offset_s`: by how much this process's clocks are ahead of virtual time."""
        self._loop = loop
        self._offset_s = offset_s
        self._stepped_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time() + self._offset_s

    def wall(self) -> float:
        return self._loop.time() + WALL_S + self._offset_s + self._stepped_s

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back; the monotonic clock does not change."""
        self._stepped_s += seconds


class EventLog:
    """Entries carry virtual time and the number of callbacks run so far, so that any difference in what ran shows."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._entries: list[tuple[float, int, str, tuple[object, ...]]] = []

    def add(self, kind: str, *words: object) -> None:
        """Note an event; `words` are names and numbers of the run, nothing of the machine it runs on."""
        self._entries.append((self._loop.time(), self._loop.num_steps, kind, words))

    def lines(self, kind: str = "") -> list[str]:
        """Readable, oldest first; only of that kind, if given."""
        return [
            " ".join((f"{at:.6f}", str(step), what, *map(str, words)))
            for at, step, what, words in self._entries
            if not kind or kind == what
        ]

    @property
    def digest(self) -> str:
        """16 hex digits over all entries."""
        state = hashlib.blake2b(digest_size=8)
        for line in self.lines():
            state.update(line.encode())
            state.update(b"\n")
        return state.hexdigest()
