"""Prompts that are not drawn again: reward or workflow failed for them too often, or they ended a reward's worker, or
one rollout actor after another.

    quarantine.jsonl    one line per prompt, in the run directory; a line that is taken out sets its prompt free

The failures themselves are counted in the ledger (dropped groups and their reasons), so a file that is lost, or cannot
be read when the buffer starts, is made anew, and a prompt that was set free gets one more try before it is listed
again. The file is only ever added to, a line at a time: what a person writes into it stays. Knows one small file and
rows; must not know admission, messages or what a reward is.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ...core.errors import DataError
from ...core.files import sync_folder
from ...core.protocols import MixedSources, PromptSource
from ...core.samples import Prompt
from ..ledger.ledger import Ledger
from .poison_prompts import POISON
from .sources import Sources

_FILE = "quarantine.jsonl"
AT_ONCE = ("reward-crash", POISON)
"""Of these, one time is enough: it ended a process, and more than once."""
COUNTED = ("reward-error", "reference-error", "workflow-error", "data-error", *AT_ONCE)
"""Reasons for which a group was dropped that are held against its prompt."""
MAX_DETAIL = 500

Failure = tuple[Prompt, int, str]
"""Prompt, draw number and reason of a dropped group."""


class QuarantinedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. Fields that a person adds are not refused."""

    source: str
    row: int
    draw: int
    """The draw that brought it here."""
    reason: str
    count: int
    """Failures so far."""
    detail: str = ""
    """What was said of the last one."""


class Quarantine:
    """The list. One per buffer; `after` = 0 keeps no list and heeds none."""

    def __init__(
        self,
        path: Path,
        *,
        after: int,
        failures: Iterable[Failure],
        log: logging.Logger,
    ) -> None:
        """`after`: failures of one prompt. `failures`: those that the ledger knows."""
        self._path = path
        self._after = after
        self._log = log
        self._counts: Counter[tuple[str, int]] = Counter()
        self._listed: dict[tuple[str, int], QuarantinedPrompt] = {}
        self._news: list[str] = []
        self._read_at_ns = 0
        if not after:
            return
        is_known = self._found()
        for prompt, draw, reason in failures:
            self._note(prompt, draw, reason, "", may_list=not is_known)
        if not is_known:
            self._append(*self._listed.values())

    def __len__(self) -> int:
        return len(self._listed)

    def failed(self, prompt: Prompt, draw: int, reason: str, detail: str) -> None:
        """A group of that prompt was dropped; the prompt is listed if that was once too often."""
        if not self._after or reason not in COUNTED:
            return
        self._refresh()
        entry = self._note(prompt, draw, reason, detail, may_list=True)
        if entry is None:
            return
        self._append(entry)
        times = "once" if entry.count == 1 else f"{entry.count} times"
        self._news.append(
            f"row {entry.row} of {entry.source} is not drawn again: {entry.reason} {times}; the last one: "
            f"{entry.detail} -- mend it and take its line out of {self._path}"
        )

    def take_news(self) -> list[str]:
        """What was listed since the last look, in words."""
        news, self._news = self._news, []
        return news

    def holds(self, prompt: Prompt) -> bool:
        """Whether it is on the list. A person may have taken it out of the file a moment ago."""
        if (prompt.source, prompt.row) in self._listed:
            self._refresh()
        return (prompt.source, prompt.row) in self._listed

    def _note(self, prompt: Prompt, draw: int, reason: str, detail: str, *, may_list: bool) -> QuarantinedPrompt | None:
        key = (prompt.source, prompt.row)
        self._counts[key] += 1
        is_too_many = self._counts[key] >= self._after or reason in AT_ONCE
        if not (may_list and is_too_many) or key in self._listed:
            return None
        self._listed[key] = entry = QuarantinedPrompt(
            source=prompt.source,
            row=prompt.row,
            draw=draw,
            reason=reason,
            count=self._counts[key],
            detail=detail[:MAX_DETAIL],
        )
        return entry

    # ---- the file

    def _found(self) -> bool:
        """At the start: whether there is a list, and it was read. One that cannot be (a machine that lost its power, a
        slip of the editor) is put aside for whoever wrote in it."""
        try:
            self._read()
        except FileNotFoundError:
            return False
        except (OSError, DataError) as error:
            aside = self._path.with_name(f"{self._path.name}.bad")
            text = f"{error}; it is now {aside.name}, and a new one was made of what the ledger counted"
            self._log.warning("%s", text)
            self._news.append(text)
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            return False
        return True

    def _refresh(self) -> None:
        """Read again what somebody else has written. A line that is torn by an editor is told, not fatal."""
        try:
            if self._path.stat().st_mtime_ns != self._read_at_ns:
                self._read()
        except FileNotFoundError:
            return
        except (OSError, DataError) as error:
            self._log.warning("%s; the list stays as it was", error)

    def _read(self) -> None:
        at_ns = self._path.stat().st_mtime_ns
        listed: dict[tuple[str, int], QuarantinedPrompt] = {}
        for number, line in enumerate(self._path.read_bytes().splitlines(), start=1):
            if not line.strip():
                continue
            try:
                entry = msgspec.json.decode(line, type=QuarantinedPrompt)
            except msgspec.DecodeError as error:
                raise DataError(
                    f"{self._path}:{number} is no quarantined prompt: {error}",
                    remedy="take out whole lines only; an empty file sets all prompts free",
                ) from error
            listed[(entry.source, entry.row)] = entry
        self._listed, self._read_at_ns = listed, at_ns

    def _append(self, *entries: QuarantinedPrompt) -> None:
        """Durably. A disk that refuses is told: the ledger still knows."""
        if not entries:
            return
        try:
            self._add(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
            self._refresh()
        except OSError as error:
            self._log.warning("%s cannot be written: %s", self._path, error)

    def _add(self, lines: bytes) -> None:
        """To the file that bears the name when it is done: an editor may have put another in its place meanwhile."""
        while True:
            with self._path.open("a+b", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - 1, 0))
                is_torn = file.read(1) not in (b"", b"\n")
                left = memoryview(b"\n" + lines if is_torn else lines)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(size)
                    raise
                os.fsync(file.fileno())
                sync_folder(self._path.parent)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                        return


def open_quarantine(
    folder: Path, source: PromptSource | MixedSources, ledger: Ledger, after: int, log: logging.Logger
) -> Quarantine:
    """The list of the run in that folder."""
    return Quarantine(folder / _FILE, after=after, failures=_failures(Sources(source), ledger), log=log)


def _failures(sources: Sources, ledger: Ledger) -> Iterator[Failure]:
    for row in ledger.given_up(COUNTED):
        if sources.has(row.source, row.draw_of_source):
            yield sources.prompt(row), row.draw, row.reason
