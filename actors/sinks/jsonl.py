"""`metrics.jsonl`, `events.jsonl` and `samples.jsonl`: the source of truth; other views can be made again from them.

One JSON object per line, appended. A process killed in mid-write leaves at most one torn last line; the next monitor
ends it first, and readers skip it. On a full disk lines wait in memory, up to a bound (`LineFile`). When
`samples.jsonl` has half of what both files may have, it becomes `samples.1.jsonl`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson

from ...core.messages import Telemetry
from ...core.sink import SinkContext

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
SAMPLES_FILE = "samples.jsonl"
OLDER_SAMPLES_FILE = "samples.1.jsonl"


class JsonlSink:
    """Appends metric points, events and groups as lines."""

    name = "jsonl"

    def __init__(self, samples_bytes: int = 256 << 20) -> None:
        """`samples_bytes`: of all samples that are kept; 0: none."""
        self._samples_bytes = samples_bytes

    def open(self, context: SinkContext) -> None:
        def opened(name: str, part_bytes: int = 0) -> LineFile:
            return LineFile(context.run_dir / name, context.emit, part_bytes)

        self._metrics, self._events = opened(METRICS_FILE), opened(EVENTS_FILE)
        self._samples = opened(SAMPLES_FILE, self._samples_bytes // 2) if self._samples_bytes else None
        self._files = [file for file in (self._metrics, self._events, self._samples) if file is not None]

    def write(self, bundle: Telemetry) -> None:
        """Lines `{"source", "step", "wall_s", "values"}` and `{"source", "wall_s", "kind", "text", "data"}`."""
        for point in bundle.metrics:
            line = {"source": point.source, "step": point.step, "wall_s": point.wall_s, "values": point.values}
            self._metrics.add(_line(line))
        for event in bundle.events:
            line = {"source": event.source, "wall_s": event.wall_s, "kind": event.kind, "text": event.text}
            self._events.add(_line({**line, "data": event.data} if event.data else line))
        if self._samples is not None:
            for group in bundle.samples:
                self._samples.add(msgspec.json.encode(group) + b"\n")

    def flush(self) -> None:
        """Hand the lines to the kernel: from then on they survive the death of this process. Raises the first error."""
        with ExitStack() as flushing:  # all, whatever one of them raises
            for file in reversed(self._files):
                flushing.callback(file.flush)

    def close(self) -> None:
        files, self._files = self._files, []
        with ExitStack() as closing:  # all, whatever one of them raises
            for file in files:
                closing.callback(file.close)


def _line(record: dict[str, Any]) -> bytes:
    # `default=str`: an event's data may hold anything when an embedding program made it; a line must come of it.
    return orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


MAX_WAITING_BYTES = 16 << 20
"""Hours of an ordinary run. Older lines go first."""


@dataclass(eq=False)
class LineFile:
    """Open from its making to `close`. Lines wait in memory until `flush`, and while the disk refuses them."""

    path: Path
    tell: Callable[[str, str], None]
    """Called with kind and text when lines are lost."""
    part_bytes: int = 0
    """A file that would be larger becomes `NAME.1.jsonl`, in the place of an older one; 0: none does."""
    frame: Callable[[], tuple[bytes, bytes]] | None = None
    """The first and the last line of each file, the last once it gets no more."""

    def __post_init__(self) -> None:
        self.has_begun = False
        """Whether it has its first line."""
        self._file = self._opened()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self.add(b"\n")

    def _opened(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def add(self, line: bytes) -> None:
        self._waiting.append(line)
        self._num_bytes += len(line)
        while self._num_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            first = self._waiting.popleft()  # it may be half written: what is left of it ends that line
            self._num_bytes -= len(self._waiting.popleft())
            self._waiting.appendleft(first)
            self._num_lost += 1

    def flush(self) -> None:
        """Hand the lines to the kernel. Raises OSError if it takes no more: the rest waits."""
        size = os.fstat(self._file).st_size
        if self.part_bytes and self._waiting and 0 < size > self.part_bytes - self._num_bytes:
            self._end()
            with suppress(FileNotFoundError):  # deleted by hand
                self.path.replace(self.path.with_suffix(f".1{self.path.suffix}"))
            before, self._file = self._file, self._opened()
            os.close(before)
        if self._waiting and self.frame is not None and not self.has_begun:
            self._waiting.appendleft(self.frame()[0])
            self.has_begun = True
        while self._waiting:
            data = b"".join(self._waiting)
            unwritten = data[os.write(self._file, data) :]
            self._waiting = deque(unwritten.splitlines(keepends=True))
            self._num_bytes = len(unwritten)
        if self._num_lost:
            self.tell("telemetry-gap", f"{self.path.name} lacks {self._num_lost} lines: its disk refused them")
            self._num_lost = 0

    def _end(self) -> None:
        if self.frame is not None and self.has_begun:
            os.write(self._file, self.frame()[1])
            self.has_begun = False

    def close(self) -> None:
        """Raises OSError if the disk refuses what still waits; it is closed all the same."""
        try:
            self.flush()
            self._end()
        finally:
            os.close(self._file)
