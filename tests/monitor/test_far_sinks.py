"""Sinks that talk to large libraries and to networks: W&B, MLflow."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tests.harness.manual_clock import ManualClock
from tests.monitor.sink_world import Told, context, point

from myxa.actors.sinks.registry import make_sink
from myxa.actors.sinks.trackers import WandbSink
from myxa.core.errors import ConfigError
from myxa.core.messages import Telemetry

# -- W&B and MLflow: stand-ins for the libraries here, the libraries themselves in tests/monitor/test_finished_run.py


@dataclass
class Library:
    """What the stand-in of a library was asked for: names of calls and their arguments."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
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
    chosen = SimpleNamespace(mode="online", project="of-the-cluster", model_fields_set=set())
    module.setup = lambda: SimpleNamespace(settings=chosen)
    module.init = lambda **options: begun.append(options) or run
    module.teardown = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    told = write_twice(tmp_path, "wandb", {"project": "sorting"})
    assert [(one["project"], one["id"], one["mode"], one["group"]) for one in begun] == [
        ("sorting", None, "offline", tmp_path.name)
    ] * 2, "offline unless it is asked for; an upload of the same id would replace the first part"
    assert config == SETTINGS
    assert len(rows) == 12 and rows[2].items() >= {"train/loss": 0.5, "step": 1}.items()
    assert rows[3].items() >= {"rollout.1/running": 7.0, "step": 1}.items(), "at the newest step"
    assert not any("time/compute" in row for row in rows)
    assert told.kinds == ["wandb-opened"] * 2
    (tmp_path / "other").mkdir()
    write_twice(tmp_path / "other", "wandb", {})
    assert (begun[-1]["project"], begun[-1]["tags"]) == ("of-the-cluster", None), "as W&B's own variables say"
    (tmp_path / "online").mkdir()
    write_twice(tmp_path / "online", "wandb", {"mode": "online"})
    assert [(one["id"], one["resume"], one["group"]) for one in begun[-2:]] == [
        (None, None, None),
        ("w1", "allow", None),
    ]


class MlflowPoint(NamedTuple):
    name: str
    value: float
    at_ms: int
    step: int


def with_mlflow(monkeypatch: pytest.MonkeyPatch, client: Library) -> None:
    for name, parts in {
        "mlflow": {},
        "mlflow.tracking": {"MlflowClient": lambda tracking_uri: client},
        "mlflow.entities": {"Metric": MlflowPoint, "Param": lambda key, value: (key, value)},
    }.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)


def test_mlflow_has_one_run_until_steps_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_mlflow(monkeypatch, client := Library())
    told = write_twice(tmp_path, "mlflow", {"experiment": "sorting"})
    assert client.of("get_experiment_by_name") == [(("sorting",), {})] * 2
    assert client.of("create_run") == [(("1",), {"run_name": tmp_path.name})] * 2
    batches = [options for _, options in client.of("log_batch")]
    params = [(key, str(value)) for key, value in SETTINGS.items()]
    assert [b["params"] for b in batches if "params" in b] == [params] * 2
    metrics = [metric for batch in batches for metric in batch.get("metrics", ())]
    losses = [(step, value) for name, value, _, step in metrics if name == "train/loss"]
    assert losses == [(step, 1 / (step + 1)) for step in range(3)] * 2
    assert {name for name, *_ in metrics} == {"train/loss", "rollout.1/running"}
    assert len(told.kinds) == 2
    client.calls.clear()
    sink = make_sink("mlflow", {})
    sink.open(context(tmp_path, told))
    for step in (3, 4, 3):  # goes on, then back
        sink.write(Telemetry(metrics=(point(step, reward__source__a=1.0, reward__source__a__b=2.0),)))
    sink.close()
    order = [name for name, _, _ in client.calls]
    assert order == [
        "log_batch", "set_terminated", "get_experiment_by_name", "create_run", "log_batch", "set_terminated"
    ]  # fmt: skip
    sent = [[(m.name, m.step) for m in options["metrics"]] for _, options in client.of("log_batch")]
    both = ("reward/source.a", "reward/source.a.b"), "no name is a folder of another in a store of files"
    assert sent == [[(name, step) for step in steps for name in both[0]] for steps in ((3, 4), (3,))], both[1]


def test_mlflow_s_own_variables_count_where_options_are_left_out(tmp_path: Path, monkeypatch) -> None:
    places: list[str] = []
    with_mlflow(monkeypatch, client := Library())
    module: Any = sys.modules["mlflow.tracking"]
    module.MlflowClient = lambda tracking_uri: places.append(tracking_uri) or client
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    write_twice(tmp_path, "mlflow", {})
    assert (places[0], client.of("get_experiment_by_name")[0]) == ("http://tracker:5000", (("team",), {}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@tracker:5000")
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI holds") as caught:
        make_sink("mlflow", {})
    assert "s3cret" not in str(caught.value)


def test_mlflow_gets_what_happened_while_its_server_was_away(tmp_path: Path, monkeypatch) -> None:
    class Away(Exception):
        error_code = "INTERNAL_ERROR"

    with_mlflow(monkeypatch, client := Library())
    told, clock = Told(), ManualClock()
    sink: Any = make_sink("mlflow", {})
    sink.open(replace(context(tmp_path, told), clock=clock))
    log_batch, is_away = client.log_batch, True

    def send(run_id: str, metrics: list[Any]) -> None:
        if is_away:
            raise Away("Max retries exceeded")
        log_batch(run_id, metrics=metrics)

    client.log_batch = send  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(5):
        sink.write(Telemetry(metrics=(point(step, train__loss=float(step)),)))
        clock.advance(10.0)
        is_away = step < 3
        sink.flush()
    sent = [metric for _, options in client.of("log_batch") for metric in options["metrics"]]
    assert [step for _, _, _, step in sent] == [0, 1, 2, 3, 4]
    assert told.kinds == ["mlflow-opened", "mlflow-away", "mlflow-back"]
    Away.error_code = "UNAUTHENTICATED"
    is_away = True
    sink.write(Telemetry(metrics=(point(6, train__loss=0.0),)))
    clock.advance(10.0)
    with pytest.raises(Away):
        sink.flush()


def test_mlflow_refuses_an_address_that_holds_a_secret() -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        make_sink("mlflow", {"tracking_uri": "http://me:s3cret@127.0.0.1:1"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(("name", "extra", "module"), [
    ("wandb", "wandb", "wandb"), ("mlflow", "mlflow", "mlflow.tracking"),
])  # fmt: skip
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    name: str, extra: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in (module, name, f"{name}.entities"):
        monkeypatch.setitem(sys.modules, part, None)
    sink = make_sink(name)
    with pytest.raises(ImportError, match=re.escape(f"pip install 'myxa[{extra}]'")):
        sink.open(context(tmp_path))


def test_wrong_options_are_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="projct"):
        make_sink("wandb", {"projct": "x"})
    with pytest.raises(ConfigError, match="mode"):
        make_sink("wandb", {"mode": "sometimes"})
    assert isinstance(make_sink("wandb", {"project": "x", "tags": ["a"]}), WandbSink)
