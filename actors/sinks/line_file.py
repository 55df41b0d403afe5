"""A file that lines are appended to, also while its disk refuses them: they wait in memory, so much of them, and are
written once it takes them again. Knows one file; must not know what is in the lines.

`logging.handlers.MemoryHandler` was considered: it keeps records too, but forgets them when writing them fails.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ...core.disk import REFUSED_EVENT, WRITTEN_EVENT, refusal, refused

MAX_WAITING_BYTES = 16 << 20
"""Hours of an ordinary run. Older lines go first."""
_WRITE_AT_BYTES = 64 << 10


class LineFile:
    """Open from its making to `close`."""

    def __init__(self, path: Path, tell: Callable[[str, str], None]) -> None:
        """A torn last line of an earlier writer is ended. `tell(kind, text)`: when the disk refuses, and when it takes
        lines again. Raises OSError if it cannot be opened."""
        self._path = path
        self._tell = tell
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_refused = False
        self._num_lost = 0
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self.add(b"\n")

    def add(self, line: bytes) -> None:
        """One line with its end. It is written with others, by `flush` at the latest."""
        self._waiting.append(line)
        self._num_bytes += len(line)
        if self._num_bytes >= _WRITE_AT_BYTES and not self._is_refused:
            self.flush()
        while self._num_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            first = self._waiting.popleft()  # it may be half written: what is left of it ends that line
            self._num_bytes -= len(self._waiting.popleft())
            self._waiting.appendleft(first)
            self._num_lost += 1

    def flush(self) -> None:
        """Hand the lines to the kernel: from then on they survive the death of this process. Raises OSError for what is
        no refusal of the disk."""
        try:
            while self._waiting:
                self._write(b"".join(self._waiting))
        except OSError as error:
            if refusal(error) is None:
                raise
            if not self._is_refused:
                self._is_refused = True
                self._tell(REFUSED_EVENT, str(refused(self._path, error)))
            return
        if self._is_refused:
            lost = f"; {self._num_lost} lines were lost meanwhile" if self._num_lost else ""
            self._is_refused, self._num_lost = False, 0
            self._tell(WRITTEN_EVENT, f"{self._path.name} goes on{lost}")

    def _write(self, data: bytes) -> None:
        rest = data[os.write(self._file, data) :]
        self._waiting = deque(rest.splitlines(keepends=True))
        self._num_bytes = len(rest)

    def close(self) -> None:
        """Raises OSError if the disk refuses what still waits; it is closed all the same."""
        try:
            self.flush()
            if self._waiting:
                raise OSError(f"{len(self._waiting)} lines of {self._path} are lost: its disk refused them to the end")
        finally:
            os.close(self._file)
