"""Suggestions of a run: what is proposed now, what is pinned, what was forbidden.

    propose   the verdict's advice becomes proposals with names; the same proposal has the same name at any time
    pin       a knob that only a person turns: it is not proposed, and the autopilot does not touch it
    forbid    this proposal never again: that knob not to that value, or further in that direction

`SuggestionBook` keeps what a person decided in `suggestions.json`; nothing else is kept. One writer: the launcher of
node 0. `Proposals` keeps what was shown and is not decided yet, in memory, because a caller that may only look asks for
suggestions too. A later look does not remove earlier proposals: a person approves what that person saw.

Knows no sockets and no actors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ...core.errors import ConfigError
from ...core.knobs import KnobValue
from ...core.messages import Record
from ...core.suggestion import suggest
from ..views.advice import Advice

BOOK_FILE = "suggestions.json"


class Suggestion(Advice, frozen=True, kw_only=True):
    """A piece of advice under a name."""

    id: str
    """"s" and six hexadecimal digits, of what is proposed."""


class Forbidden(Record, frozen=True):
    """A proposal that is not to come again."""

    knob: str
    key: str
    old: KnobValue
    new: KnobValue


class BookState(Record, frozen=True):
    """What the file holds."""

    pins: tuple[str, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()


class SuggestionBook:
    """Reads the file when it is made, writes it at each decision. Blocking."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError for a file that is not ours."""
        self._path = run_dir / BOOK_FILE
        self.state = self._read()

    def propose(self, advices: Sequence[Advice]) -> tuple[Suggestion, ...]:
        """The proposals that are open now, best first. Writes nothing: readers ask for them too."""
        return tuple(
            Suggestion(id=_name_of(advice), **msgspec.structs.asdict(advice))
            for advice in advices
            if self.allows(advice)
        )

    def forbid(self, found: Suggestion) -> Suggestion:
        """Never again. Idempotent."""
        rule = Forbidden(knob=found.knob, key=found.key, old=found.old, new=found.new)
        if rule not in self.state.forbidden:
            self._save(msgspec.structs.replace(self.state, forbidden=(*self.state.forbidden, rule)))
        return found

    def allow(self, name: str) -> int:
        """Take back what was forbidden of that knob, or key of the run file; how many rules that were."""
        kept = tuple(rule for rule in self.state.forbidden if name not in (rule.knob, rule.key))
        num = len(self.state.forbidden) - len(kept)
        if not num:
            known = {rule.knob or rule.key for rule in self.state.forbidden}
            raise ConfigError(f"nothing is forbidden of {name[:64]!r}", remedy=suggest(name, known))
        self._save(msgspec.structs.replace(self.state, forbidden=kept))
        return num

    def pin(self, knob: str) -> None:
        """Idempotent."""
        if knob not in self.state.pins:
            self._save(msgspec.structs.replace(self.state, pins=(*self.state.pins, knob)))

    def unpin(self, knob: str) -> None:
        """Raises ConfigError for a knob that is not pinned."""
        if knob not in self.state.pins:
            raise ConfigError(f"{knob[:64]!r} is not pinned", remedy=suggest(knob, self.state.pins))
        self._save(msgspec.structs.replace(self.state, pins=tuple(p for p in self.state.pins if p != knob)))

    def allows(self, advice: Advice) -> bool:
        """Whether this may be proposed, or approved, at all."""
        return advice.knob not in self.state.pins and not self._is_forbidden(advice)

    def _is_forbidden(self, advice: Advice) -> bool:
        return any(
            (rule.knob, rule.key) == (advice.knob, advice.key) and _reaches(rule, advice)
            for rule in self.state.forbidden
        )

    def _read(self) -> BookState:
        if not self._path.exists():
            return BookState()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=BookState)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{self._path}: {error}", remedy="move the file away: suggestions then start from none"
            ) from error

    def _save(self, state: BookState) -> None:
        if state == self.state:
            return
        self.state = state
        beside = self._path.with_suffix(".json.new")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        beside.replace(self._path)


def _name_of(advice: Advice) -> str:
    """The same name for the same proposal, in any run and at any time."""
    text = msgspec.json.encode((advice.knob, advice.key, advice.old, advice.new))
    return f"s{hashlib.blake2s(text, digest_size=3).hexdigest()}"


def _reaches(rule: Forbidden, advice: Advice) -> bool:
    """As far as the forbidden value, or further the same way; for what is no number: the same value."""
    numbers = (rule.old, rule.new, advice.old, advice.new)
    if any(isinstance(value, bool | str) for value in numbers):
        return rule.new == advice.new
    old, new, now, wanted = (float(value) for value in numbers)
    return (wanted >= new and wanted > now) if new > old else (wanted <= new and wanted < now)


MAX_KEPT = 256


class Proposals:
    """The newest `MAX_KEPT`."""

    def __init__(self) -> None:
        self._shown: dict[str, Suggestion] = {}

    def show(self, suggestions: Iterable[Suggestion]) -> None:
        """They can be decided about from now on."""
        for suggestion in suggestions:
            self._shown.pop(suggestion.id, None)  # the newest are the last ones
            self._shown[suggestion.id] = suggestion
        for name in list(self._shown)[:-MAX_KEPT]:
            del self._shown[name]

    def find(self, name: str) -> Suggestion:
        """The one of that name. Raises ConfigError if it was not shown."""
        found = self._shown.get(name)
        if found is None:
            known = list(self._shown)
            hint = suggest(name, known) if known else "`myxa suggest` lists what could be turned now"
            raise ConfigError(f"there is no open suggestion {name[:32]!r}", remedy=hint)
        return found

    def close(self, name: str) -> None:
        """It was decided."""
        self._shown.pop(name, None)
