"""Sinks that talk to large libraries and to networks: W&B, MLflow, OpenTelemetry."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.harness.manual_clock import ManualClock
from tests.monitor.otlp_receiver import receiver
from tests.monitor.sink_world import Told, context, hop, point, span

from myxa.actors.sinks.otlp import OtlpSink
from myxa.actors.sinks.registry import make_sink
from myxa.actors.sinks.wandb_sink import WandbSink
from myxa.core.errors import ConfigError
from myxa.core.messages import Event, Telemetry

# -- W&B and MLflow: stand-ins for the libraries here, the libraries themselves in tests/monitor/test_finished_run.py


@dataclass
class Library:
    """What the stand-in of a library was asked for: names of calls and their arguments."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    refuses: str = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            if name == self.refuses:
                raise ValueError(f"http://me:s3cret@127.0.0.1:1 refused {name}")
            if name == "get_experiment_by_name":
                return SimpleNamespace(experiment_id="1")
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


SETTINGS: dict[str, str | int | float | bool] = {"algo.kind": "grpo", "optimizer.lr": 0.5, "data.shuffle": True}


def write_twice(folder: Path, name: str, options: dict[str, Any]) -> Told:
    """By two incarnations of the monitor."""
    told = Told()
    for _ in range(2):
        sink = make_sink(name, options)
        sink.open(replace(context(folder, told), settings=SETTINGS))
        for step in range(3):
            load = point(-1, "rollout/1", rollout__running=7.0)
            sink.write(Telemetry(metrics=(point(step, train__loss=1 / (step + 1), time__compute=3.0), load)))
        sink.flush()
        sink.close()
    return told


def test_wandb_gets_every_actors_metrics_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[dict[str, float]] = []
    begun: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    run = SimpleNamespace(
        id="w1", dir="here", url="", define_metric=lambda *_, **__: None, log=rows.append, finish=lambda: None,
        config=SimpleNamespace(update=lambda more, **_: config.update(more)),
    )  # fmt: skip
    module: Any = ModuleType("wandb")
    module.Settings = lambda **options: options
    module.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode="online", model_fields_set=set()))
    module.init = lambda **options: begun.append(options) or run
    module.teardown = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = write_twice(tmp_path, "wandb", {"project": "sorting"})
    assert [(one["project"], one["id"], one["mode"]) for one in begun] == [
        ("sorting", None, "offline"), ("sorting", "w1", "offline"),
    ], "offline unless it is asked for"  # fmt: skip
    assert config == SETTINGS
    assert len(rows) == 12 and rows[2].items() >= {"train/loss": 0.5, "step": 1}.items()
    assert rows[3].items() >= {"rollout.1/running": 7.0, "step": 1}.items(), "at the newest step"
    assert not any("time/compute" in row for row in rows)
    assert told.kinds == ["wandb-opened"] * 2


def with_mlflow(monkeypatch: pytest.MonkeyPatch, client: Library) -> None:
    for name, parts in {
        "mlflow": {},
        "mlflow.tracking": {"MlflowClient": lambda tracking_uri: client},
        "mlflow.entities": {"Metric": lambda *metric: metric, "Param": lambda key, value: (key, value)},
        "mlflow.environment_variables": {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": Library()},
    }.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)


def test_mlflow_keeps_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_mlflow(monkeypatch, client := Library())
    told = write_twice(tmp_path, "mlflow", {"experiment": "sorting"})
    assert client.of("get_experiment_by_name") == [(("sorting",), {})]
    assert client.of("create_run") == [(("1",), {"run_name": tmp_path.name})]
    batches = [options for _, options in client.of("log_batch")]
    assert [b["params"] for b in batches if "params" in b] == [[(key, str(value)) for key, value in SETTINGS.items()]]
    metrics = [metric for batch in batches for metric in batch.get("metrics", ())]
    losses = [(step, value) for name, value, _, step in metrics if name == "train/loss"]
    assert losses == [(step, 1 / (step + 1)) for step in range(3)] * 2
    assert {name for name, *_ in metrics} == {"train/loss", "rollout.1/running"}
    assert len(client.of("set_terminated")) == len(told.kinds) == 2


@pytest.mark.parametrize("refused", ["", "get_experiment_by_name", "log_batch"])
def test_mlflow_tells_where_it_writes_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    with_mlflow(monkeypatch, Library(refuses=refused))
    told = Told()
    sink = make_sink("mlflow", {"tracking_uri": "http://me:s3cret@127.0.0.1:1"})
    said = list[str]()
    try:
        sink.open(context(tmp_path, told))
        sink.write(Telemetry(metrics=(point(1, train__loss=0.5),)))
        sink.close()
    except OSError as error:
        said.append(str(error))
    assert ("mlflow-opened" in told.kinds) is (refused != "get_experiment_by_name")
    said += [*(text for _, text in told.events), *caplog.messages]
    assert any(f"refused {refused}" in text for text in said) is bool(refused), said
    assert all("http://127.0.0.1:1" in text and "s3cret" not in text for text in said), said


