"""The table of all live knobs in `docs/knobs.md`, made from their declarations, so that page and code agree.

Knows declarations only; no run, no actor.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...actors.buffer.knobs import BufferLimits, buffer_tunables
from ...actors.coordinator.knobs import COORDINATOR_TUNABLES
from ...actors.knobs import process as process_knobs
from ...actors.rollout import knobs as rollout_knobs
from ...actors.trainer import knobs as trainer_knobs
from ...algos.filters import GROUP_FILTERS
from ...core.errors import ConfigError
from ...core.knobs import Tunable

BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
HEAD = (
    "| knob | unit | range | boundary | owner | run file | what it does |",
    "|---|---|---|---|---|---|---|",
)


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
