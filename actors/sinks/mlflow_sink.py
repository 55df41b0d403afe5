"""MLflow: one MLflow run for all actors of this run, by the client of `mlflow-skinny`.

    [monitor]
    sinks = ["mlflow"]
    [monitor.options.mlflow]
    experiment = "sorting"
    tracking_uri = ""        # empty: a file store in the run directory, `mlflow ui --backend-store-uri <run>/mlruns`

mlflow is imported in `open` only: it is optional and slow to import. After a restart the same MLflow run continues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.messages import MetricPoint, Telemetry
from ...core.sink import SinkContext
from .public_address import public_address, public_errors
from .registry import curves_of

FOLDER = "mlruns"
RUN_ID_FILE = "mlflow.run_id"

_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_MAX_BATCH = 1000
_SEND_S = 2.0
_MAX_PARAMS = 100
"""What the server takes in one call."""
_MAX_VALUE = 500
"""Characters of a parameter that every version of the server takes."""


class MlflowSink:
    """Metrics by step."""

    name = "mlflow"
    _context: SinkContext

    def __init__(self, experiment: str = "myxa", tracking_uri: str = "") -> None:
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._make_metric: Any = None
        self._run_id = ""
        self._pending: list[Any] = []
        self._step = 0
        self._sent_s = 0.0

    def open(self, context: SinkContext) -> None:
        """Raises ImportError saying what to install when mlflow is missing (the run continues without this sink)."""
        self._context = context
        try:
            with public_errors(self._tracking_uri):
                self._client = self._make_client(context.run_dir)
            self._make_metric = import_module("mlflow.entities").Metric
        except ImportError as error:
            raise ImportError(f"mlflow is not installed ({error}) -- pip install 'myxa[mlflow]'") from error
        with public_errors(self._tracking_uri):
            self._continue_run(context)
        where = public_address(self._tracking_uri) or context.run_dir / FOLDER
        context.emit("mlflow-opened", f"MLflow run {self._run_id} in {where}")

    def _continue_run(self, context: SinkContext) -> None:
        """In the MLflow run of an earlier monitor of this run, or in a new one."""
        note = context.run_dir / RUN_ID_FILE
        if note.exists():
            self._run_id = note.read_text(encoding="utf-8").strip()
        else:
            known = self._client.get_experiment_by_name(self._experiment)
            where = known.experiment_id if known else self._client.create_experiment(self._experiment)
            run = self._client.create_run(where, run_name=context.run_dir.name)
            self._run_id = run.info.run_id
            note.write_text(self._run_id + "\n", encoding="utf-8")
            self._tell_settings(context.settings)

    def _tell_settings(self, settings: Mapping[str, str | int | float | bool]) -> None:
        """As parameters of a new run: those of an MLflow run never change."""
        make = import_module("mlflow.entities").Param
        params = [
            make(_FORBIDDEN.sub("_", key), str(value)[:_MAX_VALUE]) for key, value in settings.items() if value != ""
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def _make_client(self, run_dir: Path) -> Any:
        client = import_module("mlflow.tracking").MlflowClient
        # At the end of a run it prints a link, with the address as it was given.
        import_module("mlflow.environment_variables").MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.set(True)
        if self._tracking_uri:
            return client(tracking_uri=self._tracking_uri)
        return client(tracking_uri=(run_dir / FOLDER).resolve().as_uri())

    def write(self, bundle: Telemetry) -> None:
        """Collect the metrics; gauges of a moment are put at the newest step."""
        for point in bundle.metrics:
            self._step = max(self._step, point.step)
            self._pending += self._metrics(point)
        if len(self._pending) >= _MAX_BATCH:
            self.flush()

    def _metrics(self, point: MetricPoint) -> list[Any]:
        step = point.step if point.step >= 0 else self._step
        at_ms = round(point.wall_s * 1000)
        return [
            self._make_metric(_FORBIDDEN.sub("_", name), value, at_ms, step) for name, value in curves_of(point).items()
        ]

    def flush(self) -> None:
        """At most every two seconds: each batch is a request."""
        if self._context.clock.monotonic() < self._sent_s + _SEND_S:
            return
        self._sent_s = self._context.clock.monotonic()
        with public_errors(self._tracking_uri):
            self._send(self._client)

    def _send(self, client: Any) -> None:
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), _MAX_BATCH):
            client.log_batch(self._run_id, metrics=pending[start : start + _MAX_BATCH])

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        with public_errors(self._tracking_uri):
            self._send(client)
            client.set_terminated(self._run_id)
