"""The monitor as other actors meet it: over real sockets, with a death in between."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from myxa.actors.contracts import MonitorContract
from myxa.actors.monitor.monitor import Monitor
from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.actors.telemetry import report_forever
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.actor import Actor
from myxa.core.clock import SystemClock
from myxa.transport.node import Node


class Worker(Actor):
    """Tells the monitor something, like every role does."""

    async def on_start(self) -> None:
        clock = SystemClock()
        meter = ActivityMeter(self.ctx.name, clock)
        meter.switch("compute", "train")
        self.telemetry = TelemetryBuffer(self.ctx.name, clock, meter=meter)
        send = self.ctx.ref(MonitorContract, "monitor").telemetry
        self.ctx.spawn(report_forever(self.telemetry, send, 0.02), name="telemetry")


async def until_seen(run_dir: Path, text: str) -> None:
    async with asyncio.timeout(20):
        while text not in (run_dir / "events.jsonl").read_text():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.timeout(60)
async def test_actors_report_over_sockets_and_outlive_the_monitor(tmp_path: Path) -> None:
    monitor_node = await Node.attach(name="monitor-node")
    worker_node = await Node.attach(name="worker-node", rdzv=monitor_node.rendezvous)
    try:
        await monitor_node.start(Monitor(tmp_path, [JsonlSink(), ChromeTraceSink()]), name="monitor")
        worker = Worker()
        await worker_node.start(worker, name="trainer/0")
        worker.telemetry.metric(3, {"train/loss": 0.25, "train/grad_norm": float("nan")})
        worker.telemetry.event("note", "before")
        await until_seen(tmp_path, "before")
        view = await worker_node.ref(MonitorContract, "monitor").snapshot()
        assert view["trainer/0"] == {"train/loss": 0.25}
        assert sum(view["time/trainer/0"][kind] for kind in ("compute", "other")) == pytest.approx(1.0)

        await monitor_node.stop("monitor", "killed by the test")
        for index in range(20):
            worker.telemetry.event("note", f"nobody hears {index}")
            await asyncio.sleep(0.01)
        await monitor_node.start(Monitor(tmp_path, [JsonlSink(), ChromeTraceSink()]), name="monitor")
        worker.telemetry.event("note", "after")
        await until_seen(tmp_path, "after")
        assert not worker_node.failed.done()
        worker.telemetry.event("note", "last words")
    finally:
        await worker_node.close(grace_s=1)
        await monitor_node.close(grace_s=1)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    texts = [event["text"] for event in events]
    assert texts[:2] == ["train/grad_norm is nan at step 3", "before"]
    assert "last words" in texts
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "X"]
    assert {span["name"] for span in spans} >= {"train"}
