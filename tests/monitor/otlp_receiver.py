"""An OpenTelemetry collector for tests: a real HTTP server that decodes what it is sent."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
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
    headers: list[dict[str, str]] = field(default_factory=list)


def _text(attributes: Any) -> dict[str, str]:
    return {a.key: a.value.string_value for a in attributes}


def _body(request: web.Request, data: bytes) -> bytes:
    # aiohttp undoes gzip by itself when the header says so; this is for servers that leave it
    is_packed = data[:2] == b"\x1f\x8b"
    return gzip.decompress(data) if is_packed else data


@contextmanager
def receiver() -> Generator[Received]:
    """A collector on a free port, in a thread of its own."""
    got = Received()

    async def traces(request: web.Request) -> web.Response:
        got.num_requests += 1
        got.headers.append(dict(request.headers))
        if got.status == 200:
            message = ExportTraceServiceRequest()
            message.ParseFromString(_body(request, await request.read()))
            for resource in message.resource_spans:
                got.resources.append(_text(resource.resource.attributes))
                got.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(status=got.status)

    async def metrics(request: web.Request) -> web.Response:
        got.num_requests += 1
        if got.status == 200:
            message = ExportMetricsServiceRequest()
            message.ParseFromString(_body(request, await request.read()))
            for resource in message.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.gauge.data_points:
                            actor = _text(point.attributes)["myxa.actor"]
                            got.metrics.setdefault(metric.name, {}).setdefault(actor, []).append(point.as_double)
        return web.Response(status=got.status)

    loop = asyncio.new_event_loop()
    is_up, ends = threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", traces)
        app.router.add_post("/v1/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        got.url = f"http://{host}:{port}"
        is_up.set()
        await ends.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(20)
    try:
        yield got
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(20)
        loop.close()
