"""`samples.jsonl`: prompts and answers of every step, one group a line; the oldest go where there is no room for all.

Two files: when the newer one has half of what both may have, it becomes `samples.1.jsonl` and takes that one's place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from .line_file import LineFile

SAMPLES_FILE = "samples.jsonl"
OLDER_SAMPLES_FILE = "samples.1.jsonl"


class SamplesFile:
    """Open from the first line on, to `close`."""

    def __init__(self, run_dir: Path, max_bytes: int, tell: Callable[[str, str], None]) -> None:
        """`max_bytes`: of both files together. `tell(kind, text)`: see `LineFile`."""
        self._path, self._older = run_dir / SAMPLES_FILE, run_dir / OLDER_SAMPLES_FILE
        self._max_bytes = max_bytes // 2
        self._tell = tell
        self._file: LineFile | None = None
        self._num_bytes = 0

    def add(self, line: bytes) -> None:
        """One line with its end. Raises OSError where the file cannot be opened."""
        if self._file is not None and self._num_bytes + len(line) > self._max_bytes:
            with contextlib.suppress(OSError):  # a disk that is full: what waits for room is lost
                self.close()
            self._path.replace(self._older)
        if self._file is None:
            self._file = LineFile(self._path, self._tell)
            self._num_bytes = self._path.stat().st_size
        self._num_bytes += len(line)
        self._file.add(line)

    def flush(self) -> None:
        """Hand the lines to the kernel."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
