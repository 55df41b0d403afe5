"""TensorBoard, Weights & Biases, MLflow: one list of metrics by step for all actors of a run.

    [monitor]
    tensorboard = true       # files under tb/, by tensorboard's own event writer; no torch, no TensorFlow
    sinks = ["wandb", "mlflow"]
    [monitor.options.wandb]
    project = "sorting"      # without it what WANDB_PROJECT says, else "myxa"; likewise the others
    mode = "offline"         # `wandb sync <run>/wandb/offline-run-*` uploads it later
    [monitor.options.mlflow]
    experiment = "sorting"   # without it what MLFLOW_EXPERIMENT_NAME says, else "myxa"
    tracking_uri = ""        # empty: what MLFLOW_TRACKING_URI says, else a file store in the run directory:
                             # `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri <run>/mlruns`

The libraries are imported in `open` only: they are optional and slow to import. They get metrics, and the run file
without what looks like a secret; trace and events stay in the run directory. After a restart of the monitor the same
run of W&B or MLflow continues: its id is in the run directory. Offline W&B begins another one of the same group: an
upload replaces what a run of that id had. Steps that come again, after a checkpoint, replace those of TensorBoard; for
MLflow, which deletes no point, they are another run; W&B has both.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.ids import LEADER
from ...core.messages import MetricPoint, Telemetry
from ...core.sink import SinkContext

_ALONE = frozenset({LEADER, "coordinator", "buffer", "monitor"})
"""Actors whose metrics keep their names: there is one of each, or it speaks for the others."""


def curves_of(point: MetricPoint) -> dict[str, float]:
    """By their names in the one list: `train/loss` of trainer/0 stays, rollout/1's are `rollout.1/running`."""
    role_prefix = f"{point.source.partition('/')[0]}/"
    head = "" if point.source in _ALONE else f"{point.source.replace('/', '.')}/"
    return {
        head + (name.removeprefix(role_prefix) if head else name): value
        for name, value in point.values.items()
        if not name.startswith("time/")
    }


class Tracker:
    """A sink of metrics by step. Gauges of a moment are put at the newest step."""

    name = ""

    def __init__(self) -> None:
        self._step = -1

    def open(self, context: SinkContext) -> None:
        """Raises ImportError saying what to install when the library is missing (the run continues without it)."""
        try:
            self.begin(context)
        except ImportError as error:
            raise ImportError(f"{self.name} is not installed ({error}) -- pip install 'myxa[{self.name}]'") from error

    def write(self, bundle: Telemetry) -> None:
        for point in bundle.metrics:
            if point.source == LEADER and point.step >= 0:
                if not 0 <= self._step <= point.step:
                    self.rewind(point.step, point.wall_s)
                self._step = point.step
            if values := curves_of(point):
                self.log(values, point.step if point.step >= 0 else max(self._step, 0), point.wall_s)

    def begin(self, context: SinkContext) -> None:
        raise NotImplementedError

    def rewind(self, step: int, wall_s: float) -> None:
        """The run begins here, or has gone back: there may be later steps. Nothing to do where both may stay."""

    def log(self, values: dict[str, float], step: int, wall_s: float) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Nothing to do where the library sends by itself."""

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardSink(Tracker):
    """Event files under `tb/`."""

    name = "tensorboard"
    _writer: Any = None

    def begin(self, context: SinkContext) -> None:
        self._protos = import_module("tensorboard.compat.proto.event_pb2")
        self._make_summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._writer = writer(str(context.run_dir / "tb"), flush_secs=3600)

    def rewind(self, step: int, wall_s: float) -> None:
        """TensorBoard forgets what it has from that step on."""
        start = self._protos.SessionLog(status=self._protos.SessionLog.START)
        self._writer.add_event(self._protos.Event(wall_time=wall_s, step=step, session_log=start))

    def log(self, values: dict[str, float], step: int, wall_s: float) -> None:
        scalars = [self._make_summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._make_summary(value=scalars)
        self._writer.add_event(self._protos.Event(wall_time=wall_s, step=step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbSink(Tracker):
    """A W&B run, offline unless said otherwise."""

    name = "wandb"

    def __init__(
        self, project: str = "", entity: str = "", group: str = "", tags: tuple[str, ...] | list[str] = (),
        mode: str = "",
    ) -> None:  # fmt: skip
        """`mode`: online, offline or disabled; empty: what WANDB_MODE says, offline without it."""
        super().__init__()
        if mode not in ("", "online", "offline", "disabled"):
            raise ConfigError(f"monitor.options.wandb: mode = {mode!r}", remedy="take online, offline or disabled")
        self._project, self._group = project, group
        self._settings = {"entity": entity or None, "tags": list(tags) or None}
        self._mode = mode
        self._run: Any = None

    def begin(self, context: SinkContext) -> None:
        wandb = import_module("wandb")
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False)
        defaults = wandb.setup().settings  # by environment or settings file
        mode = self._mode or (str(defaults.mode) if "mode" in defaults.model_fields_set else "offline")
        note = context.run_dir / "wandb.run_id"
        run_id = None if mode == "offline" else _noted(note)
        self._run = wandb.init(
            id=run_id, resume="allow" if run_id else None, name=context.run_dir.name, dir=str(context.run_dir),
            group=self._group or (context.run_dir.name if mode == "offline" else None), mode=mode,
            project=self._project or defaults.project or "myxa", settings=settings, reinit="create_new",
            **self._settings,
        )  # fmt: skip
        note.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.config.update(dict(context.settings), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        place = self._run.url if mode == "online" else self._run.dir
        context.emit("wandb-opened", f"W&B run {self._run.id} ({mode}): {place}")

    def log(self, values: dict[str, float], step: int, wall_s: float) -> None:
        self._run.log({**values, "step": step, "wall_s": wall_s})

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
            import_module("wandb").teardown()


def _noted(note: Path) -> str | None:
    return note.read_text(encoding="utf-8").strip() if note.exists() else None


_MLFLOW_NOTE = "mlflow.run_id"
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_\-. :/]")
_MAX_BATCH, _MAX_PARAMS = 1000, 100
"""What MLflow's server takes in one call."""
_MAX_VALUE = 500
"""Characters of a parameter that every version of the server takes."""
_SEND_S = 2.0
_MAX_WAITING = 100_000
"""Values that wait for a server that is away."""
_NO_SERVER = frozenset({"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"})
"""Codes of MLflow's errors for a server that does not answer, or fails."""


