"""TensorBoard files under `tb/`, by tensorboard's own event writer; no torch, no TensorFlow.

One folder per actor, so that the same metric of two rollout actors gives two curves under one title.
tensorboard is imported in `open` only: it is an optional extra and costs more than the rest of the monitor together.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from ...core.messages import MetricPoint, Telemetry
from ...core.sink import SinkContext

TENSORBOARD_FOLDER = "tb"

_SKIPPED = ("time/",)
_MAX_WRITERS = 64


class TensorBoardSink:
    """Scalars by step."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._make_writer: Any = None
        self._make_event: Any = None
        self._make_summary: Any = None
        self._writers: dict[str, Any] = {}
        self._opened_wall_s = 0.0

    def open(self, context: SinkContext) -> None:
        """Raises ImportError saying what to install when tensorboard is missing (the run continues without it)."""
        try:
            self._make_event = import_module("tensorboard.compat.proto.event_pb2").Event
            self._make_summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
            self._make_writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        except ImportError as error:
            raise ImportError(f"tensorboard is not installed ({error}) -- pip install 'myxa[tensorboard]'") from error
        self._folder = context.run_dir / TENSORBOARD_FOLDER
        self._opened_wall_s = context.clock.wall()

    def write(self, bundle: Telemetry) -> None:
        """One event per metric point. Points without a step are placed at the second of the run."""
        for point in bundle.metrics:
            values = [
                self._make_summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
                if not name.startswith(_SKIPPED)
            ]
            writer = self._writer(point) if values else None
            if writer is None:
                continue
            step = point.step if point.step >= 0 else max(0, int(point.wall_s - self._opened_wall_s))
            summary = self._make_summary(value=values)
            writer.add_event(self._make_event(wall_time=point.wall_s, step=step, summary=summary))

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Close all files (each has its own thread)."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, point: MetricPoint) -> Any:
        if self._folder is None or (point.source not in self._writers and len(self._writers) >= _MAX_WRITERS):
            return None
        if point.source not in self._writers:
            folder = self._folder / "".join(c if c.isalnum() or c in "-_" else "." for c in point.source)
            self._writers[point.source] = self._make_writer(str(folder), flush_secs=3600)
        return self._writers[point.source]
