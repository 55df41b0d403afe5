"""Sinks that talk to large libraries and to networks: W&B, MLflow, OpenTelemetry, and the thread each of them has."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waiting import wait_until
from tests.monitor.otlp_receiver import receiver
from tests.monitor.sink_world import Told, context, hop, point, span

from myxa.actors.monitor.sink_thread import BesideSink
from myxa.actors.sinks.otlp import OtlpSink
from myxa.actors.sinks.registry import choose_sinks, make_sink
from myxa.actors.sinks.wandb_sink import WandbSink
from myxa.core.clock import ManualClock
from myxa.core.errors import ConfigError
from myxa.core.messages import Event, Telemetry
from myxa.core.sink import SinkContext


def needs(module: str) -> None:
    """Without importing it: both libraries leave things behind in the process that does."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


# Both libraries touch the whole process (warnings, threads, signal handlers): a process of its own for each.
WRITES = """
import sys, time
from pathlib import Path
from myxa.actors.monitor.sink_thread import BesideSink
from myxa.actors.sinks.registry import make_sink
from myxa.core.clock import SystemClock
from myxa.core.messages import MetricPoint, Telemetry
from myxa.core.sink import SinkContext

told = []
run_dir = Path(sys.argv[1])
context = SinkContext(
    run_dir=run_dir, run_name="x", clock=SystemClock(), emit=lambda *event: told.append(event),
    settings={"algo.kind": "grpo", "optimizer.lr": 0.5, "data.shuffle": True},
)
for incarnation in range(2):
    sink = BesideSink(make_sink(sys.argv[2], {OPTIONS}), open_s=60, close_s=60)
    sink.open(context)
    for step in range(3):
        loss = MetricPoint(source="trainer/0", step=step, wall_s=time.time(), values={"train/loss": 1 / (step + 1), "time/compute": 3.0})
        load = MetricPoint(source="rollout/1", step=-1, wall_s=time.time(), values={"rollout/running": 7.0})
        sink.write(Telemetry(metrics=(loss, load)))
    sink.flush()
    sink.close()
print(told)
READ
"""


def run_process(folder: Path, name: str, options: str, read: str, **env: str) -> str:
    code = WRITES.replace("{OPTIONS}", options).replace("READ", textwrap.dedent(read))
    # Nothing of the machine's own settings: no key, no address.
    clean = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), **env}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), name],
        capture_output=True,
        text=True,
        timeout=240,
        env=clean,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wandb_offline_holds_every_actors_metrics_in_one_run(tmp_path: Path) -> None:
    needs("wandb")
    read = """
    import json
    from wandb.proto import wandb_internal_pb2

    def records(data):
        # LevelDB's log: blocks of 32 KiB, records of checksum, length, kind (1 whole; 2, 3, 4 first, middle, last)
        at, whole = 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole = data[at + 7 : at + 7 + length] if kind in (1, 2) else whole + data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(whole)

    ids = set()
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path.read_bytes()):
            if record.run.run_id:
                ids.add(record.run.run_id)
                print("RUN", record.run.project, record.run.display_name)
            for item in record.config.update:
                print("CONFIG", item.key or "/".join(item.nested_key), item.value_json)
            if record.history.item:
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                print("ROW", json.dumps({k: v for k, v in row.items() if not k.startswith("_")}))
    print("NUM", len(ids))
    """
    out = run_process(tmp_path, "wandb", "{'project': 'sorting'}", read)
    assert "NUM 1\n" in out, out
    assert out.count(f"RUN sorting {tmp_path.name}") == 2, out
    assert 'CONFIG algo.kind "grpo"' in out and "CONFIG optimizer.lr 0.5" in out, out
    assert '"train/loss": 0.5' in out
    assert '"rollout.1/running": 7,' in out
    assert "time/compute" not in out
    assert out.count("ROW") == 12
    assert "wandb-opened" in out