@pytest.mark.parametrize(("name", "extra", "module"), [
    ("wandb", "wandb", "wandb"), ("mlflow", "mlflow", "mlflow.tracking"), ("otlp", "otel", "opentelemetry.sdk.trace"),
])  # fmt: skip
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    name: str, extra: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (module, name, f"{name}.entities"):
        monkeypatch.setitem(sys.modules, part, None)
    sink = OtlpSink("http://127.0.0.1:1") if name == "otlp" else make_sink(name)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'myxa[{extra}]'")):
        sink.open(context(tmp_path))


def test_wrong_options_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="projct"):
        make_sink("wandb", {"projct": "x"})
    with pytest.raises(ConfigError, match="mode"):
        make_sink("wandb", {"mode": "sometimes"})
    assert isinstance(make_sink("wandb", {"project": "x", "tags": ["a"]}), WandbSink)


# -- OpenTelemetry


def test_a_collector_gets_one_trace_for_a_group_and_one_for_a_version(tmp_path: Path) -> None:
    told = Told()
    with receiver() as got:
        sink = OtlpSink(got.url, every_s=0.0)
        sink.open(context(tmp_path, told))
        sink.write(Telemetry(spans=(hop("trainer/0", "train", [7, 8], 30.0),)))  # comes before what happened before it
        sink.flush()
        spans = (
            hop("buffer", "dispatch", [7, 8], 10.0), hop("rollout/0", "generate", [7], 11.0),
            span("trainer/0", "x", 20.0, makes_version=4), span("rollout/0", "x", 22.0, adopts_version=4),
            span("rollout/1", "x", 23.0, adopts_version=4), span("buffer", "draw", 1.0),
        )  # fmt: skip
        metrics = (point(3, train__loss=0.5), point(-1, "rollout/1", rollout__running=4))
        sink.write(Telemetry(spans=spans, metrics=metrics, events=(Event(source="x", wall_s=1, kind="k", text=""),)))
        sink.close()
    by_trace: dict[bytes, list[Any]] = {}
    for sent in got.spans:
        by_trace.setdefault(sent.trace_id, []).append(sent)
    names = sorted(sorted(sent.name for sent in spans) for spans in by_trace.values())
    assert names == [["dispatch", "generate", "train"], ["dispatch", "train"], ["x", "x", "x"]]
    for spans in by_trace.values():
        (root,) = [sent for sent in spans if not sent.parent_span_id]
        assert {sent.parent_span_id for sent in spans} == {b"", root.span_id}
        assert len({sent.span_id for sent in spans}) == len(spans)
        assert root.name in {"dispatch", "x"}
    train = next(sent for sent in got.spans if sent.name == "train")
    assert (train.start_time_unix_nano, train.end_time_unix_nano) == (30_000_000_000, 30_500_000_000)
    assert {a.key: a.value.string_value for a in train.attributes}["myxa.actor"] == "trainer/0"
    assert got.metrics["myxa.train.loss"] == {"trainer/0": [0.5]}
    assert got.metrics["myxa.rollout.running"] == {"rollout/1": [4.0]}
    assert {r["service.name"] for r in got.resources} == {"myxa"}
    assert {r["service.instance.id"] for r in got.resources} == {tmp_path.name}
    assert told.kinds == ["otlp-opened"]


def test_a_collector_that_refuses_is_told_once_without_secrets_and_given_up_after_a_while(tmp_path: Path) -> None:
    told = Told()

    def send(sink: OtlpSink, count: int) -> None:
        for step in range(count):
            sink.write(Telemetry(metrics=(point(step, train__loss=0.5),)))
            sink.flush()

    with receiver() as got:
        got.status = 400
        sink = OtlpSink(got.url.replace("http://", "http://me:s3cret@"), every_s=0.0)
        sink.open(context(tmp_path, told))
        send(sink, 11)
        got.status = 200
        send(sink, 1)
        assert got.metrics["myxa.train.loss"] == {"trainer/0": [0.5]}
        got.status = 400
        with pytest.raises(OSError, match="took nothing for 12 exports") as caught:
            send(sink, 40)
        sink.close()
    assert told.kinds == ["otlp-opened", "otlp-failed", "otlp-failed"]
    assert all(got.url in text for _, text in told.events)
    assert "s3cret" not in f"{told.events} {caught.value}"


def test_the_clock_of_exports_is_the_runs(tmp_path: Path) -> None:
    clock = ManualClock()
    with receiver() as got:
        sink = OtlpSink(got.url, every_s=5.0)
        sink.open(context(tmp_path, clock=clock))
        for _ in range(8):
            sink.write(Telemetry(metrics=(point(1, train__loss=0.5),)))
            sink.flush()
            clock.advance(1.0)
        assert got.num_requests == 1
        sink.close()
        assert got.num_requests == 2
