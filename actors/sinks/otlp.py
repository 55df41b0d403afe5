"""OpenTelemetry: traces of groups and of weight versions, and all metrics, over OTLP/HTTP to a collector.

On when OTEL_EXPORTER_OTLP_ENDPOINT is set; headers, certificates and compression come from OpenTelemetry's own
variables. A trace follows one group (dispatch, generate, reward, claim, train) or one weight version (publish, each
adoption); its ids are made from the run's name and the number of the group, so that no context has to travel with the
messages and every actor's spans meet in the same trace. What else the actors did is in `time/*` of the metrics.

opentelemetry-sdk and its HTTP exporter are imported in `open` only: an optional extra. Spans are handed to the exporter
as they are, without the SDK's tracer: they have happened already, elsewhere.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib import import_module
from typing import Any, cast

from ...core.messages import Span, Telemetry
from ...core.sink import SinkContext
from .public_address import public_address

_MAX_SPANS = 4096
_MAX_SERIES = 20_000
_EXPORT_S = 5.0
_TIMEOUT_S = 5.0
_ROOTS = {"dispatch", "publish"}
_MAX_FAILURES = 12


class OtlpSink:
    """Exports every few seconds."""

    name = "opentelemetry"
    _context: SinkContext

    def __init__(self, endpoint: str, *, every_s: float = _EXPORT_S) -> None:
        """`endpoint`: base address of the collector, such as http://localhost:4318."""
        self._endpoint = endpoint.rstrip("/")
        self._shown = public_address(self._endpoint)
        self._every_s = every_s
        self._spans: list[Any] = []
        self._values: dict[tuple[str, str], tuple[float, float]] = {}
        """(metric, actor) -> (value, wall time) since the last export."""
        self._sdk: Any = None
        self._metrics_sdk: Any = None
        self._resource: Any = None
        self._scope: Any = None
        self._span_exporter: Any = None
        self._metric_exporter: Any = None
        self._exported_s = 0.0
        self._num_failures = 0
        self._num_lost = 0

    def open(self, context: SinkContext) -> None:
        """Raises ImportError saying what to install when the SDK is missing (the run continues without this sink)."""
        try:
            self._api = import_module("opentelemetry.trace")
            self._sdk = import_module("opentelemetry.sdk.trace")
            self._metrics_sdk = import_module("opentelemetry.sdk.metrics.export")
            spans = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            metrics = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
            resources = import_module("opentelemetry.sdk.resources")
            scopes = import_module("opentelemetry.sdk.util.instrumentation")
        except ImportError as error:
            raise ImportError(f"OpenTelemetry is not installed ({error}) -- pip install 'myxa[otel]'") from error
        facts = {"service.name": "myxa", "service.instance.id": context.run_dir.name, "myxa.run": context.run_name}
        self._resource = resources.Resource.create(facts)
        self._scope = scopes.InstrumentationScope("myxa")
        self._span_exporter = spans.OTLPSpanExporter(f"{self._endpoint}/v1/traces", timeout=_TIMEOUT_S)
        self._metric_exporter = metrics.OTLPMetricExporter(f"{self._endpoint}/v1/metrics", timeout=_TIMEOUT_S)
        self._context = context
        self._exported_s = context.clock.monotonic()
        context.emit("otlp-opened", f"OpenTelemetry goes to {self._shown}")

    def write(self, bundle: Telemetry) -> None:
        for span in bundle.spans:
            self._collect(span)
        for point in bundle.metrics:
            for name, value in {**point.values, "step": float(point.step)}.items():
                if (name, point.source) in self._values or len(self._values) < _MAX_SERIES:
                    self._values[name, point.source] = (value, point.wall_s)

    def flush(self) -> None:
        """Export when it is time. Raises OSError when the collector has not taken anything for long."""
        if self._context.clock.monotonic() < self._exported_s + self._every_s:
            return
        self._export()
        if self._num_failures >= _MAX_FAILURES:
            raise OSError(f"{self._shown} took nothing for {self._num_failures} exports; {self._num_lost} spans lost")

    def close(self) -> None:
        self._export()
        self._span_exporter.shutdown()
        self._metric_exporter.shutdown()

    def _collect(self, span: Span) -> None:
        """A span of a group or of a version, once in the trace of each group that it is about."""
        args = span.args
        flows = args.get("flows")
        keys = [f"group {group}" for group in cast("list[object]", flows)] if isinstance(flows, list | tuple) else []
        keys += [
            f"version {args[key]}" for key in ("makes_version", "adopts_version") if isinstance(args.get(key), int)
        ]
        station = "publish" if "makes_version" in args else span.name
        for key in keys:
            if len(self._spans) >= _MAX_SPANS:
                self._num_lost += 1
                return
            self._spans.append(self._readable(span, key, station))

    def _readable(self, span: Span, key: str, station: str) -> Any:
        trace_id = self._number(key, 16)
        is_root = station in _ROOTS
        own = "" if is_root else f"{station} {span.source} {span.start_wall_s!r}"
        root = self._context_of(trace_id, self._number(f"{key} root", 8))
        mine = root if is_root else self._context_of(trace_id, self._number(f"{key} {own}", 8))
        start_ns = round(span.start_wall_s * 1e9)
        attributes = {"myxa.actor": span.source, "myxa.about": key, "myxa.activity": span.activity}
        attributes |= {f"myxa.{name}": v for name, v in span.args.items() if isinstance(v, str | int | float)}
        return self._sdk.ReadableSpan(
            name=span.name,
            context=mine,
            parent=None if is_root else root,
            resource=self._resource,
            attributes=attributes,
            instrumentation_scope=self._scope,
            start_time=start_ns,
            end_time=start_ns + max(0, round(span.duration_s * 1e9)),
        )

    def _number(self, text: str, num_bytes: int) -> int:
        name = self._context.run_dir.name
        return int.from_bytes(blake2b(f"{name} {text}".encode(), digest_size=num_bytes).digest(), "big") or 1

    def _context_of(self, trace_id: int, span_id: int) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(trace_id=trace_id, span_id=span_id, is_remote=False, trace_flags=flags)

    def _export(self) -> None:
        self._exported_s = self._context.clock.monotonic()
        spans, self._spans = self._spans, []
        values, self._values = self._values, {}
        was_taken = True
        if spans:
            was_taken = self._span_exporter.export(spans).name == "SUCCESS"
            self._num_lost += 0 if was_taken else len(spans)
        if values:
            taken = self._metric_exporter.export(self._metrics(values), timeout_millis=_TIMEOUT_S * 1000)
            was_taken = was_taken and taken.name == "SUCCESS"
        self._num_failures = 0 if was_taken else self._num_failures + 1
        if self._num_failures == 1:
            self._context.emit("otlp-failed", f"{self._shown} does not take what is sent; tried again")

    def _metrics(self, values: dict[tuple[str, str], tuple[float, float]]) -> Any:
        """Gauges `myxa.<metric>` with the actor as attribute."""
        sdk = self._metrics_sdk
        by_name: dict[str, list[Any]] = {}
        for (name, source), (value, wall_s) in values.items():
            point = sdk.NumberDataPoint(
                attributes={"myxa.actor": source},
                start_time_unix_nano=None,
                time_unix_nano=round(wall_s * 1e9),
                value=float(value),
            )
            by_name.setdefault(name, []).append(point)
        metrics = [
            sdk.Metric(name=otlp_name(name), description="", unit="", data=sdk.Gauge(data_points=points))
            for name, points in by_name.items()
        ]
        scope = sdk.ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        resource = sdk.ResourceMetrics(resource=self._resource, scope_metrics=[scope], schema_url="")
        return sdk.MetricsData(resource_metrics=[resource])


def otlp_name(name: str) -> str:
    """`train/loss` -> `myxa.train.loss`."""
    return f"myxa.{name.replace('/', '.')}"
