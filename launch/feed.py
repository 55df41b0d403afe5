"""Looks at a run through the verb `status`, again and again, also while the run fails or ends; else at its files.

Blocking: call it from a thread.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ..core.errors import MyxaError
from .control.client import ControlClient, ControlNote, find_run
from .run_dir import RunDir
from .views.run_files import RunFiles
from .views.run_view import RunView, carried_over, outcome, run_view_of_files, with_past

LOOK_S = 6.0
"""How long one look may take."""
WHOLE_EVERY = 3
"""Knobs, history, processes and the verdict are in every third look."""


class Feed:
    """One run as it looks from outside. Not thread-safe."""

    def __init__(self, run_dir: Path, note: ControlNote | None = None) -> None:
        """`note`: None for a run that is over: its files answer."""
        self.run_dir = run_dir
        self.past = RunFiles(run_dir)
        self.note = note
        self.is_closed = False
        self._num_looks = 0
        self._last: RunView | None = None
        self._heard_s = time.monotonic()
        self._wake = threading.Event()

    @classmethod
    def of(cls, run: Path | None) -> Feed:
        """Of the run named, or the only live one. Raises LaunchError."""
        note = find_run(run)
        return cls(Path(note.run_dir), note)

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
        if self.note is None:
            self.past.is_live = RunDir(self.run_dir).is_held
            self.past.read(is_over=not self.past.is_live)
            return run_view_of_files(self.past)
        is_whole = self._num_looks % WHOLE_EVERY == 0
        self._num_looks += 1
        self.past.read()
        try:
            answer = ControlClient(self.note).ask("status", timeout_s=LOOK_S, whole=is_whole)
            view = msgspec.convert(answer, RunView)
        except msgspec.ValidationError as error:
            return self._silent(self.note, f"status: an answer of another version: {error}")
        except (MyxaError, OSError, ValueError) as error:  # also a socket that breaks, a line that is no JSON
            return self._silent(self.note, str(error))
        self._heard_s = time.monotonic()
        self._last = carried_over(with_past(view, self.past), self._last or view)
        return self._last

    def _silent(self, note: ControlNote, why: str) -> RunView:
        now_s = time.time()
        last = self._last or RunView(now_wall_s=now_s, started_wall_s=now_s)
        if not note.is_live:
            self.past.read(is_over=True)
            how, named = outcome(self.past), last.run_dir or str(self.run_dir)
            return replace(last, has_ended=True, run_dir=named, troubles=(how.text,) if how.level != "open" else ())
        return replace(last, troubles=(why,), silent_s=max(0.1, time.monotonic() - self._heard_s))
