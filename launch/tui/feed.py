"""Looks at a run through the verb `status`, again and again, also while the run fails or ends; else at its files.

Blocking: call it from a thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ...core.errors import LaunchError, MyxaError
from ...core.knobs import ChangeReply
from ..control.client import ControlClient, ControlNote
from ..run_dir import RunDir
from ..views.run_files import RunFiles
from ..views.run_view import RunView, carried_over, outcome, run_view_of_files, with_past

LOOK_S = 6.0
"""How long one look may take."""
WHOLE_EVERY = 3
"""Knobs, history, processes and the verdict are in every third look."""


class Feed:
    """One run as it looks from outside. Not thread-safe, but `set` may be called beside `look`."""

    def __init__(
        self,
        client: ControlClient | None,
        is_live: Callable[[], bool],
        run_dir: Path,
        *,
        reader_only: bool = False,
        socket: str = "",
    ) -> None:
        """`client`: None for a run that is over."""
        self.run_dir = run_dir
        self.past = RunFiles(run_dir)
        self.reader_only = reader_only
        self.socket = socket
        """Of the run; empty: its files answer."""
        self.is_closed = False
        self._client = client
        self._is_live = is_live
        self._num_looks = 0
        self._last: RunView | None = None
        self._heard_s = time.monotonic()
        self._wake = threading.Event()

    @classmethod
    def of(cls, run: Path | None, *, only_view: bool = False) -> Feed:
        """Of the run named, or the only live one; through the read-only socket if the other is out of reach. Raises
        LaunchError."""
        return cls.of_note(ControlClient.of(run).note, only_view=only_view)

    @classmethod
    def of_note(cls, note: ControlNote, *, only_view: bool = False) -> Feed:
        only_view = only_view or not os.access(note.control, os.W_OK)
        client = ControlClient(note, view=only_view)
        return cls(client, lambda: note.is_live, client.run_dir, reader_only=only_view, socket=client.path)

    @classmethod
    def of_files(cls, run_dir: Path) -> Feed:
        return cls(None, lambda: False, run_dir.resolve(), reader_only=True)

    def close(self) -> None:
        self.is_closed = True
        self._wake.set()

    def wait(self, seconds: float) -> None:
        """Rest between looks, at most until `wake` or `close`."""
        self._wake.wait(seconds)
        if not self.is_closed:
            self._wake.clear()

    def wake(self) -> None:
        """The next look comes at once, and is a whole one."""
        self._num_looks = 0
        self._wake.set()

    def look(self) -> RunView:
        """One look. Never raises for the run: one that is gone gives its last view, with `has_ended`."""
        if self._client is None:
            self.past.is_live = RunDir(self.run_dir).is_held
            self.past.read(is_over=not self.past.is_live)
            return replace(run_view_of_files(self.past), reader_only=True)
        is_whole = self._num_looks % WHOLE_EVERY == 0
        self._num_looks += 1
        self.past.read()
        try:
            answer = self._client.ask("status", timeout_s=LOOK_S, whole=is_whole)
            view = replace(msgspec.convert(answer, RunView), reader_only=self.reader_only)
        except msgspec.ValidationError as error:
            return self._silent(f"status: an answer of another version: {error}")
        except (MyxaError, OSError, ValueError) as error:  # also a socket that breaks, a line that is no JSON
            return self._silent(str(error))
        self._heard_s = time.monotonic()
        self._last = carried_over(with_past(view, self.past), self._last or view)
        return self._last

    def _silent(self, why: str) -> RunView:
        now_s = time.time()
        last = self._last or RunView(now_wall_s=now_s, started_wall_s=now_s, reader_only=self.reader_only)
        if not self._is_live():
            self.past.read(is_over=True)
            how, named = outcome(self.past), last.run_dir or str(self.run_dir)
            return replace(last, has_ended=True, run_dir=named, troubles=(how.text,) if how.level != "open" else ())
        return replace(last, troubles=(why,), silent_s=max(0.1, time.monotonic() - self._heard_s))

    def set(self, **arguments: Any) -> ChangeReply:
        """Set knobs. Raises the run's refusal."""
        if self._client is None:
            raise LaunchError("the run is over", remedy="`myxa report RUN` shows how it went")
        return msgspec.convert(self._client.ask("set", timeout_s=90.0, **arguments), ChangeReply)
