"""What other programs call the keys of the run file: `peers.table`. `myxa migrate` reads their arguments by it, and the
loader knows their names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

Peer = Literal["slime", "verl"]
ALL_PEERS = ("others", "slime", "verl")


class PeerRow(NamedTuple):
    """One line of the table."""

    only_if: str
    names: tuple[str, ...]
    key: str
    how: str
    defaults: tuple[str, ...]
    remark: str


def lines_of(peer: str) -> list[str]:
    """The table's lines about that program."""
    text = Path(__file__).with_name("peers.table").read_text("utf-8")
    return text.partition(f"[{peer}]\n")[2].partition("\n[")[0].strip().splitlines()


def rows(peer: str) -> Iterator[PeerRow]:
    for line in lines_of(peer):
        names, key, how, defaults, remark = (cell.strip() for cell in line.split("|", 4))
        only_if, _, names = names.rpartition("? ")
        yield PeerRow(only_if, tuple(names.split()), key, how, tuple(defaults.split()), remark)


@cache
def names_elsewhere() -> dict[str, list[str]]:
    """The last part of another program's name of a key -> the keys that it may be, and what to know of each."""
    keys: dict[str, list[str]] = {}
    for row in (row for peer in ALL_PEERS for row in rows(peer)):
        for name in row.names if row.key and "*" not in row.key else ():
            remark = f" ({row.remark})" if row.remark and row.how in ("hand", "value") else ""
            keys.setdefault(name.rpartition(".")[2].replace("-", "_"), []).append(f"{row.key}{remark}")
    return keys
