"""Every sink against real files, sockets and processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.monitor.sink_world import WALL_S, bundle, context, point, span, trace_of, weights
from tests.monitor.test_line_file import room_for
from tests.monitor.trace_rules import check_events, follow

from myxa.actors.sinks.chrome_trace import ChromeTraceSink
from myxa.actors.sinks.jsonl import JsonlSink
from myxa.actors.sinks.trackers import TensorBoardSink
from myxa.core.messages import Event, Telemetry
from myxa.core.sink import Sink

SEED = 20


@pytest.mark.parametrize("make", [JsonlSink, ChromeTraceSink, TensorBoardSink])
def test_every_sink_keeps_the_contract(make: type[Sink], tmp_path: Path) -> None:
    sink = make()
    assert isinstance(sink, Sink)
    sink.open(context(tmp_path))
    sink.write(Telemetry())
    sink.write(bundle(0))
    sink.flush()
    sink.write(bundle(1))
    sink.close()
    sink.close()  # the second one is harmless
    again = make()  # a restarted monitor finds the files of the first
    again.open(context(tmp_path))
    again.write(bundle(2))
    again.close()


def test_jsonl_appends_and_repairs_a_torn_line(tmp_path: Path) -> None:
    for step in range(2):
        sink = JsonlSink()
        sink.open(context(tmp_path))
        sink.write(bundle(step))
        sink.close()
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(b'{"source":"trainer/0","st')  # killed in mid-line
    lines = (tmp_path / "metrics.jsonl").read_text().split("\n")
    assert json.loads(lines[0])["values"] == {"train/loss": 1.0}
    assert json.loads(lines[2])["step"] == 1
    event = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert event["text"] == 'a "quoted" \n text'
    assert event["data"] == {"id": 0}


def test_jsonl_is_readable_after_a_flush_and_takes_odd_data(tmp_path: Path) -> None:
    sink = JsonlSink()
    sink.open(context(tmp_path))
    odd = Event(source="x", wall_s=0.0, kind="k", text="t", data={"path": Path("/a"), "set": {1}})
    sink.write(Telemetry(events=(odd,)))
    sink.flush()
    assert json.loads((tmp_path / "events.jsonl").read_text())["data"] == {"path": "/a", "set": "{1}"}
    sink.close()


def test_the_trace_can_be_read_after_every_flush_and_is_json_at_its_end(tmp_path: Path) -> None:
    sink = ChromeTraceSink()
    sink.open(context(tmp_path))
    for step in range(5):
        sink.write(bundle(step))
        sink.flush()
        assert sum(event["ph"] == "X" for event in trace_of(tmp_path / "trace.json")) == 2 * (step + 1)
    sink.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"trainer/0", "rollout/0", "buffer"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 10
    assert spans[0]["dur"] == 500_000
    assert spans[0]["cat"] == "compute"
    tracks = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name" and event["tid"]
    }
    assert {span["tid"] for span in spans if span["name"] == "generate"} == {tracks["group 3"]}
    assert sum(event["ph"] == "i" for event in events) == 5
    check_events(events)


def test_the_next_monitor_begins_a_part_whatever_the_last_one_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b'[\n{"ph":"M","na')  # killed in mid-write
    sink = ChromeTraceSink()
    sink.open(context(tmp_path))
    sink.write(bundle(1))
    sink.close()
    check_events(json.loads(path.read_text()))
    assert (tmp_path / "trace.1.json").read_bytes() == b'[\n{"ph":"M","na'


def test_tracks_made_from_ids_do_not_grow_without_end(tmp_path: Path) -> None:
    sink = ChromeTraceSink()
    sink.open(context(tmp_path))
    for index in range(500):
        sink.write(Telemetry(spans=(span("x", "n", 1.0, track=f"group {index}"),)))
    sink.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert sum(event["ph"] == "X" for event in events) == 500
    assert sum(event["name"] == "thread_name" for event in events) == 129


def test_e12_a_long_trace_goes_on_in_a_new_file_and_the_newest_two_stay(tmp_path: Path) -> None:
    """E12: it stopped at 256 MiB."""
    sink = ChromeTraceSink(part_bytes=20_000)
    sink.open(context(tmp_path))
    for step in range(400):
        made, taken = weights("trainer/0", step, WALL_S + step, is_made=True), WALL_S + step + 0.6
        sink.write(Telemetry(spans=(made, weights("rollout/0", step, taken, is_made=False))))
        sink.flush()
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.1.json", "trace.json"]
    older, newer = (json.loads((tmp_path / name).read_text()) for name in ("trace.1.json", "trace.json"))
    for part in (older, newer):
        check_events(part)
        follow(part)
    starts = [event["ts"] for event in older + newer if event["ph"] == "X"]
    assert starts == sorted(starts)
    assert max(starts) >= 1_000_000 * (WALL_S + 399), "the newest is there"
    assert all(path.stat().st_size < 25_000 for path in tmp_path.iterdir())
    rows = {(e["pid"], e["tid"], e["args"]["name"]) for e in older if e["name"] in ("process_name", "thread_name")}
    assert rows == {
        (e["pid"], e["tid"], e["args"]["name"]) for e in newer if e["name"] in ("process_name", "thread_name")
    }


def test_events_wait_for_room_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ChromeTraceSink()
    sink.open(context(tmp_path))
    sink.write(bundle(0))
    sink.flush()
    monkeypatch.setattr(os, "write", room_for(40, OSError(errno.ENOSPC, "No space left on device")))
    sink.write(bundle(1))
    with pytest.raises(OSError, match="No space left"):
        sink.flush()
    monkeypatch.undo()
    sink.write(bundle(2))
    sink.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    trained = [event["ts"] for event in events if event["name"] == "train"]
    assert trained == [1_000_000 * (WALL_S + step) for step in range(3)], "it waited"
    check_events(events)


def test_tensorboard_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ((0, 1, 2, 3, 4, 5, 2, 3, 4), (3,)):  # the trainer went back to version 2; the run was resumed from 3
        sink = TensorBoardSink()
        sink.open(context(tmp_path))
        for step in steps:
            sink.write(Telemetry(metrics=(point(step, train__loss=float(step), time__compute=3.0),)))
            sink.write(Telemetry(metrics=(point(-1, "rollout/0", rollout__running=2.0),)))
        sink.close()
    reader = EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    assert reader.Tags()["scalars"] == ["train/loss", "rollout.0/running"]
    assert [(scalar.step, scalar.value) for scalar in reader.Scalars("train/loss")] == [(s, float(s)) for s in range(4)]
    assert [(scalar.step, scalar.value) for scalar in reader.Scalars("rollout.0/running")] == [
        (s, 2.0) for s in range(4)
    ]


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from myxa.core.clock import SystemClock; "
        "from myxa.core.sink import SinkContext; import myxa.actors.sinks.registry as r; "
        "assert 'tensorboard' not in sys.modules; s = r.make_sink('tensorboard'); "
        "s.open(SinkContext(run_dir=Path(sys.argv[1]), run_name='', clock=SystemClock(), emit=lambda k, t: None)); "
        "assert 'tensorboard' in sys.modules; s.close(); print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
