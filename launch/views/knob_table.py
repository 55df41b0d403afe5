"""Live knobs as tables: the reference table of `docs/knobs.md`, and the rows that screens show of a run's knobs. Pure.

The reference table is made from the declarations, so that page and code agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...actors.buffer.knobs import BufferLimits, buffer_tunables
from ...actors.coordinator.knobs import COORDINATOR_TUNABLES
from ...actors.knobs import process as process_knobs
from ...actors.rollout import knobs as rollout_knobs
from ...actors.trainer import knobs as trainer_knobs
from ...algos.filters import GROUP_FILTERS
from ...core.errors import ConfigError
from ...core.knobs import NUMBERED, ChangeReply, KnobState, KnobTable, KnobValue, Tunable
from .changes import value_text
from .numbers import clean, name_order

BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = ("| knob | unit | range | boundary | owner | run file | what it does |", "|---|---|---|---|---|---|---|")


def declared() -> tuple[Tunable, ...]:
    """All knobs that the product has: trainer, buffer, rollout actors, coordinator, every process."""
    return (
        *trainer_knobs.TUNABLES,
        *buffer_tunables(tuple(GROUP_FILTERS), BufferLimits(), sources=("math", "code")),
        *rollout_knobs.TUNABLES,
        *COORDINATOR_TUNABLES,
        *process_knobs.TUNABLES,
    )


def render_table(tunables: Iterable[Tunable] | None = None) -> str:
    """The table as Markdown, one knob a row."""
    rows = (_row(tunable) for tunable in (declared() if tunables is None else tunables))
    return "\n".join([*HEAD, *rows]) + "\n"


def renewed(page: str) -> str:
    """The page with the table as it is now. Raises ConfigError for one without the two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError("the page has no place for the table", remedy=f"write {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}{render_table()}{END}{after}"


def _row(tunable: Tunable) -> str:
    guard = f"; above {tunable.guard_factor:g} times the file's only by `--force`" if tunable.guard_factor else ""
    kind = "whole number " if tunable.kind == "int" else ""
    cells = (
        f"`{tunable.name}`",
        tunable.unit,
        f"{kind}{tunable.range_text()}{guard}",
        f"`{tunable.boundary}`",
        f"`{tunable.owner}`",
        f"`{tunable.key}`" if tunable.key else "",
        tunable.help,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


@dataclass(frozen=True, slots=True)
class KnobRow:
    """One knob, over all of its owners."""

    tunable: Tunable
    owners: tuple[str, ...]
    values: tuple[KnobValue, ...]
    """In force, by owner."""
    first: KnobValue
    pending: KnobValue | None
    reverts: str = ""
    """When it goes back by itself."""

    @property
    def name(self) -> str:
        return self.tunable.name

    @property
    def value(self) -> str:
        if len(set(self.values)) <= 1:
            return value_text(self.values[0])
        return ", ".join(
            f"{value_text(value)} ({owner})" for owner, value in zip(self.owners, self.values, strict=True)
        )

    @property
    def is_changed(self) -> bool:
        return any(value != self.first for value in self.values)

    def cells(self) -> tuple[str, ...]:
        waiting = f" -> {value_text(self.pending)}" if self.pending is not None else ""
        unit = f" {self.tunable.unit}" if self.tunable.unit else ""
        back = f" (goes back {self.reverts})" if self.reverts else ""
        return (
            f"{'*' if self.is_changed else ' '}{self.name}",
            clean(self.value + unit + waiting + back),
            self.tunable.range_text(),
            self.tunable.boundary,
            owners_text(self.owners),
            value_text(self.first),
            clean(self.tunable.help),
        )


KNOB_COLUMNS = (" knob", "value", "takes", "at next", "owner", "run file", "what it does")


def knob_rows(table: KnobTable | None) -> list[KnobRow]:
    """Every knob once, by owner's role and name. Owners' own knobs come before those that every process has."""
    if table is None:
        return []
    held: dict[str, list[tuple[str, KnobState]]] = {}
    for sheet in table.sheets:
        for state in sheet.knobs:
            held.setdefault(state.tunable.name, []).append((sheet.owner, state))
    rows = [_knob_row(name, holders, table.reverts.get(name, "")) for name, holders in held.items()]
    return sorted(rows, key=lambda row: (row.tunable.owner == "process", name_order(row.tunable.owner), row.name))


def _knob_row(name: str, holders: Sequence[tuple[str, KnobState]], reverts: str) -> KnobRow:
    state = holders[0][1]
    pending = next((held.pending for _, held in holders if held.pending is not None), None)
    owners = tuple(owner for owner, _ in holders)
    return KnobRow(state.tunable, owners, tuple(held.value for _, held in holders), state.first, pending, reverts)


def owners_text(owners: Sequence[str]) -> str:
    """`trainer/0`, or `rollout/* (4)` for many of a role, or `7 actors`."""
    if len(owners) == 1:
        return owners[0]
    roles = {owner.partition("/")[0] for owner in owners}
    return f"{roles.pop()}/* ({len(owners)})" if len(roles) == 1 else f"{len(owners)} actors"


def parsed_value(tunable: Tunable, text: str) -> KnobValue:
    """What a person typed, in the knob's own type; limits are the server's to check. Raises ConfigError."""
    text = text.strip()
    if tunable.kind in ("text", "choice"):
        return text
    words: Mapping[str, KnobValue] = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
    if tunable.kind == "bool":
        if text.lower() not in words:
            raise ConfigError(f"{tunable.name} = {text!r}: must be true or false")
        return words[text.lower()]
    try:
        return int(text) if tunable.kind == "int" else float(text)
    except ValueError:
        wanted = "a whole number" if tunable.kind == "int" else "a number"
        raise ConfigError(f"{tunable.name} = {text!r}: must be {wanted}", remedy=tunable.range_text()) from None


def reply_text(reply: ChangeReply) -> str:
    if reply.refused:
        return f"refused: {clean(reply.refused)}"
    moves = ", ".join(
        f"{move.name} {value_text(move.old)} -> {value_text(move.new)} ({move.owner})" for move in reply.moves[:3]
    )
    more = f" and {len(reply.moves) - 3} more" if len(reply.moves) > 3 else ""
    numbered = any(move.boundary in NUMBERED for move in reply.moves)
    place = f", in force from step {reply.at} on" if numbered else ", in force"
    warned = "".join(f"; {clean(warning)}" for warning in reply.warnings)
    return f"change {reply.epoch}: {clean(moves)}{more}{place}{warned}" if reply.moves else f"nothing to change{warned}"
