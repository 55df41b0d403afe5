"""The engine's own thread: runs commands between steps, steps while there is work, sleeps when there is none.

Commands run in the order in which they were posted, and the events that a command caused arrive in the asyncio loop
before its result. An exception of a command is the error of its caller. An exception of a step breaks the engine for
good: `on_broken` is called once, and every later command fails.

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
from ....core.protocols import Delta
from .core import EngineCore

T = TypeVar("T")

LOOP_CHECK_S = 1.0
"""An idle thread looks that often whether its loop was closed without a word to it."""

Command = Callable[[EngineCore], None]
_log = logging.getLogger("myxa.embedded")


class DeltaQueue(asyncio.Queue[Delta | EngineError]):
    """The owner of a request: gets its events, as they come."""


class EngineThread:
    """Drives one core; the owners of its requests are `DeltaQueue`s. All methods belong to the loop's thread."""

    def __init__(
        self, core: EngineCore, on_broken: Callable[[EngineError], None], *, name: str, num_threads: int
    ) -> None:
        """`on_broken` is called in the loop that is running now; `num_threads` is torch's."""
        self._core = core
        self._on_broken = on_broken
        self._name = name
        self._num_threads = num_threads
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._broken: EngineError | None = None
        self._unanswered: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
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
        """Run a function between two steps and return its result."""
        result: asyncio.Future[T] = self._loop.create_future()

        def command(core: EngineCore) -> None:
            try:
                value = function(core)
            except Exception as err:  # noqa: BLE001 -- it is the caller's, the engine serves the others
                error = err
                if not isinstance(err, MyxaError):
                    why = f"{self._name}: a command failed: {type(err).__name__}: {err}"
                    error = EngineError(why, remedy="this is a bug; its cause is chained to this error")
                    error.__cause__ = err
                self._tell()
                self._in_loop(lambda: result.done() or result.set_exception(error))
            else:
                self._tell()
                self._in_loop(lambda: result.done() or result.set_result(value))

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
            self._in_loop(lambda: self._break(broken))

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
        events = self._core.take_events()
        if events:
            self._in_loop(lambda: [owner.put_nowait(news) for owner, news in events])

    def _in_loop(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: there is no receiver
            self._is_stopping = True

    # -- in the loop

    def _break(self, error: EngineError) -> None:
        self._broken = error
        for result in list(self._unanswered):
            if not result.done():
                result.set_exception(error)
        self._on_broken(error)
