"""A thread for each sink, so that no disk, socket or library can hold the monitor's loop up, or another sink.

    put(bundle) -> bounded queue of each sink -> its thread: write, flush at least every `flush_s`

A sink that raises is switched off with one event. One whose disk refuses (`core/files.py`) stays: what it could not
take is counted. The threads are daemons: a sink that hangs in the kernel costs its data, never the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from msgspec.structs import replace

from ...core.clock import Clock
from ...core.errors import ConfigError, LaunchError
from ...core.files import REFUSED_EVENT, WRITTEN_EVENT, refusal, refused
from ...core.messages import Event, Telemetry
from ...core.sink import Sink, SinkContext
from ...core.timeouts import TIMEOUTS

_log = logging.getLogger(__name__)


class SinkThread:
    """One sink from `start` to `stop`."""

    def __init__(self, sink: Sink, context: SinkContext, *, flush_s: float, max_bundles: int) -> None:
        self.name = sink.name
        self.is_active = True
        """Not switched off."""
        self.dropped = Counter[str]()
        """What it was too slow for, see `Telemetry.counts`."""
        self._sink = sink
        self._context = context
        self._flush_s = flush_s
        self._max_bundles = max_bundles
        self._num_refused = -1
        """Bundles that it could not take since its disk refuses; -1: it does not."""
        self._queue: queue.SimpleQueue[Telemetry | None] = queue.SimpleQueue()
        """None is the last thing in it."""
        self._opening, self._ended = _running(), _running()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="myxa-sinks", daemon=True)

    def start(self) -> Future[None]:
        """Open it in the thread. The future raises the ConfigError or LaunchError of a sink that refuses."""
        self._thread.start()
        return self._opening

    def put(self, bundle: Telemetry) -> None:
        """Queue a bundle. Of a sink that is far behind only its events, and none of one that is twice as far behind, or
        is to stop; what is left out is counted."""
        if not self.is_active:
            return
        lag = self._queue.qsize() / self._max_bundles
        if lag < 1 and not self._is_stopped:
            self._queue.put(bundle)
            return
        if bundle.events and lag < 2 and not self._is_stopped:
            self._queue.put(Telemetry(events=bundle.events))
            bundle = replace(bundle, events=())
        self.dropped.update(bundle.counts())

    def stop(self) -> Future[None]:
        """Write what waits, close the sink. The future ends when that is done; calling again is harmless."""
        if not self._is_stopped:
            self._is_stopped = True
            self._queue.put(None)
            if self._thread.ident is None:
                self._ended.set_result(None)
        return self._ended

    def join(self) -> None:
        """After the future of `stop` has ended: see the thread itself off."""
        if self._thread.ident is not None and self._ended.done():
            self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._sink.open(self._context)
        except Exception as error:  # noqa: BLE001 - foreign code; the run is worth more than this sink
            self._disable("cannot be opened", error)
            if isinstance(error, ConfigError | LaunchError):
                self._opening.set_exception(error)
            else:
                self._opening.set_result(None)
            self._ended.set_result(None)
            return
        self._opening.set_result(None)
        self._pump()
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001 - foreign code
            _log.warning("sink %s failed to close: %r", self.name, error)
        self._ended.set_result(None)

    def _pump(self) -> None:
        """Write bundles until the end; flush what is unflushed for `flush_s` of real time."""
        due_s: float | None = None
        while True:
            item: Telemetry | bool | None = True
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=None if due_s is None else max(0.0, due_s - time.monotonic()))
            if item is None:
                return
            if isinstance(item, Telemetry) and self.is_active:
                self._try("write", item)
                due_s = time.monotonic() + self._flush_s if due_s is None else due_s
            if due_s is not None and time.monotonic() >= due_s:
                self._flush()
                due_s = time.monotonic() + self._flush_s if self._num_refused >= 0 else None
            if not self.is_active:
                due_s = None

    def _flush(self) -> None:
        if self._try("flush") and self._num_refused >= 0:
            lost = f"; {self._num_refused} bundles are lost" if self._num_refused else ""
            self._num_refused = -1
            self._context.emit(WRITTEN_EVENT, f"sink {self.name} writes again{lost}")

    def _try(self, action: str, bundle: Telemetry | None = None) -> bool:
        try:
            if bundle is None:
                self._sink.flush()
            else:
                self._sink.write(bundle)
        except Exception as error:  # noqa: BLE001 - foreign code; it must not stop the run
            if refusal(error) is None:
                self._disable(f"failed to {action}", error)
                return False
            if self._num_refused < 0:
                self._num_refused = 0
                self._context.emit(REFUSED_EVENT, f"sink {self.name}: {refused(self._context.run_dir, error)}")
            self._num_refused += bundle is not None
            return False
        return True

    def _disable(self, problem: str, error: Exception) -> None:
        self.is_active = False
        _log.warning("sink %s %s and is off from now on: %r", self.name, problem, error)
        text = f"sink {self.name} {problem} and is off from now on: {type(error).__name__}: {error}"
        self._context.emit("sink-disabled", text)


class Sinks:
    """All sinks of a run. What one of them emits goes to all."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        run_dir: Path,
        run_name: str,
        clock: Clock,
        flush_s: float = 0.5,
        max_bundles: int = 4096,
        open_s: float = TIMEOUTS.monitor.open_s,
        settings: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        self._clock = clock
        self._open_s = open_s
        context = SinkContext(run_dir=run_dir, run_name=run_name, clock=clock, emit=self.emit, settings=settings or {})
        self._threads = [SinkThread(sink, context, flush_s=flush_s, max_bundles=max_bundles) for sink in sinks]

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(thread.name for thread in self._threads if thread.is_active)

    @property
    def dropped(self) -> Counter[str]:
        return sum((thread.dropped for thread in self._threads), Counter[str]())

    async def start(self) -> None:
        """Open all. Raises the ConfigError or LaunchError of one that refuses in time; the others are closed then."""
        opening = {asyncio.wrap_future(thread.start()): thread.name for thread in self._threads}
        late = await _late(opening, self._open_s)
        errors = [error for future in opening if future not in late and (error := future.exception()) is not None]
        if errors:
            await self.stop(self._open_s)
            raise errors[0]
        for future in late:
            future.add_done_callback(_seen)
            self.emit("sink-slow", f"sink {opening[future]} is not open after {self._open_s:g} s; the run continues")

    def put(self, bundle: Telemetry) -> None:
        for thread in self._threads:
            thread.put(bundle)

    async def stop(self, patience_s: float) -> None:
        """Write what waits and close all; calling again is harmless."""
        stopping = {asyncio.wrap_future(thread.stop()): thread.name for thread in self._threads}
        if late := await _late(stopping, patience_s):
            names = ", ".join(stopping[future] for future in late)
            _log.warning("sinks %s did not write within %g s; their last data may be lost", names, patience_s)
        for thread in self._threads:
            thread.join()

    def emit(self, kind: str, text: str, **data: float) -> None:
        event = Event(source="monitor", wall_s=self._clock.wall(), kind=kind, text=text, data=data)
        self.put(Telemetry(events=(event,)))


async def _late(futures: Collection[asyncio.Future[None]], patience_s: float) -> set[asyncio.Future[None]]:
    """Those that have not ended by then."""
    return (await asyncio.wait(futures, timeout=patience_s))[1] if futures else set()


def _running() -> Future[None]:
    """One that an awaiting task that gives up cannot cancel."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def _seen(opened: asyncio.Future[None]) -> None:
    """Its sink is off, and an event says why."""
    if not opened.cancelled():
        opened.exception()
