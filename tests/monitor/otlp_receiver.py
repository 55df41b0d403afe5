"""An OpenTelemetry collector for tests: a real HTTP server that decodes what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Received:
    """Everything that came, decoded."""

    url: str = ""
    status: int = 200
    """What is answered from now on."""
    num_requests: int = 0
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """metric -> actor -> values in order."""

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_text(resource.resource.attributes))
                self.spans += [span for scope in resource.scope_spans for span in scope.spans]
            return
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                for point in metric.gauge.data_points:
                    by_actor = self.metrics.setdefault(metric.name, {})
                    by_actor.setdefault(_text(point.attributes)["myxa.actor"], []).append(point.as_double)


def _text(attributes: Any) -> dict[str, str]:
    return {a.key: a.value.string_value for a in attributes}


@contextmanager
def receiver() -> Generator[Received]:
    """A collector on a free port, in a thread of its own."""
    got = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.num_requests += 1
            if got.status == 200:
                got.take(self.path, body)
            self.send_response(got.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        got.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join(20)
