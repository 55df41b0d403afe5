"""Looks at a run through its control socket, again and again, also while the run fails or ends.

Blocking: call it from a thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from ...actors.sinks.jsonl import EVENTS_FILE
from ...core.errors import LaunchError, MyxaError
from ...core.knobs import ChangeReply, KnobValue
from ..control.client import ControlClient, ControlNote
from ..views.run_files import SampleQuery, read_samples
from ..views.run_view import ASKED, RunView, VerbAnswer, run_view_of

LOOK_S = 3.0
"""How long one look may take; later answers are missing in it."""
SLOW_EVERY = 3
"""Knobs, history, processes and the verdict are asked for in every third look."""
_FAST: tuple[str, ...] = ("status",)
_TAIL_BYTES = 1 << 16
_LAST_WORDS = ("run-ended", "run-finished", "run-failed")


class Asks(Protocol):
    """The part of `ControlClient` that is needed here."""

    def ask(self, verb: str, timeout_s: float | None = None, **arguments: Any) -> Any: ...


class _Files:
    """Answers for a run that is over."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def ask(self, verb: str, timeout_s: float | None = None, **arguments: Any) -> Any:
        if verb == "samples":
            names = SampleQuery.__dataclass_fields__
            wanted = SampleQuery(**{name: arguments[name] for name in names if name in arguments})
            return {"groups": read_samples(self._run_dir, wanted, arguments.get("num_groups", 4)), "num_left_out": 0}
        raise LaunchError("the run is over", remedy="`myxa report RUN` shows how it went")


class Feed:
    """One run as it looks from outside. Not thread-safe, but `set` and `ask` may be called beside `look`."""

    def __init__(
        self,
        client: Asks,
        is_live: Callable[[], bool],
        run_dir: Path,
        *,
        reader_only: bool = False,
        socket: str = "",
    ) -> None:
        self._client = client
        self._is_live = is_live
        self.run_dir = run_dir
        self.reader_only = reader_only
        self.socket = socket
        """Of the run; empty: its files answer."""
        self._answers: dict[str, VerbAnswer] = {}
        self._num_looks = 0
        self._last: RunView | None = None
        self._heard_s = time.monotonic()
        self._wake = threading.Event()
        self.is_closed = False
        """No more looks are wanted."""

    @classmethod
    def of(cls, run: Path | None, *, only_view: bool = False) -> Feed:
        """Of the run named, or the only live one; through the read-only socket if the other is out of reach. Raises
        LaunchError."""
        return cls.of_note(ControlClient.of(run).note, only_view=only_view)

    @classmethod
    def of_note(cls, note: ControlNote, *, only_view: bool = False) -> Feed:
        """Of the run that left this note."""
        only_view = only_view or not os.access(note.control, os.W_OK)
        client = ControlClient(note, view=only_view)
        return cls(client, lambda: note.is_live, client.run_dir, reader_only=only_view, socket=client.path)

    @classmethod
    def of_files(cls, run_dir: Path) -> Feed:
        """Of a run that has ended: its files answer."""
        return cls(_Files(run_dir), lambda: False, run_dir.resolve(), reader_only=True)

    def close(self) -> None:
        """No more looks; `wait` returns at once."""
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

    def look(self, *, all_of_it: bool = False) -> RunView:
        """One look. Never raises for the run: one that is gone gives its last view, with `has_ended`."""
        verbs = ASKED if all_of_it or self._num_looks % SLOW_EVERY == 0 else _FAST
        self._num_looks += 1
        answers = self._ask_all(verbs)
        if all(answer.error for answer in answers.values()):
            return self._silent(answers)
        self._heard_s = time.monotonic()
        self._answers |= answers
        view = replace(run_view_of(self._answers, time.time()), reader_only=self.reader_only)
        self._last = view if self._last is None else carried_over(view, self._last)
        return self._last

    def _ask_all(self, verbs: Sequence[str]) -> dict[str, VerbAnswer]:
        """All at the same time. Daemon threads, because a process that ends must not wait for a run that hangs."""
        found: dict[str, VerbAnswer] = {}

        def ask(verb: str) -> None:
            found[verb] = self._answer(verb)

        threads = [threading.Thread(target=ask, args=(verb,), daemon=True, name=f"ask {verb}") for verb in verbs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LOOK_S)
        return {verb: found.get(verb, VerbAnswer(error=f"no answer within {2 * LOOK_S:g} s")) for verb in verbs}

    def _answer(self, verb: str) -> VerbAnswer:
        try:
            return VerbAnswer(self._client.ask(verb, timeout_s=LOOK_S))
        except MyxaError as error:
            return VerbAnswer(error=str(error))
        except (OSError, ValueError) as error:  # a socket that breaks, a line that is no JSON
            return VerbAnswer(error=f"{type(error).__name__}: {error}")

    def _silent(self, answers: dict[str, VerbAnswer]) -> RunView:
        last = self._last or replace(run_view_of({}, time.time()), reader_only=self.reader_only)
        troubles: Sequence[str] = list(dict.fromkeys(answer.error for answer in answers.values()))
        if not self._is_live():
            word = last_word(self.run_dir)
            named = last.run_dir or str(self.run_dir)
            return replace(last, has_ended=True, run_dir=named, troubles=(word,) if word else ())
        return replace(last, troubles=tuple(troubles), silent_s=max(0.1, time.monotonic() - self._heard_s))

    def set(self, values: dict[str, KnobValue], reason: str, for_steps: int = 0, force: bool = False) -> ChangeReply:
        """Set knobs. Raises the run's refusal."""
        arguments: dict[str, Any] = {"values": values, "reason": reason}
        arguments |= {"for_steps": for_steps} if for_steps else {}
        arguments |= {"force": True} if force else {}
        return msgspec.convert(self._client.ask("set", timeout_s=90.0, **arguments), ChangeReply)

    def ask(self, verb: str, timeout_s: float = 15.0, **arguments: Any) -> Any:
        """Ask any other verb. Raises the run's refusal."""
        return self._client.ask(verb, timeout_s=timeout_s, **arguments)


def carried_over(new: RunView, old: RunView) -> RunView:
    """The new view; what is missing in it is kept from the old one. Actors end one after another."""
    was, now = old.live, new.live
    live = replace(
        now,
        status=now.status or was.status,
        buffer=now.buffer or was.buffer,
        snapshot=now.snapshot or was.snapshot,
        started_wall_s=now.started_wall_s if new.run_dir else was.started_wall_s,
    )
    has_reported = bool(now.snapshot)
    return replace(
        new,
        live=live,
        run_dir=new.run_dir or old.run_dir,
        actors=new.actors if any(actor.state for actor in new.actors) else old.actors or new.actors,
        knobs=new.knobs or old.knobs,
        history=new.history or old.history,
        why=new.why if has_reported else old.why,
        remedy=new.remedy if has_reported else old.remedy,
        has_ended=new.has_ended or live.phase in ("finished", "failed"),
    )


def last_word(run_dir: Path) -> str:
    """Why the run ended, by the end of its events; empty if they do not say."""
    try:
        with (run_dir / EVENTS_FILE).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            event: Any = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict) and event.get("kind") in _LAST_WORDS:  # pyright: ignore[reportUnknownMemberType] - JSON
            return str(event.get("text", ""))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType] - JSON
    return ""
