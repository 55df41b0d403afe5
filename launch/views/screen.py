"""What a person at node 0 sees: the live view, the launcher's warnings, the report and how the run ended.

It knows views and the terminal only.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from ...actors.checkpoints.folder import newest_whole
from ...actors.rewards.guard import kind_of_cause
from ...actors.sinks.jsonl import EVENTS_FILE
from ...core.errors import MyxaError
from ..first_failure import FirstFailure, RunEnd
from .live import LiveView, final_summary
from .numbers import clean, training_reward
from .report import REPORT_FILE, write_page
from .run_files import JsonTail, RunFiles, load_run
from .run_view import RunView, with_past

_log = logging.getLogger("myxa.launcher")

NEWS = frozenset({"engine-loading", "reward-failed", "reward-paused", "reward-works-again", "reference-paused",
                  "reference-works-again"})  # fmt: skip
"""Kinds of events that are shown."""
_PAST_BYTES = 1 << 20
"""Of a resumed run's files: all of them would hold the launcher's loop up."""


class Screen:
    """Shows one run. Use as a context manager while it runs; `finish` afterwards."""

    def __init__(self, console: Console, run_dir: Path, *, is_quiet: bool = False) -> None:
        self._console = console
        self._run_dir = run_dir
        self._is_quiet = is_quiet
        self._view = LiveView(console)
        self._past = RunFiles(run_dir, _PAST_BYTES)
        self._last: RunView | None = None
        self._started_s = time.monotonic()
        self._news = _News(run_dir / EVENTS_FILE)

    def __enter__(self) -> Screen:
        if not self._is_quiet:
            self._view.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._is_quiet:
            self._view.__exit__(*error)

    def show(self, view: RunView) -> None:
        if view.snapshot or self._last is None:
            self._last = view
        if not self._is_quiet:
            self._past.read()
            self._view.update(with_past(view, self._past))
            self._tell_news()

    def _tell_news(self) -> None:
        for line in self._news.read():
            self.say(line)

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._is_quiet:
            self._view.say(text)

    def tell(self, failure: FirstFailure) -> None:
        """Show the report of a failure now. In quiet mode errors of the run file appear in the last lines only."""
        if self._is_quiet and failure.is_mistake:
            return
        for line in failure.report().splitlines():
            if self._is_quiet:
                self._console.print(Text(clean(line)), soft_wrap=True)
            else:
                self._view.say(line)

    def finish(self, ending: RunEnd) -> None:
        """Write the report, print how the run ended; the cause of a failure comes last."""
        self._tell_news()
        run, report = self._report()
        status = ending.status
        if status is not None:
            last = self._last
            if ending.first_failure is not None:
                status = msgspec.structs.replace(status, phase="failed")  # it could not say so itself
            final_summary(
                self._console, status, elapsed_s=time.monotonic() - self._started_s, run_dir=self._run_dir,
                report=report, curves=_curves(run),
                dropped=last.buffer.dropped if last and last.buffer else None,
            )  # fmt: skip
        else:
            self._console.print(Text(f"run directory: {self._run_dir}"), soft_wrap=True)
        if ending.exit_code == 0:
            return
        if newest_whole(self._run_dir / "checkpoints", reads_all=False)[0] is not None:
            self._console.print(Text(f"to continue: myxa resume {shlex.quote(str(self._run_dir))}"), soft_wrap=True)
        if ending.first_failure is not None:
            for line in ending.first_failure.last_words().splitlines():
                self._console.print(Text(clean(line)), soft_wrap=True)
        else:
            self._console.print(Text(f"ended: {ending.reason}"), soft_wrap=True)

    def _report(self) -> tuple[RunFiles | None, Path | None]:
        """What the run wrote, and the report that is made of it; None where this fails."""
        run = None
        try:
            run = load_run(self._run_dir)
            run.is_live = False
            return run, write_page([run], self._run_dir / REPORT_FILE)
        except (MyxaError, OSError, ValueError) as error:
            self._console.print(Text(f"no report: {error}"), soft_wrap=True)
            return run, None


def _curves(run: RunFiles | None) -> dict[str, dict[int, float]]:
    """The loss where there is no reward: of demonstrations and pairs."""
    if run is None:
        return {}
    reward = run.steps(training_reward(run.series))
    main = {"reward": reward} if reward else {"loss": run.steps("train/loss")}
    return main | {"held-out reward": run.steps("eval/reward")}


class _News:
    """What rewards did wrong, as the run's events say: each kind of cause once for all actors, then its counts."""

    def __init__(self, events: Path) -> None:
        self._events = JsonTail(events, last_bytes=1)  # what is written from now on
        self._shown: set[str] = set()

    def read(self) -> list[str]:
        return [line for event in self._events.read() if event.get("kind") in NEWS and (line := self._line(event))]

    def _line(self, event: Mapping[str, Any]) -> str:
        kind, text = str(event["kind"]), str(event.get("text"))
        cause, _, group = text.partition(" (group ")
        key = kind_of_cause(cause)
        if kind.endswith("-failed") and key in self._shown and not group.endswith("so far"):
            return ""
        self._shown.add(key)
        return f"{kind}: {text}"


class ShownWarnings(logging.Handler):
    """Hands them to `say`."""

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__(level=logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(f"{record.levelname.lower()}: {record.getMessage()}")
