"""MLflow: one MLflow run for all actors of this run, by the client of `mlflow-skinny`.

    [monitor]
    sinks = ["mlflow"]
    [monitor.options.mlflow]
    experiment = "sorting"
    tracking_uri = ""        # empty: a file store in the run directory, `mlflow ui --backend-store-uri <run>/mlruns`

User and password of a server are in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, as MLflow itself reads them:
an address that holds them would be quoted by its errors. mlflow is imported in `open` only: it is optional and slow to
import. After a restart the same MLflow run continues.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from ...core.errors import ConfigError
from ...core.messages import Telemetry
from ...core.sink import SinkContext
from .registry import curves_of

FOLDER = "mlruns"
RUN_ID_FILE = "mlflow.run_id"

_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_SECRET = re.compile(r"://.*@")
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
        if _SECRET.search(tracking_uri):
            text = "monitor.options.mlflow: tracking_uri holds a user or a password"
            raise ConfigError(text, remedy="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""
        self._pending: list[Any] = []
        self._step = 0
        self._sent_s = 0.0

    def open(self, context: SinkContext) -> None:
        """In the MLflow run of an earlier monitor of this run, or in a new one. Raises ImportError saying what to
        install when mlflow is missing (the run continues without this sink)."""
        self._context = context
        place = self._tracking_uri or (context.run_dir / FOLDER).resolve().as_uri()
        try:
            client = import_module("mlflow.tracking").MlflowClient(tracking_uri=place)
            self._entities = import_module("mlflow.entities")
        except ImportError as error:
            raise ImportError(f"mlflow is not installed ({error}) -- pip install 'myxa[mlflow]'") from error
        note = context.run_dir / RUN_ID_FILE
        if note.exists():
            self._run_id = note.read_text(encoding="utf-8").strip()
        else:
            known = client.get_experiment_by_name(self._experiment)
            where = known.experiment_id if known else client.create_experiment(self._experiment)
            self._run_id = client.create_run(where, run_name=context.run_dir.name).info.run_id
            note.write_text(self._run_id + "\n", encoding="utf-8")
            params = [
                self._entities.Param(_FORBIDDEN.sub("_", key), str(value)[:_MAX_VALUE])
                for key, value in context.settings.items()
                if value != ""
            ]
            for start in range(0, len(params), _MAX_PARAMS):  # of a new run: parameters of an MLflow run never change
                client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])
        self._client = client
        context.emit("mlflow-opened", f"MLflow run {self._run_id} in {place}")

    def write(self, bundle: Telemetry) -> None:
        """Collect the metrics; gauges of a moment are put at the newest step."""
        for point in bundle.metrics:
            self._step = max(self._step, point.step)
            step, at_ms = point.step if point.step >= 0 else self._step, round(point.wall_s * 1000)
            self._pending += [
                self._entities.Metric(_FORBIDDEN.sub("_", name), value, at_ms, step)
                for name, value in curves_of(point).items()
            ]

    def flush(self) -> None:
        """At most every two seconds: each batch is a request."""
        if self._context.clock.monotonic() >= self._sent_s + _SEND_S:
            self._sent_s = self._context.clock.monotonic()
            self._send()

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=pending[start : start + _MAX_BATCH])

    def close(self) -> None:
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._run_id)
            self._client = None
