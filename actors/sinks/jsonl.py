"""`metrics.jsonl`, `events.jsonl` and `samples.jsonl`: the source of truth; other views can be made again from them.

One JSON object per line, appended, UTF-8. A process killed in mid-write leaves at most one torn last line; the next
monitor of the same run ends that line first, so it can never swallow a good one. Readers skip what they cannot parse.
On a disk that is full lines wait for room (`line_file.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import orjson

from ...core.messages import GroupText, Telemetry
from ...core.sink import SinkContext
from .line_file import LineFile
from .samples_file import SamplesFile

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class JsonlSink:
    """Appends metric points, events and groups as lines."""

    name = "jsonl"

    def __init__(self, samples_bytes: int = 256 << 20) -> None:
        """`samples_bytes`: of all samples that are kept; 0: none."""
        self._samples_bytes = samples_bytes
        self._samples: SamplesFile | None = None
        self._context: SinkContext | None = None
        self._metrics: LineFile | None = None
        self._events: LineFile | None = None

    def open(self, context: SinkContext) -> None:
        """Open the files for appending, repairing a torn last line."""
        self._context = context
        self._metrics = LineFile(context.run_dir / METRICS_FILE, context.emit)
        self._events = LineFile(context.run_dir / EVENTS_FILE, context.emit)
        if self._samples_bytes:
            self._samples = SamplesFile(context.run_dir, self._samples_bytes, context.emit)

    def write(self, bundle: Telemetry) -> None:
        """Lines `{"source", "step", "wall_s", "values"}` and `{"source", "wall_s", "kind", "text", "data"}`."""
        if self._metrics is None or self._events is None:
            return
        for point in bundle.metrics:
            line = {"source": point.source, "step": point.step, "wall_s": point.wall_s, "values": point.values}
            self._metrics.add(_line(line))
        for event in bundle.events:
            line = {"source": event.source, "wall_s": event.wall_s, "kind": event.kind, "text": event.text}
            self._events.add(_line({**line, "data": event.data} if event.data else line))
        for group in bundle.samples:
            self._add_sample(group)

    def _add_sample(self, group: GroupText) -> None:
        """Nothing that is wrong with samples may cost a metric."""
        if self._samples is None or self._context is None:
            return
        try:
            self._samples.add(msgspec.json.encode(group) + b"\n")
        except OSError as error:
            self._samples = None
            self._context.emit("samples-off", f"no more samples are kept: {error}")

    def flush(self) -> None:
        """Hand the lines to the kernel: from then on they survive the death of this process."""
        for file in (self._metrics, self._events, self._samples):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Flush and close."""
        files = (self._metrics, self._events, self._samples)
        self._metrics = self._events = self._samples = None
        with ExitStack() as closing:  # both, whatever one of them raises
            for file in files:
                if file is not None:
                    closing.callback(file.close)


def _line(record: dict[str, Any]) -> bytes:
    # `default=str`: an event's data may hold anything when an embedding program made it; a line must come of it.
    return orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