class MlflowSink(Tracker):
    """An MLflow run, by the client of `mlflow-skinny`. User and password of a server are in MLFLOW_TRACKING_USERNAME
    and MLFLOW_TRACKING_PASSWORD: errors would quote an address that holds them."""

    name = "mlflow"
    _context: SinkContext

    def __init__(self, experiment: str = "", tracking_uri: str = "") -> None:
        super().__init__()
        env = os.environ  # noqa: TID251 -- as every client of MLflow does
        self._experiment = experiment or env.get("MLFLOW_EXPERIMENT_NAME") or "myxa"
        self._tracking_uri = tracking_uri or env.get("MLFLOW_TRACKING_URI", "")
        if re.search(r"://.*@", self._tracking_uri):
            source = "monitor.options.mlflow: tracking_uri" if tracking_uri else "MLFLOW_TRACKING_URI"
            raise ConfigError(
                f"{source} holds a user or a password",
                remedy="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead",
            )
        self._client: Any = None
        self._entities: Any = None
        self._run_id, self._newest = "", -1
        self._pending: list[Any] = []
        """Values; None: from here on they are another run's."""
        self._sent_s, self._is_away = 0.0, False

    def begin(self, context: SinkContext) -> None:
        self._context = context
        place = self._tracking_uri or (context.run_dir / "mlruns").resolve().as_uri()
        if not self._tracking_uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # noqa: TID251 -- newer versions ask for it
        self._client = import_module("mlflow.tracking").MlflowClient(tracking_uri=place)
        self._entities = import_module("mlflow.entities")
        if noted := _noted(context.run_dir / _MLFLOW_NOTE):
            self._run_id, _, newest = noted.partition(" ")
            self._newest = int(newest or -1)
        else:
            self._begin_run()
        context.emit("mlflow-opened", f"MLflow run {self._run_id} in {place}")

    def _begin_run(self) -> None:
        client, settings = self._client, self._context.settings
        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = experiment.experiment_id if experiment else client.create_experiment(self._experiment)
        self._run_id = client.create_run(experiment_id, run_name=self._context.run_dir.name).info.run_id
        self._note(-1)
        said = ((_FORBIDDEN.sub("_", key), str(value)[:_MAX_VALUE]) for key, value in settings.items() if value != "")
        params = [self._entities.Param(*each) for each in said]
        for start in range(0, len(params), _MAX_PARAMS):  # of a new run: parameters of an MLflow run never change
            client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def _note(self, newest: int) -> None:
        self._newest = newest
        (self._context.run_dir / _MLFLOW_NOTE).write_text(f"{self._run_id} {newest}\n", encoding="utf-8")

    def rewind(self, step: int, wall_s: float) -> None:
        """What follows is another run's, where this one has that step."""
        if step <= max([self._newest, *(metric.step for metric in self._pending if metric is not None)]):
            self._pending.append(None)

    def log(self, values: dict[str, float], step: int, wall_s: float) -> None:
        """In a store of files, names are paths: one may be no folder of another, so one slash is kept."""
        for name, value in values.items():
            group, slash, rest = _FORBIDDEN.sub("_", name).partition("/")
            name_there = f"{group}{slash}{rest.replace('/', '.')}"
            self._pending.append(self._entities.Metric(name_there, value, round(wall_s * 1000), step))

    def flush(self) -> None:
        """At most every two seconds: each batch is a request. A server that is away gets them when it is back."""
        if self._context.clock.monotonic() < self._sent_s + _SEND_S:
            return
        self._sent_s = self._context.clock.monotonic()
        try:
            self._send()
        except Exception as error:
            if getattr(error, "error_code", "") not in _NO_SERVER:
                raise
            if not self._is_away:
                self._context.emit("mlflow-away", f"MLflow takes no metrics, they wait: {error}")
            self._is_away = True
            del self._pending[:-_MAX_WAITING]
        else:
            if self._is_away:
                self._context.emit("mlflow-back", "MLflow takes metrics again")
            self._is_away = False

    def _send(self) -> None:
        while self._pending:
            batch = [*takewhile(lambda metric: metric is not None, self._pending[:_MAX_BATCH])]
            if batch:
                self._client.log_batch(self._run_id, metrics=batch)
                self._note(max(self._newest, *(metric.step for metric in batch)))
            else:
                self._client.set_terminated(self._run_id)
                self._begin_run()
            del self._pending[: max(len(batch), 1)]

    def close(self) -> None:
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._run_id)
            self._client = None
