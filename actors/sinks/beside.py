"""A sink with a thread of its own: what talks to a network or to a large library must not hold the files up.

Knows the `Sink` protocol and the thread that feeds sinks. Must not know any concrete sink. `open` waits a moment for a
refusal (a wrong option is to be told at the start); whatever takes longer goes on beside the run. Bundles that the
sink is too slow for are dropped and counted.
"""

from __future__ import annotations

import logging
from concurrent.futures import TimeoutError as FutureTimeoutError

from ...core.messages import Telemetry
from ...core.sink import Sink, SinkContext
from ..monitor.sink_thread import SinkThread

OPEN_S = 10.0
"""How long the start of the run waits for the sink to open or to refuse."""
CLOSE_S = 6.0
"""How long the end of the run waits for its last writes; below what the monitor gives all sinks."""

_log = logging.getLogger(__name__)


class BesideSink:
    """Hands everything on to `inner`, in a thread of its own."""

    def __init__(
        self, inner: Sink, *, max_bundles: int = 2048, open_s: float = OPEN_S, close_s: float = CLOSE_S
    ) -> None:
        self._inner = inner
        self._max_bundles = max_bundles
        self._open_s = open_s
        self._close_s = close_s
        self._thread: SinkThread | None = None
        self._context: SinkContext | None = None
        self._num_told = 0

    @property
    def name(self) -> str:
        """The inner sink's."""
        return self._inner.name

    def open(self, context: SinkContext) -> None:
        """Start the thread. Raises the ConfigError or LaunchError of an inner sink that refuses in time."""
        self._context = context
        self._thread = SinkThread(
            [self._inner],
            run_dir=context.run_dir,
            run_name=context.run_name,
            clock=context.clock,
            flush_s=2.0,
            max_bundles=self._max_bundles,
            emit=context.emit,
            settings=context.settings,
        )
        try:
            self._thread.start().result(timeout=self._open_s)
        except FutureTimeoutError:
            context.emit("sink-slow", f"sink {self.name} takes longer than {self._open_s:g} s to open; the run goes on")

    def write(self, bundle: Telemetry) -> None:
        """Hand the bundle on, or drop it."""
        if self._thread is not None and self._thread.active:
            self._thread.put(bundle)

    def flush(self) -> None:
        """The thread flushes by itself; what it could not take is told."""
        if self._thread is None or self._context is None:
            return
        lost = self._thread.num_dropped - self._num_told
        if lost:
            self._num_told = self._thread.num_dropped
            self._context.emit("telemetry-dropped", f"sink {self.name} was too slow for {lost} bundles")

    def close(self) -> None:
        """Let the sink write what it has, but not for ever: its thread is a daemon."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.stop().result(timeout=self._close_s)
        except FutureTimeoutError:
            _log.warning("sink %s did not close within %g s; its last data may be lost", self.name, self._close_s)
            return
        thread.join()
