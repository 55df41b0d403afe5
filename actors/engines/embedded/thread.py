"""The engine's own thread: runs commands between steps, steps while there is work, sleeps when there is none.

Events travel to one asyncio loop in batches: one wake-up of the loop carries everything since the last one. Commands
run in the order in which they were posted, and the events that a command caused arrive before its result. An exception
of a command is the error of its caller; an exception of a step ends the requests that cause it (`EngineCore.step`). An
engine that cannot compute at all is broken for good: `on_broken` is called once, and every later command fails.

asyncio's executor was considered: a step must not wait behind other jobs, and the thread must end with the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ....core.errors import EngineError, MyxaError
from .core import EngineCore, RequestEvent

T = TypeVar("T")

LOOP_CHECK_S = 1.0
"""An idle thread looks that often whether its loop was closed without a word to it."""

Command = Callable[[EngineCore], None]
_log = logging.getLogger("myxa.embedded")


class EngineThread:
    """Drives one core. All methods belong to the loop's thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        on_events: Callable[[list[RequestEvent]], None],
        on_broken: Callable[[EngineError], None],
        name: str,
        num_threads: int,
    ) -> None:
        """`on_events` and `on_broken` are called in the loop that is running now; `num_threads` is torch's."""
        self._core = core
        self._on_events = on_events
        self._on_broken = on_broken
        self._name = name
        self._num_threads = num_threads
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._broken: EngineError | None = None
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._untold: list[RequestEvent] = []
        self._is_telling = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run a command between two steps; an exception of it is lost. Raises EngineError if the engine is broken or
        closed."""
        if self._broken is not None:
            raise self._broken
        with self._changed:
            if self._is_stopping:
                raise EngineError(f"{self._name} is closed", remedy="build a new one")
            self._commands.append(command)
            self._changed.notify()

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run a function between two steps and return its result; its events arrive before it."""
        result: asyncio.Future[T] = self._loop.create_future()

        def command(core: EngineCore) -> None:
            try:
                value = function(core)
            except MyxaError as err:
                self._answer(result, error=err)
            except Exception as err:  # noqa: BLE001 -- it is the caller's, the engine serves the others
                why = f"{self._name}: a command failed: {type(err).__name__}: {err}"
                error = EngineError(why, remedy="this is a bug; its cause is chained to this error")
                error.__cause__ = err
                self._answer(result, error=error)
            else:
                self._answer(result, value=value)

        self.post(command)
        self._unanswered.add(result)
        result.add_done_callback(self._unanswered.discard)
        return await result

    def stop(self) -> None:
        """Ask the thread to end after the current step."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    async def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False when it did not end in time."""
        deadline = self._loop.time() + timeout_s
        while self._thread.is_alive() and self._loop.time() < deadline:
            await asyncio.sleep(0.002)
        return not self._thread.is_alive()

    # -- in the thread

    def _run(self) -> None:
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            while self._wait():
                if self._core.has_work:
                    self._core.step()
                self._tell()
        except BaseException as err:  # noqa: BLE001 -- the loop must learn of any error, a library's panic too
            why = f"{self._name} broke: {type(err).__name__}: {err}"
            broken = EngineError(why, remedy="restart it; the cause is chained to this error")
            broken.__cause__ = err
            self._in_loop(self._break, broken)

    def _wait(self) -> bool:
        """Sleep until there is something to do, run commands; False: stop."""
        with self._changed:
            while not (self._commands or self._is_stopping or self._core.has_work):
                self._changed.wait(LOOP_CHECK_S)
                self._is_stopping = self._is_stopping or self._loop.is_closed()
            commands, self._commands = self._commands, []
            is_stopping = self._is_stopping
        for command in commands:
            try:
                command(self._core)
            except Exception:  # noqa: BLE001 -- the engine serves the others
                _log.exception("%s: a command failed", self._name)
        return not is_stopping

    def _tell(self) -> None:
        """Add events to the bundle the loop will take; wake it only if it was not woken already."""
        events = self._core.take_events()
        if not events:
            return
        with self._changed:
            self._untold.extend(events)
            if self._is_telling:
                return
            self._is_telling = True
        self._in_loop(self._deliver)

    def _answer(self, result: asyncio.Future[T], *, value: T | None = None, error: MyxaError | None = None) -> None:
        self._tell()
        self._in_loop(_settle, result, value, error)

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: there is no receiver
            self._is_stopping = True

    # -- in the loop

    def _deliver(self) -> None:
        with self._changed:
            events, self._untold = self._untold, []
            self._is_telling = False
        self._on_events(events)

    def _break(self, error: EngineError) -> None:
        self._broken = error
        for result in list(self._unanswered):
            if not result.done():
                result.set_exception(error)
        self._on_broken(error)


def _settle(result: asyncio.Future[T], value: T, error: MyxaError | None) -> None:
    if result.done():  # the caller was cancelled
        return
    if error is not None:
        result.set_exception(error)
    else:
        result.set_result(value)
