"""A Prometheus endpoint with the latest values: `http://127.0.0.1:<port>/metrics`.

Loopback only, on purpose: metrics show a stranger what is trained and how well. A scraper on another host goes through
a tunnel or an agent on this one. The port that was bound is an event and the content of `prometheus.port`.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ...core.errors import LaunchError
from ...core.messages import MetricPoint, Telemetry
from ...core.sink import SinkContext
from ..http_guard import Head, HttpAccess

PORT_FILE = "prometheus.port"
LOOPBACK = "127.0.0.1"

_MAX_SERIES = 20_000


class PrometheusSink(Collector):
    """Serves gauges `myxa_<metric>{source=...}` and counters of events, records and losses."""

    name = "prometheus"

    def __init__(self, port: int = 0, key: str = "") -> None:
        """`port` 0: any free one. `key`: scrapers must send it as bearer; empty: any program of this machine may."""
        self._port = port
        self._door = HttpAccess(key)
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}
        """Prometheus name -> source -> value; of names that differ in odd characters alone the newest value."""
        self._num_series = 0
        self._events: dict[tuple[str, str], int] = {}
        self._num_dropped = 0
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._context: SinkContext | None = None

    def open(self, context: SinkContext) -> None:
        """Bind and serve. Raises LaunchError when the port is taken or may not be bound."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._port, addr=LOOPBACK, registry=registry)
        except (OSError, OverflowError) as error:  # a number that is no port overflows
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "is in use" if is_taken else f"cannot be bound ({error})"
            remedy = "set [monitor] prometheus_port to another one, to 0 (any free port) or to -1 (off)"
            raise LaunchError(f"monitor: port {self._port} on {LOOPBACK} {why}", remedy=remedy) from error
        self._server.set_app(_guarded(self._server.get_app(), self._door))
        self._context = context
        port = self._server.server_port
        (context.run_dir / PORT_FILE).write_text(f"{port}\n")
        context.emit("prometheus-bound", f"metrics are served at http://{LOOPBACK}:{port}/metrics")

    def write(self, bundle: Telemetry) -> None:
        with self._lock:
            self._num_dropped += bundle.dropped
            for point in bundle.metrics:
                self._remember(point)
            for event in bundle.events:
                key = (event.source, event.kind)
                if key in self._events or len(self._events) < _MAX_SERIES:
                    self._events[key] = self._events.get(key, 0) + 1

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Stop serving and free the port; the port file goes with it."""
        server, thread, context = self._server, self._thread, self._context
        self._server = self._thread = None
        if server is None or thread is None:
            return
        server.shutdown()
        server.server_close()
        thread.join(timeout=5.0)
        if context is not None:
            (context.run_dir / PORT_FILE).unlink(missing_ok=True)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Called by prometheus-client for each scrape, in the server's thread."""
        with self._lock:
            families = [_gauge(name, dict(sources)) for name, sources in self._values.items()]
            events, dropped = dict(self._events), self._num_dropped
        yield from families
        counter = CounterMetricFamily("myxa_events", "Events by source and kind.", labels=("source", "kind"))
        for (source, kind), count in sorted(events.items()):
            counter.add_metric((source, kind), count)
        yield counter
        yield CounterMetricFamily("myxa_telemetry_dropped", "Telemetry records lost on the way.", value=dropped)

    def _remember(self, point: MetricPoint) -> None:
        for name, value in {**point.values, "step": point.step}.items():
            sources = self._values.setdefault(prometheus_name(name), {})
            if point.source in sources or self._num_series < _MAX_SERIES:
                self._num_series += point.source not in sources
                sources[point.source] = float(value)


def _guarded(app: Any, door: HttpAccess) -> Any:
    """The WSGI application behind the guard of all doors."""

    def served(environ: dict[str, Any], start_response: Any) -> Any:
        head = Head(
            environ.get("REQUEST_METHOD", ""),
            environ.get("HTTP_HOST", ""),
            environ.get("HTTP_ORIGIN", ""),
            environ.get("HTTP_SEC_FETCH_SITE", ""),
            environ.get("HTTP_SEC_FETCH_MODE", ""),
            authorization=environ.get("HTTP_AUTHORIZATION", ""),
        )
        refusal = door.refusal(head)
        if refusal is None:
            return app(environ, start_response)
        start_response(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", [("Content-Type", "text/plain")])
        return [f"{refusal.text}\n".encode()]

    return served


def _gauge(name: str, sources: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, "Latest value.", labels=("source",))
    for source, value in sorted(sources.items()):
        family.add_metric((source,), value)
    return family


def prometheus_name(name: str) -> str:
    """`train/loss` -> `myxa_train_loss`; whatever Prometheus does not allow becomes "_"."""
    return "myxa_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
