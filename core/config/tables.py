"""Raw TOML tables: typed views of what `tomllib` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

Table = dict[str, Any]
KeyPath = tuple[str, ...]


def as_table(value: object) -> Table | None:
    """The value if it is a table, else None. TOML keys are always text."""
    return cast("Table", value) if isinstance(value, dict) else None


def check_json(table: Table) -> Table:
    """The table, if all that is in it can be written as JSON; raises ValueError naming the first key that cannot: TOML
    has dates, and numbers that are none."""
    for path, value in _leaves(table, ""):
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if not (isinstance(value, str | bool) or value is None or is_number):
            raise ValueError(f"must hold JSON values only, and {path} = {value} is none; write it as text")
    return table


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if (table := as_table(value)) is not None:
        for key, one in table.items():
            yield from _leaves(one, f"{path}.{key}" if path else key)
    elif (array := as_array(value)) is not None:
        for number, one in enumerate(array):
            yield from _leaves(one, f"{path}[{number}]")
    else:
        yield path, value


def as_array(value: object) -> list[Any] | None:
    """The value if it is an array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def table_at(table: Table, path: Sequence[str]) -> Table | None:
    """The table at a path, or None if the way there is not made of tables."""
    level: Table | None = table
    for key in path:
        level = as_table(level.get(key)) if level is not None else None
    return level


def holds(table: Table, path: Sequence[str]) -> bool:
    """Whether there is a value at that path."""
    above = table_at(table, path[:-1])
    return above is not None and path[-1] in above


def table_made_at(table: Table, path: Sequence[str]) -> Table:
    """The table at a path; whatever is in the way is replaced by tables."""
    level = table
    for key in path:
        below = as_table(level.get(key))
        if below is None:
            below = {}
            level[key] = below
        level = below
    return level


def single_path(parsed: Table) -> KeyPath:
    """The keys down a nesting in which every table has one key, through arrays of tables; stops at anything else."""
    path: list[str] = []
    level: object = parsed
    while True:
        array = as_array(level)
        if array:
            level = array[0]
            continue
        table = as_table(level)
        if table is None or len(table) != 1:
            return tuple(path)
        key, level = next(iter(table.items()))
        path.append(key)
