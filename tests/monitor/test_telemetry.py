"""Reporting never raises and never blocks, whatever happens to the monitor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest

from myxa.actors.monitor.monitor import Monitor
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.actors.telemetry import report_forever, report_once
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.clock import SystemClock
from myxa.core.errors import MessageTooLarge, NoSuchActor
from myxa.core.messages import Telemetry

ERRORS = {
    "dead": NoSuchActor("nobody is called monitor"), "broken": TypeError("this is a bug in the way to the monitor"),
    "refuses": MessageTooLarge("2 MiB are more than the lane takes"),
}  # fmt: skip


class Receiver:
    """A monitor that can be dead, hang, or answer."""

    def __init__(self) -> None:
        self.mode = "up"
        self.bundles: list[Telemetry] = []
        self.num_calls = 0

    async def __call__(self, bundle: Telemetry) -> None:
        self.num_calls += 1
        if self.mode == "hangs":
            await asyncio.Event().wait()
        if self.mode in ERRORS:
            raise ERRORS[self.mode]
        self.bundles.append(bundle)


@pytest.mark.parametrize("mode", ["dead", "hangs"])
async def test_what_does_not_get_through_waits_for_the_next_time(mode: str) -> None:
    buffer, receiver = TelemetryBuffer("trainer/0", SystemClock()), Receiver()
    receiver.mode = mode
    buffer.metric(1, {"train/loss": 1.0})
    buffer.event("note", "something")
    assert not await report_once(buffer, receiver, timeout_s=0.05)
    receiver.mode = "up"
    buffer.metric(2, {"train/loss": 2.0})
    assert await report_once(buffer, receiver)
    assert [(len(b.metrics), len(b.events), b.dropped) for b in receiver.bundles] == [(1, 1, {}), (1, 0, {})]
    assert await report_once(buffer, receiver)
    assert len(receiver.bundles) == 2  # nothing to say, nothing sent


async def test_what_waits_is_bounded_and_what_goes_is_counted() -> None:
    buffer, receiver = TelemetryBuffer("trainer/0", SystemClock(), max_records=10), Receiver()
    receiver.mode = "dead"
    for step in range(25):
        buffer.metric(step, {"train/loss": 1.0})
        assert not await report_once(buffer, receiver)
    receiver.mode = "up"
    assert await report_once(buffer, receiver)
    first, bundle = receiver.bundles
    assert [point.step for point in first.metrics] == [0], "it may have arrived, so it stays as it is"
    assert [point.step for point in bundle.metrics] == list(range(15, 25))
    assert bundle.dropped == {"metrics": 14}


async def test_a_flood_of_one_event_does_not_push_out_what_happened_once_and_its_loss_is_told_by_kind() -> None:
    buffer, receiver = TelemetryBuffer("buffer", SystemClock(), max_records=100), Receiver()
    receiver.mode = "dead"
    once = ["checkpoint", "knob", "engine-gone", "evaluation"]
    for number in range(1000):
        if number % 250 == 100:
            buffer.event(once[number // 250], "it happened")
        buffer.event("group-dropped", f"group {number}")
        if number % 90 == 0:
            assert not await report_once(buffer, receiver)
    receiver.mode = "up"
    assert await report_once(buffer, receiver)
    told = [event for bundle in receiver.bundles for event in bundle.events]
    assert [event.kind for event in told if event.kind != "group-dropped"] == once
    assert told[-1].text == "group 999" and len(told) <= 100
    assert [bundle.dropped for bundle in receiver.bundles] == [{}, {"events group-dropped": 1004 - len(told)}]


@pytest.mark.parametrize("mode", ["broken", "refuses"])
async def test_a_bundle_that_nobody_could_ever_take_is_counted_and_does_not_stand_in_the_way(mode: str) -> None:
    buffer, receiver = TelemetryBuffer("trainer/0", SystemClock()), Receiver()
    receiver.mode = mode
    buffer.metric(1, {"train/loss": 1.0})
    buffer.event("note", "something")
    assert not await report_once(buffer, receiver)
    receiver.mode = "up"
    assert await report_once(buffer, receiver)
    assert [bundle.dropped for bundle in receiver.bundles] == [{"metrics": 1, "events note": 1}]


async def test_an_event_is_not_lost_for_the_sake_of_what_travels_with_it() -> None:
    buffer, bundles = TelemetryBuffer("trainer/0", SystemClock()), list[Telemetry]()

    async def picky(bundle: Telemetry) -> None:
        if bundle.spans:
            raise MessageTooLarge("2 MiB are more than the lane takes")
        bundles.append(bundle)

    buffer.span("x", "compute", 0.0, 1.0, track="rollout")
    buffer.event("checkpoint", "step 7 is durable")
    for _ in range(2):
        assert await report_once(buffer, picky)
    assert [event.kind for bundle in bundles for event in bundle.events] == ["checkpoint"]
    assert [bundle.dropped for bundle in bundles if bundle.dropped] == [{"spans": 1}]


async def test_the_last_words_are_sent_when_the_actor_stops() -> None:
    clock, receiver = SystemClock(), Receiver()
    buffer = TelemetryBuffer("coordinator", clock, meter=ActivityMeter("coordinator", clock))
    task = asyncio.create_task(report_forever(buffer, receiver, 60.0))
    await asyncio.sleep(0)
    buffer.event("phase", "draining -> finished")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (bundle,) = receiver.bundles
    assert [event.text for event in bundle.events] == ["draining -> finished"]
    assert bundle.spans  # the state it was in, cut at the end


async def test_a_hanging_monitor_does_not_hold_a_stopping_actor_up() -> None:
    buffer, receiver = TelemetryBuffer("coordinator", SystemClock()), Receiver()
    receiver.mode = "hangs"
    task = asyncio.create_task(report_forever(buffer, receiver, 60.0))
    await asyncio.sleep(0)
    buffer.event("phase", "draining -> finished")
    task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert buffer.unconfirmed is not None and len(buffer.unconfirmed.events) == 1


async def test_a_cancelled_report_keeps_what_it_held_for_the_last_words() -> None:
    buffer, receiver = TelemetryBuffer("trainer/0", SystemClock()), Receiver()
    receiver.mode = "hangs"
    buffer.metric(1, {"train/loss": 1.0})
    task = asyncio.create_task(report_once(buffer, receiver, timeout_s=30.0))
    while not receiver.num_calls:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    receiver.mode = "up"
    buffer.metric(2, {"train/loss": 2.0})
    assert await report_once(buffer, receiver)
    assert [point.step for bundle in receiver.bundles for point in bundle.metrics] == [1, 2]
    assert not any(bundle.dropped for bundle in receiver.bundles)


async def test_a_monitor_that_answers_too_late_takes_each_record_once(tmp_path: Path) -> None:
    """The actor's time is over, or it stops, when the bundle has arrived and the answer has not."""
    buffer, monitor, num_sent = TelemetryBuffer("trainer/0", SystemClock()), Monitor(tmp_path, [JsonlSink()]), 0
    monitor.ctx = cast("Any", None)
    await monitor.on_start()

    async def slow(bundle: Telemetry) -> None:
        nonlocal num_sent
        num_sent += 1
        await monitor.telemetry(bundle)
        if num_sent in (1, 4):
            await asyncio.Event().wait()

    buffer.metric(1, {"train/loss": 1.0})
    assert not await report_once(buffer, slow, timeout_s=0.05)
    buffer.metric(2, {"train/loss": 0.5})
    assert await report_once(buffer, slow)
    buffer.metric(3, {"train/loss": 0.2})
    task = asyncio.create_task(report_forever(buffer, slow, 0.0))
    while num_sent < 4:
        await asyncio.sleep(0.001)
    buffer.metric(4, {"train/loss": 0.1})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = TelemetryBuffer("trainer/0", SystemClock())  # the actor's next incarnation counts from the beginning
    again.metric(5, {"train/loss": 0.1})
    assert await report_once(again, slow)
    await monitor.on_stop("end of the run")
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "train/loss" in line["values"]] == [1, 2, 3, 4, 5]
    assert num_sent == 7, "one sending more than bundles for each answer that did not come"
