"""Standard output of a run, which goes on when nobody takes it any more: a reader that ended (`myxa up | tee`), a
terminal that was closed, a full disk under a redirected output.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any, TextIO, cast

_log = logging.getLogger("myxa.launcher")


def lasting(file: TextIO) -> TextIO:
    """The same file, whose writing never fails: what cannot be written is lost, and so is all that comes after it."""
    return cast("TextIO", _Outlet(file))


class _Outlet:
    """See `lasting`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_gone = False

    def __getattr__(self, name: str) -> Any:
        """Everything else is the file's own."""
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if not self._is_gone:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._is_gone:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """What the file has buffered goes nowhere, or Python would try it again when it ends, and fail."""
        self._is_gone = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
            self._file.flush()
        _log.info("standard output is not written any more, the run goes on: %s", error)
