"""Ledgers with finished groups, written and read as a test needs it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from myxa.actors.ledger.file import COLUMNS, WHOLE, Row, decode_group, encode, row_of
from myxa.actors.ledger.ledger import Ledger
from myxa.core.samples import Group


def whole_groups(path: Path) -> Iterator[tuple[Row, Group]]:
    """Finished groups with their tokens, in the order of training; of a live run too."""
    columns = ", ".join(f"g.{name}" for name in COLUMNS)
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        for data, *values in db.execute(f"SELECT p.data, {columns} {WHOLE}"):
            row = row_of(values)
            yield row, decode_group(row.group_id, data)


def write_groups(path: Path, groups: Iterable[Group], step_of: Callable[[int], int] = lambda number: 0) -> str:
    """The ledger of a run "first" that was trained on all of them. Steps begin at 0."""
    ledger, steps = Ledger(path, run="first", fingerprint="", wall=lambda: 0.0), dict[int, list[int]]()
    for number, group in enumerate(groups):
        ledger.dispatch([Row(number, number, -1, len(group.samples), rollout="rollout/0", epoch=1, version=0)])
        ledger.finish(number, encode(group), version=group.oldest_version(), num_tokens=1)
        steps.setdefault(step_of(number), []).append(number)
    for step, numbers in sorted(steps.items()):
        ledger.claim(step, numbers)
        ledger.trained(step)
    ledger.close()
    return str(path)
