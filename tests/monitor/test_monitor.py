"""The role itself, with real sinks and a real thread; its handlers are called as the node calls them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tests.harness.manual_clock import ManualClock

from myxa.actors.monitor.monitor import Monitor
from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.core.messages import Event, MetricPoint, Span, Telemetry
from myxa.core.sink import Sink


class Nobody:
    """An actor's surroundings with no other actor in them."""

    def peers(self, prefix: str) -> tuple[str, ...]:
        return ()


def alone(run_dir: Path, sinks: Sequence[Sink], **options: Any) -> Monitor:
    monitor = Monitor(run_dir, sinks, **options)
    monitor.ctx = cast("Any", Nobody())
    return monitor


def times(source: str, second: float) -> MetricPoint:
    values = {"time/compute": second * 0.7, "time/wait-data": second * 0.3}
    return MetricPoint(source=source, step=1, wall_s=second, values=values)


async def test_a_run_ends_up_in_the_files(tmp_path: Path) -> None:
    monitor = alone(tmp_path, [JsonlSink(), ChromeTraceSink()], run_name="sort")
    await monitor.on_start()
    for step in range(5):
        point = MetricPoint(source="trainer/0", step=step, wall_s=float(step), values={"train/loss": 1.0 - step / 10})
        span = Span(source="trainer/0", name="train", activity="compute", start_wall_s=float(step), duration_s=1.0)
        event = Event(source="buffer", wall_s=0.0, kind="note", text=f"step {step}")
        await monitor.telemetry(
            Telemetry(metrics=(point, times("trainer/0", float(step))), spans=(span,), events=(event,))
        )
    view = await monitor.snapshot()
    assert view["trainer/0"]["train/loss"] == pytest.approx(0.6)
    assert view["time/trainer/0"]["compute"] == pytest.approx(0.7)
    assert view["events/buffer"] == {"note": 5.0}
    assert view["monitor"]["sinks"] == 2.0
    late = Event(source="coordinator", wall_s=0.0, kind="phase", text="draining -> finished")
    await monitor.telemetry(Telemetry(events=(late,)))
    await monitor.on_stop("end of the run")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line["values"]] == list(range(5))
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds == [*["note"] * 5, "phase"]
    assert sum(event["ph"] == "X" for event in json.loads((tmp_path / "trace.json").read_text())) == 5
    assert not any(thread.name == "myxa-sinks" for thread in threading.enumerate())


async def test_times_are_thinned_for_the_files_and_the_last_ones_are_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    monitor = alone(tmp_path, [JsonlSink()], clock=clock, time_every_s=10.0)
    await monitor.on_start()
    for second in range(36):
        await monitor.telemetry(
            Telemetry(metrics=(times("trainer/0", float(second)), times("rollout/0", float(second))))
        )
        clock.advance(1.0)
    await monitor.on_stop("end")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for source in ("trainer/0", "rollout/0"):
        assert [line["wall_s"] for line in lines if line["source"] == source] == [0.0, 10.0, 20.0, 30.0, 35.0]
    own = [line for line in lines if line["source"] == "monitor"]
    assert len(own) == len(lines) - 10 == 5
    assert sum(own[-1]["values"][f"time/{kind}"] for kind in ("wait-data", "compute")) == pytest.approx(36.0)


async def test_losses_are_told_once_in_a_while(tmp_path: Path) -> None:
    clock = ManualClock()
    monitor = alone(tmp_path, [JsonlSink()], clock=clock)
    await monitor.on_start()
    for _ in range(30):
        await monitor.telemetry(Telemetry(dropped={"spans": 2, "events group-dropped": 1}))
        clock.advance(1.0)
    await monitor.on_stop("end")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["telemetry-dropped"] * 3
    assert sum(sum(event["data"].values()) for event in events) == 90, "the last ones at the end"
    assert events[0]["text"].startswith("33 telemetry records")
    assert "22 spans" in events[0]["text"] and "11 events group-dropped" in events[0]["text"]
