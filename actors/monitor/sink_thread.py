"""One thread that feeds all sinks, so that no disk, socket or library can hold the monitor's loop up.

    put(bundle) -> bounded queue -> thread: write to every sink -> flush at least every `flush_s`

A sink that raises is switched off with one event; the others stay. One whose disk refuses (`core/files.py`) stays:
what it could not take is counted, and it is flushed until that can be written. The thread is a daemon: a sink that
hangs in the kernel costs its data, never the end of the process. `concurrent.futures` was considered: its workers are
joined at interpreter exit, so a hanging sink would hang the run.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

from ...core.clock import Clock
from ...core.errors import ConfigError, LaunchError
from ...core.files import REFUSED_EVENT, WRITTEN_EVENT, refusal, refused
from ...core.messages import Event, Telemetry
from ...core.sink import Sink, SinkContext

_log = logging.getLogger(__name__)


class SinkThread:
    """Owns the sinks from `start` to `stop`."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        run_dir: Path,
        run_name: str,
        clock: Clock,
        source: str = "monitor",
        flush_s: float = 0.5,
        max_bundles: int = 4096,
        emit: Callable[[str, str], None] | None = None,
        settings: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        """`emit`: gets events about these sinks and of them; None: these sinks themselves."""
        self._sinks = list(sinks)
        self._opened: list[Sink] = []
        self._refused: dict[str, int] = {}
        """Sink whose disk refuses -> bundles that it could not take."""
        self._source = source
        self._clock = clock
        self._flush_s = flush_s
        self._max_bundles = max_bundles
        self._queue: queue.SimpleQueue[Telemetry | Future[None] | None] = queue.SimpleQueue()
        self._events: deque[Event] = deque()
        """Appended to by any thread, taken from by ours."""
        self._emit = emit or self._tell
        self._context = SinkContext(
            run_dir=run_dir, run_name=run_name, clock=clock, emit=self._emit, settings=settings or {}
        )
        self._opening: Future[None] = Future()
        self._ending: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Bundles refused because the sinks were too slow."""

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(sink.name for sink in self._sinks)

    def start(self) -> Future[None]:
        """Open all sinks in the thread. The future raises the ConfigError or LaunchError of a sink that refuses."""
        if self._thread is None:
            # Marked as running, neither future can be cancelled by an awaiting task that gives up.
            self._opening.set_running_or_notify_cancel()
            self._ending.set_running_or_notify_cancel()
            self._thread = threading.Thread(target=self._run, name="myxa-sinks", daemon=True)
            self._thread.start()
        return self._opening

    def put(self, bundle: Telemetry) -> bool:
        """Queue a bundle; False (and counted) when the sinks are too far behind or have been stopped."""
        if self._queue.qsize() >= self._max_bundles or self._ending.done():
            self.num_dropped += 1
            return False
        self._queue.put(bundle)
        return True

    def flush(self) -> Future[None]:
        """The future ends when everything put so far has been written and flushed, or can never be."""
        flushed: Future[None] = Future()
        flushed.set_running_or_notify_cancel()
        if self._thread is None or self._ending.done():
            flushed.set_result(None)
        else:
            self._queue.put(flushed)
            if self._ending.done():  # it ended in between
                self._release()
        return flushed

    def stop(self) -> Future[None]:
        """Write what waits, close every sink. The future ends when all of it is done; calling again is harmless."""
        if self._thread is None:
            if not self._ending.done():
                self._ending.set_result(None)
        else:
            self._queue.put(None)
        return self._ending

    def join(self, timeout_s: float = 1.0) -> None:
        """After the future of `stop` has ended: see the thread itself off."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._open_all()
        except (ConfigError, LaunchError) as error:
            self._close_all()
            self._end()
            self._opening.set_exception(error)
            return
        self._opening.set_result(None)
        try:
            self._pump()
        finally:
            self._close_all()
            self._end()

    def _end(self) -> None:
        self._ending.set_result(None)
        self._release()

    def _release(self) -> None:
        while not self._queue.empty():
            with contextlib.suppress(queue.Empty):  # the other side may have been faster
                if isinstance(item := self._queue.get_nowait(), Future):
                    item.set_result(None)

    def _open_all(self) -> None:
        for sink in list(self._sinks):
            try:
                sink.open(self._context)
            except (ConfigError, LaunchError):
                raise
            except Exception as error:  # noqa: BLE001 - foreign code; the run is worth more than this sink
                self._disable(sink, "cannot be opened", error)
            else:
                self._opened.append(sink)

    def _pump(self) -> None:
        """Until the end mark: wait for bundles, write them, flush when something is unflushed for `flush_s` of real
        time (the thread really waits, so an injected clock would not do)."""
        deadline: float | None = time.monotonic() + self._flush_s if self._write_own_events() else None
        while True:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                item = self._queue.get(timeout=timeout) if timeout != 0.0 else self._queue.get_nowait()
            except queue.Empty:
                self._each("flush", lambda sink: sink.flush())
                must_return = self._write_own_events() or bool(self._refused)
                deadline = time.monotonic() + self._flush_s if must_return else None
                continue
            if item is None:
                return
            if isinstance(item, Future):
                self._each("flush", lambda sink: sink.flush())
                item.set_result(None)
                continue
            self._write(item)
            now = time.monotonic()
            if deadline is None:
                deadline = now + self._flush_s
            elif now >= deadline:  # a steady stream must not postpone the flush
                self._each("flush", lambda sink: sink.flush())
                deadline = now + self._flush_s

    def _write(self, bundle: Telemetry) -> None:
        self._each("write", lambda sink: sink.write(bundle))
        self._write_own_events()

    def _write_own_events(self) -> bool:
        """Pass on what sinks emitted; True if there was anything."""
        has_events = bool(self._events)
        while self._events and self._sinks:
            bundle = Telemetry(events=(self._events.popleft(),))
            self._each("write", lambda sink, bundle=bundle: sink.write(bundle))
        return has_events

    def _each(self, what: str, action: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # noqa: BLE001 - foreign code; it must not stop the other sinks
                if refusal(error) is None:
                    self._disable(sink, f"failed to {what}", error)
                else:
                    if sink.name not in self._refused:
                        self._emit(REFUSED_EVENT, f"sink {sink.name}: {refused(self._context.run_dir, error)}")
                    self._refused[sink.name] = self._refused.get(sink.name, 0) + (what == "write")
            else:
                if what == "flush" and sink.name in self._refused:
                    lost = self._refused.pop(sink.name)
                    self._emit(
                        WRITTEN_EVENT, f"sink {sink.name} writes again" + (f"; {lost} bundles are lost" if lost else "")
                    )

    def _disable(self, sink: Sink, what: str, error: Exception) -> None:
        self._sinks.remove(sink)
        _log.warning("sink %s %s and is off from now on: %r", sink.name, what, error)
        self._emit("sink-disabled", f"sink {sink.name} {what} and is off from now on: {type(error).__name__}: {error}")

    def _tell(self, kind: str, text: str) -> None:
        self._events.append(Event(source=self._source, wall_s=self._clock.wall(), kind=kind, text=text))

    def _close_all(self) -> None:
        for sink in self._opened:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - the others must be closed too
                _log.warning("sink %s failed to close: %r", sink.name, error)
        self._opened.clear()


OPEN_S = 10.0
"""How long the start of the run waits for the sink to open or to refuse."""
CLOSE_S = 6.0
"""How long the end of the run waits for its last writes; below what the monitor gives all sinks."""


class BesideSink:
    """A sink that feeds `inner` in its own thread: a network or a large library must not hold the files up. `open`
    waits a moment for a refusal, so that a wrong option is reported at the start; a slower opening continues beside the
    run. Bundles that the inner sink is too slow for are dropped and counted."""

    def __init__(
        self, inner: Sink, *, max_bundles: int = 2048, open_s: float = OPEN_S, close_s: float = CLOSE_S
    ) -> None:
        self._inner = inner
        self._max_bundles = max_bundles
        self._open_s = open_s
        self._close_s = close_s
        self._thread: SinkThread | None = None
        self._context: SinkContext | None = None
        self._num_reported = 0

    @property
    def name(self) -> str:
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
            context.emit(
                "sink-slow", f"sink {self.name} needs more than {self._open_s:g} s to open; the run goes ahead"
            )

    def write(self, bundle: Telemetry) -> None:
        if self._thread is not None and self._thread.active:
            self._thread.put(bundle)

    def flush(self) -> None:
        """The thread flushes by itself; this reports what it could not take."""
        if self._thread is None or self._context is None:
            return
        lost = self._thread.num_dropped - self._num_reported
        if lost:
            self._num_reported = self._thread.num_dropped
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
