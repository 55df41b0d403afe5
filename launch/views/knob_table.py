"""The knobs of a run as screens show them, and what a person types as a value. Pure."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import ConfigError
from ...core.knobs import ChangeReply, KnobMove, KnobState, KnobTable, KnobValue, Tunable
from .changes import value_text
from .numbers import clean, name_order


@dataclass(frozen=True, slots=True)
class KnobRow:
    """One knob, over all of its owners."""

    state: KnobState
    """At its first owner, or one that has a value to come; all have the same one, but for a moment."""
    owners: tuple[str, ...]
    reverts: str = ""
    """When it goes back by itself."""

    @property
    def tunable(self) -> Tunable:
        return self.state.tunable

    @property
    def name(self) -> str:
        return self.tunable.name

    @property
    def value(self) -> str:
        return value_text(self.state.value)

    @property
    def is_changed(self) -> bool:
        return self.state.value != self.state.first

    def cells(self) -> tuple[str, ...]:
        notes = [f"file: {value_text(self.state.first)}"] if self.is_changed else []
        notes += [f"will be {value_text(self.state.pending)}"] if self.state.pending is not None else []
        notes += [f"back {self.reverts}"] if self.reverts else []
        knob = self.tunable
        return (self.name, clean(self.value), knob.unit, knob.range_text(), knob.boundary, owners_text(self.owners),
                clean("; ".join(notes)))  # fmt: skip


KNOB_COLUMNS = ("knob", "value", "unit", "range", "at", "owner", "note")


def knob_rows(table: KnobTable | None) -> list[KnobRow]:
    """Every knob once, by owner's role and name."""
    if table is None:
        return []
    held: dict[str, list[tuple[str, KnobState]]] = {}
    for sheet in table.sheets:
        for state in sheet.knobs:
            held.setdefault(state.tunable.name, []).append((sheet.owner, state))
    rows: list[KnobRow] = []
    for name, holders in held.items():
        state = next((state for _, state in holders if state.pending is not None), holders[0][1])
        rows.append(KnobRow(state, tuple(owner for owner, _ in holders), table.reverts.get(name, "")))
    return sorted(rows, key=lambda row: (name_order(row.tunable.owner), row.name))


def owners_text(owners: Sequence[str]) -> str:
    """`trainer/0`, or `rollout/* (4)` for many of a role, or `7 actors`."""
    if len(owners) == 1:
        return owners[0]
    roles = {owner.partition("/")[0] for owner in owners}
    return f"{roles.pop()}/* ({len(owners)})" if len(roles) == 1 else f"{len(owners)} actors"


_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/*,-]*|\d+,(\d+,)*\d*")
_WORDS = {"True": "true", "False": "false"}


def read_value(name: str, text: str) -> KnobValue:
    """A TOML value as a person typed it; a bare word is text, for shells eat quotes. Raises ConfigError."""
    try:
        value = tomllib.loads(f"value = {_WORDS.get(text, text)}")["value"]
    except tomllib.TOMLDecodeError as error:
        if _BARE.fullmatch(text):
            return text
        raise ConfigError(f"{name} = {text}: is no TOML value: {error}", remedy='write 1e-4, true or "text"') from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} = {text}: must be finite", remedy=f"`myxa get {name}` shows its range")
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{name} = {text}: knobs are numbers, text, true or false", remedy=f"`myxa get {name}`")
    return value


def reply_text(reply: ChangeReply) -> str:
    if reply.refused:
        return f"refused: {clean(reply.refused)}"
    lines = [
        f"{m.name}  {value_text(m.old)} -> {value_text(m.new)}  {m.owner}, {_when(m, reply.at)}" for m in reply.moves
    ]
    lines += [f"warning: {warning}" for warning in reply.warnings]
    lines.append(f"epoch {reply.epoch}" if reply.epoch else "nothing was changed")
    return "\n".join(map(clean, lines))


def _when(move: KnobMove, at: int) -> str:
    words = {"now": "at once", "request": "from the next request on"}
    return words.get(move.boundary, f"at {move.boundary} {at}")
