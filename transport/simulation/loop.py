"""An asyncio event loop without a world: time jumps to the next timer, and nothing comes from outside.

What runs on it is a pure function of its seed. Callbacks of one process run in the order in which asyncio would run
them; between processes the order is drawn, since real processes owe each other none. Sockets, threads, subprocesses
and signals are refused by name. `aiotools.VirtualClock`, `looptime` and `pytest-asyncio`'s loops were considered: they
patch the clock of a selector loop, know no processes, and let real IO in.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ...core.errors import SimulationError
from .process import Process, ProcessState, current_process, process_of

START_S = 1000.0
"""Virtual time at the beginning; not 0, as it is not on a real machine."""
LIMIT_S = 3600.0
MAX_STEPS = 20_000_000

_REMEDY = "keep it out of simulated actors, or hand a simulated one in through the actor's constructor"


class SimLoop(asyncio.BaseEventLoop):
    """See the module's head."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool
    _thread_id: int | None

    def __init__(self, seed: int, *, limit_s: float = LIMIT_S, max_steps: int = MAX_STEPS) -> None:
        """`limit_s`, `max_steps`: virtual time and callbacks after which the run is taken to be endless."""
        super().__init__()
        self.seed = seed
        self.num_steps = 0
        """Callbacks run so far."""
        self.errors: list[dict[str, Any]] = []
        """What would have gone to the exception handler."""
        self._now = START_S
        self._end_s = START_S + limit_s
        self._max_steps = max_steps
        self._random = random.Random(f"{seed}/schedule")
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    # -- running

    def _run_once(self) -> None:
        if not self._ready and not self._stopping:
            self._advance()
        if self.num_steps > self._max_steps:
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
        raise SimulationError(
            f"this runs on a real loop ({type(loop).__name__})", remedy="start it with myxa.transport.simulation.run"
        )
    return loop
