"""One thread feeds all sinks; none of them can hold the monitor or the others up."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
from tests.harness.waiting import wait_until

from myxa.actors.monitor.sink_thread import SinkThread
from myxa.core.clock import SystemClock
from myxa.core.errors import LaunchError
from myxa.core.messages import Event, Telemetry
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


def make(tmp_path: Path, *sinks: Sink, max_bundles: int = 100) -> SinkThread:
    return SinkThread(sinks, run_dir=tmp_path, run_name="x", clock=SystemClock(), flush_s=0.02, max_bundles=max_bundles)


def note(text: str) -> Telemetry:
    return Telemetry(events=(Event(source="x", wall_s=0.0, kind="note", text=text),))


def test_bundles_reach_every_sink_in_order_and_are_flushed_without_more_bundles(tmp_path: Path) -> None:
    sinks = Recorder("a"), Recorder("b")
    thread = make(tmp_path, *sinks)
    thread.start().result(10)
    for index in range(20):
        assert thread.put(note(str(index)))
    wait_until(lambda: all("flush" in sink.calls for sink in sinks))
    thread.stop().result(10)
    for sink in sinks:
        texts = [event.text for event in sink.events]
        assert texts == ["a", "b", *[str(index) for index in range(20)]]
        assert sink.calls[0] == "open"
        assert sink.calls[-1] == "close"
        assert sink.calls.count("close") == 1
        assert len(sink.threads) == 1
        assert threading.get_ident() not in sink.threads
    assert not thread.put(note("too late"))
    assert thread.num_dropped == 1


@pytest.mark.parametrize("where", ["open", "write", "flush"])
def test_a_sink_that_raises_is_off_with_one_event_and_the_rest_go_on(tmp_path: Path, where: str) -> None:
    bad, good = Recorder("bad", {where: RuntimeError("no space")}), Recorder("good")
    thread = make(tmp_path, bad, good)
    thread.start().result(10)
    for index in range(3):
        thread.put(note(str(index)))
        wait_until(lambda index=index: str(index) in [event.text for event in good.events])
        wait_until(lambda: good.calls[-1] == "flush")
    assert thread.active == ("good",)
    thread.stop().result(10)
    disabled = [event for event in good.events if event.kind == "sink-disabled"]
    assert len(disabled) == 1
    assert "bad" in disabled[0].text
    assert "RuntimeError: no space" in disabled[0].text
    assert bad.calls.count(where) == 1
    assert bad.calls.count("close") == (0 if where == "open" else 1)


def test_e08_a_sink_whose_disk_refuses_stays(tmp_path: Path) -> None:
    """E8: it was off for the life of the monitor."""
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    bad, good = Recorder("bad", {"write": full, "flush": full}), Recorder("good")
    thread = make(tmp_path, bad, good)
    thread.start().result(10)
    thread.put(note("a"))
    wait_until(lambda: bad.calls.count("flush") >= 3)
    bad.fails.clear()
    wait_until(lambda: "disk-has-room" in [event.kind for event in good.events])
    thread.put(note("b"))
    thread.stop().result(10)
    assert thread.active == ("bad", "good")
    assert "b" in [event.text for event in bad.events]
    texts = {event.kind: event.text for event in good.events if event.kind not in ("note", "hello")}
    assert list(texts) == ["disk-full", "disk-has-room"]
    assert "sink bad: " in texts["disk-full"]
    assert "raise the quota" in texts["disk-full"]
    assert "bundles are lost" in texts["disk-has-room"]


def test_a_sink_that_refuses_the_start_stops_it_and_the_others_are_closed(tmp_path: Path) -> None:
    first, refuses, third = Recorder("a"), Recorder("b", {"open": LaunchError("port 1 is in use")}), Recorder("c")
    thread = make(tmp_path, first, refuses, third)
    with pytest.raises(LaunchError, match="port 1 is in use"):
        thread.start().result(10)
    thread.stop().result(10)
    assert first.calls == ["open", "close"]
    assert third.calls == []


def test_a_hanging_sink_costs_bundles_not_time(tmp_path: Path) -> None:
    release = threading.Event()

    class Hangs(Recorder):
        def write(self, bundle: Telemetry) -> None:
            release.wait(30)

    thread = make(tmp_path, Hangs(), max_bundles=10)
    thread.start().result(10)
    results = [thread.put(note(str(index))) for index in range(50)]
    assert results[0]
    assert not results[-1]
    assert thread.num_dropped >= 38
    ending = thread.stop()
    assert not ending.cancel()  # one who stops waiting must not break the thread
    assert not ending.done()
    release.set()
    ending.result(10)


def test_a_failing_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    bad, good = Recorder("bad", {"close": OSError("gone")}), Recorder("good")
    thread = make(tmp_path, bad, good)
    thread.start().result(10)
    thread.stop().result(10)
    assert good.calls[-1] == "close"


def test_a_flush_is_a_barrier_and_never_left_waiting(tmp_path: Path) -> None:
    sink = Recorder()
    thread = make(tmp_path, sink)
    thread.flush().result(10)  # before the start
    thread.start().result(10)
    for index in range(50):
        thread.put(note(str(index)))
    thread.flush().result(10)
    assert len(sink.events) == 51
    assert sink.calls[-1] == "flush"
    thread.stop()
    thread.flush().result(10)  # while or after it stops
    thread.stop().result(10)
    thread.flush().result(10)


def test_stopping_before_starting_and_twice_is_harmless(tmp_path: Path) -> None:
    thread = make(tmp_path, Recorder())
    thread.stop().result(10)
    thread.stop().result(10)
