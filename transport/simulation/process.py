"""One simulated process: whatever was started in its context belongs to it, and stops when it does.

asyncio copies the current context into every callback, timer and task. A context variable therefore says to which
process each of them belongs, without any of the code that runs there knowing of it.

    RUNNING <-> PAUSED        RUNNING | PAUSED -> DEAD -> ENDING (its tasks are cleared away, its world is gone)
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from ...core.errors import SimulationError


class ProcessState(Enum):
    """What becomes of a process's callbacks."""

    RUNNING = "running"
    PAUSED = "paused"
    """As after SIGSTOP: everything waits."""
    DEAD = "dead"
    """As after SIGKILL: nothing runs any more, no `finally` either."""
    ENDING = "ending"


_NEXT: dict[ProcessState, tuple[ProcessState, ...]] = {
    ProcessState.RUNNING: (ProcessState.PAUSED, ProcessState.DEAD),
    ProcessState.PAUSED: (ProcessState.RUNNING, ProcessState.DEAD),
    ProcessState.DEAD: (ProcessState.ENDING,),
    ProcessState.ENDING: (),
}


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

    def become(self, state: ProcessState) -> None:
        """Raises SimulationError for what cannot follow."""
        if state not in _NEXT[self.state]:
            raise SimulationError(f"{self} is {self.state.value} and cannot become {state.value}")
        self.state = state

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