def test_mlflow_keeps_one_run_in_the_run_directory(tmp_path: Path) -> None:
    needs("mlflow")
    read = """
    from mlflow.tracking import MlflowClient
    client = MlflowClient(tracking_uri=(run_dir / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("sorting")
    runs = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    print("RUNS", len(runs), runs[0].info.status, runs[0].info.run_name)
    print("LOSS", sorted({(m.step, round(m.value, 3)) for m in history}))
    print("NAMES", sorted(runs[0].data.metrics))
    print("PARAMS", sorted(runs[0].data.params.items()))
    """
    out = run_process(tmp_path, "mlflow", "{'experiment': 'sorting'}", read, MLFLOW_ALLOW_FILE_STORE="true")
    assert f"RUNS 1 FINISHED {tmp_path.name}" in out
    assert "LOSS [(0, 1.0), (1, 0.5), (2, 0.333)]" in out
    assert "NAMES ['rollout.1/running', 'train/loss']" in out
    assert "PARAMS [('algo.kind', 'grpo'), ('data.shuffle', 'True'), ('optimizer.lr', '0.5')]" in out


@pytest.mark.parametrize(("name", "extra"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, f"{name}.tracking", f"{name}.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    told = Told()
    (sink,) = choose_sinks(extra=[name], tensorboard=False, prometheus_port=-1, trace=False)[1:]
    sink.open(context(tmp_path, told))
    sink.write(Telemetry(metrics=(point(1, train__loss=1.0),)))
    sink.close()
    assert told.kinds == ["sink-disabled"]
    assert f"pip install 'myxa[{extra}]'" in told.events[0][1]


def test_a_missing_sdk_of_opentelemetry_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ImportError, match=r"pip install 'myxa\[otel\]'"):
        OtlpSink("http://127.0.0.1:1").open(context(tmp_path))


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
            hop("buffer", "dispatch", [7, 8], 10.0),
            hop("rollout/0", "generate", [7], 11.0),
            span("trainer/0", "x", 20.0, makes_version=4),
            span("rollout/0", "x", 22.0, adopts_version=4),
            span("rollout/1", "x", 23.0, adopts_version=4),
            span("buffer", "draw", 1.0),
        )
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


# -- a thread of its own


class Stuck:
    """A sink that hangs where it is told to."""

    name = "stuck"

    def __init__(self, where: str) -> None:
        self._where = where
        self.go_on = threading.Event()
        self.num_written = 0

    def _at(self, where: str) -> None:
        if self._where == where:
            self.go_on.wait(30)

    def open(self, context: SinkContext) -> None:
        self._at("open")
        if self._where == "refuse":
            raise ConfigError("no such project")
        if self._where == "break":
            raise RuntimeError("no network")

    def write(self, bundle: Telemetry) -> None:
        self._at("write")
        self.num_written += 1

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._at("close")


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_sink_that_hangs_holds_nobody_up(where: str, tmp_path: Path) -> None:
    told = Told()
    inner = Stuck(where)
    sink = BesideSink(inner, max_bundles=10, open_s=0.3, close_s=0.3)
    started = time.monotonic()
    sink.open(context(tmp_path, told))
    for _ in range(50):
        sink.write(Telemetry())
        if where == "close":
            time.sleep(0.002)
    sink.flush()
    sink.close()
    assert time.monotonic() - started < 5
    inner.go_on.set()
    kinds = set(told.kinds)
    assert kinds == {"open": {"sink-slow", "telemetry-dropped"}, "write": {"telemetry-dropped"}, "close": set()}[where]
    wait_until(lambda: "myxa-sinks" not in [thread.name for thread in threading.enumerate()])


def test_a_refusal_ends_the_start_and_a_failure_does_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such project"):
        BesideSink(Stuck("refuse")).open(context(tmp_path))
    told = Told()
    sink = BesideSink(Stuck("break"))
    sink.open(context(tmp_path, told))
    sink.write(Telemetry())
    sink.close()
    assert told.kinds == ["sink-disabled"]
    assert "no network" in told.events[0][1]


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
