"""`metrics.jsonl` and `events.jsonl`: the source of truth; every other view can be made again from them.

One JSON object per line, appended, UTF-8. A process killed in mid-write leaves at most one torn last line; the next
monitor of the same run ends that line first, so it can never swallow a good one. Readers skip what they cannot parse.
On a disk that is full lines wait for room (`line_file.py`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import orjson

from ...core.messages import Telemetry
from ...core.sink import SinkContext
from .line_file import LineFile

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class JsonlSink:
    """Appends metric points and events as lines."""

    name = "jsonl"

    def __init__(self) -> None:
        self._metrics: LineFile | None = None
        self._events: LineFile | None = None

    def open(self, context: SinkContext) -> None:
        """Open both files for appending, repairing a torn last line."""
        self._metrics = LineFile(context.run_dir / METRICS_FILE, context.emit)
        self._events = LineFile(context.run_dir / EVENTS_FILE, context.emit)

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

    def flush(self) -> None:
        """Hand the lines to the kernel: from then on they survive the death of this process."""
        for file in (self._metrics, self._events):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Flush and close."""
        files, self._metrics, self._events = (self._metrics, self._events), None, None
        with ExitStack() as closing:  # both, whatever one of them raises
            for file in files:
                if file is not None:
                    closing.callback(file.close)


def _line(record: dict[str, Any]) -> bytes:
    # `default=str`: an event's data may hold anything when an embedding program made it; a line must come of it.
    return orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
