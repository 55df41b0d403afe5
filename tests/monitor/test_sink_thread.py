"""Each sink has a thread of its own; none of them can hold the monitor or the others up."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waiting import until, wait_until

from myxa.actors.monitor.sink_thread import Sinks
from myxa.core.clock import SystemClock
from myxa.core.errors import ConfigError, LaunchError
from myxa.core.messages import Event, MetricPoint, Telemetry
from myxa.core.sink import Sink, SinkContext


class Recorder:
    """Remembers what it was given; raises in the methods it is told to."""

    def __init__(self, name: str = "recorder", fails: dict[str, Exception] | None = None) -> None:
        self.name = name
        self.fails = fails or {}
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.threads: set[int] = set()

    def _did(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.get_ident())
        if what in self.fails:
            raise self.fails[what]

    def open(self, context: SinkContext) -> None:
        self._did("open")
        context.emit("hello", self.name)

    def write(self, bundle: Telemetry) -> None:
        self._did("write")
        self.events += bundle.events

    def flush(self) -> None:
        self._did("flush")

    def close(self) -> None:
        self._did("close")


def make(tmp_path: Path, *sinks: Sink, **options: Any) -> Sinks:
    return Sinks(sinks, run_dir=tmp_path, run_name="x", clock=SystemClock(), flush_s=0.02, **options)


def note(text: str) -> Telemetry:
    return Telemetry(events=(Event(source="x", wall_s=0.0, kind="note", text=text),))


def notes(sink: Recorder) -> list[str]:
    return [event.text for event in sink.events if event.kind == "note"]


async def test_bundles_reach_every_sink_in_order_and_are_flushed_without_more_bundles(tmp_path: Path) -> None:
    recorders = Recorder("a"), Recorder("b")
    sinks = make(tmp_path, *recorders)
    await sinks.start()
    for index in range(20):
        sinks.put(note(str(index)))
    await until(lambda: all(sink.calls[-1] == "flush" and len(notes(sink)) == 20 for sink in recorders))
    await sinks.stop(10)
    for sink in recorders:
        assert notes(sink) == [str(index) for index in range(20)]
        assert {event.text for event in sink.events if event.kind == "hello"} == {"a", "b"}, "to all"
        assert (sink.calls[0], sink.calls[-1], sink.calls.count("close")) == ("open", "close", 1)
        assert len(sink.threads) == 1
    assert len({threading.get_ident(), *(ident for sink in recorders for ident in sink.threads)}) == 3
    sinks.put(note("too late"))
    assert sinks.dropped == {"events note": 2}


@pytest.mark.parametrize("where", ["open", "write", "flush"])
async def test_a_sink_that_raises_is_off_with_one_event_and_the_rest_go_on(tmp_path: Path, where: str) -> None:
    bad, good = Recorder("bad", {where: RuntimeError("no space")}), Recorder("good")
    sinks = make(tmp_path, bad, good)
    await sinks.start()
    for index in range(3):
        sinks.put(note(str(index)))
        await until(lambda index=index: str(index) in notes(good) and good.calls[-1] == "flush")
    assert sinks.active == ("good",)
    await sinks.stop(10)
    (disabled,) = [event for event in good.events if event.kind == "sink-disabled"]
    assert "bad" in disabled.text
    assert "RuntimeError: no space" in disabled.text
    assert bad.calls.count(where) == 1
    assert bad.calls.count("close") == (0 if where == "open" else 1)


async def test_e08_a_sink_whose_disk_refuses_stays(tmp_path: Path) -> None:
    """E8: it was off for the life of the monitor."""
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    bad, good = Recorder("bad", {"write": full, "flush": full}), Recorder("good")
    sinks = make(tmp_path, bad, good)
    await sinks.start()
    sinks.put(note("a"))
    await until(lambda: bad.calls.count("flush") >= 3)
    bad.fails.clear()
    await until(lambda: "disk-has-room" in [event.kind for event in good.events])
    sinks.put(note("b"))
    await sinks.stop(10)
    assert sinks.active == ("bad", "good")
    assert "b" in notes(bad)
    texts = {event.kind: event.text for event in good.events if event.kind not in ("note", "hello")}
    assert list(texts) == ["disk-full", "disk-has-room"]
    assert "sink bad: " in texts["disk-full"]
    assert "raise the quota" in texts["disk-full"]
    assert "bundles are lost" in texts["disk-has-room"]


@pytest.mark.parametrize("error", [LaunchError("port 1 is in use"), ConfigError("no such project")])
async def test_a_sink_that_refuses_the_start_stops_it_and_the_others_are_closed(
    tmp_path: Path, error: Exception
) -> None:
    first, refuses = Recorder("a"), Recorder("b", {"open": error})
    with pytest.raises(type(error), match=str(error)):
        await make(tmp_path, first, refuses).start()
    assert (first.calls[0], first.calls[-1], refuses.calls) == ("open", "close", ["open"])


class Stuck(Recorder):
    """Hangs where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__("stuck")
        self._where = where
        self.release = threading.Event()

    def _did(self, what: str) -> None:
        if what == self._where:
            self.release.wait(30)
        super()._did(what)


@pytest.mark.parametrize("where", ["open", "write", "close"])
async def test_a_sink_that_hangs_holds_nobody_up(where: str, tmp_path: Path) -> None:
    stuck, good = Stuck(where), Recorder("good")
    sinks = make(tmp_path, stuck, good, max_bundles=10, open_s=1.0)
    began_s = time.monotonic()
    await sinks.start()
    for index in range(50):
        sinks.put(note(str(index)))
        await until(lambda index=index: str(index) in notes(good))
    assert (sinks.dropped["events note"] >= 28) is (where != "close")
    assert ("sink-slow" in [event.kind for event in good.events]) is (where == "open")
    await sinks.stop(0.3)
    assert good.calls[-1] == "close"
    assert time.monotonic() - began_s < 20, "it hangs for 30"
    stuck.release.set()
    await sinks.stop(10)
    wait_until(lambda: "myxa-sinks" not in [thread.name for thread in threading.enumerate()])


async def test_a_sink_that_is_behind_gets_events_where_it_gets_nothing_else_and_the_rest_is_counted(
    tmp_path: Path,
) -> None:
    slow = Stuck("write")
    sinks = make(tmp_path, slow, max_bundles=10)
    await sinks.start()
    point = MetricPoint(source="trainer/0", step=1, wall_s=0.0, values={"train/loss": 1.0})
    for index in range(100):
        sinks.put(Telemetry(metrics=(point, point)))
        if index % 20 == 19:
            sinks.put(Telemetry(metrics=(point,), events=note(f"after {index}").events))
    slow.release.set()
    await sinks.stop(10)
    assert notes(slow) == [f"after {index}" for index in range(19, 100, 20)]
    assert set(sinks.dropped) == {"metrics"} and 170 < sinks.dropped["metrics"] < 205


async def test_a_failing_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    bad, good = Recorder("bad", {"close": OSError("gone")}), Recorder("good")
    sinks = make(tmp_path, bad, good)
    await sinks.start()
    await sinks.stop(10)
    assert good.calls[-1] == "close"


async def test_what_was_put_is_written_by_the_stop_which_may_come_early_and_twice(tmp_path: Path) -> None:
    sink = Recorder()
    await make(tmp_path, Recorder()).stop(10)  # before its start
    await make(tmp_path).stop(10)
    sinks = make(tmp_path, sink)
    await sinks.start()
    for index in range(50):
        sinks.put(note(str(index)))
    await sinks.stop(10)
    await sinks.stop(10)
    assert len(notes(sink)) == 50
    assert sink.calls[-1] == "close"
