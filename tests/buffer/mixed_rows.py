"""Several sources of numbered rows in file order, and a cursor over them with its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from myxa.actors.buffer.cursor import PromptCursor
from myxa.actors.data.prompts import RowOrder
from myxa.actors.ledger.ledger import Ledger
from myxa.actors.ledger.states import Row
from myxa.core.samples import Message, Prompt


@dataclass
class NamedRows:
    """`num_rows` rows, gone through `max_passes` times (0: for ever)."""

    name: str
    num_rows: int
    max_passes: int = 0

    def __len__(self) -> int:
        return self.num_rows

    @property
    def fingerprint(self) -> str:
        return f"{self.name}-{self.num_rows}"

    def row_of(self, draw: int) -> int | None:
        return None if self.max_passes and draw >= self.num_rows * self.max_passes else draw % self.num_rows

    def prompt(self, draw: int) -> Prompt | None:
        row = self.row_of(draw)
        if row is None:
            return None
        words = (Message(role="user", content=f"{self.name} {row}"),)
        return Prompt(
            group_id=draw,
            row=row,
            pass_index=draw // self.num_rows,
            messages=words,
            source=self.name,
            source_name=self.name,
        )

    def num_held_out(self, name: str = "") -> int:
        return 0

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return ()


@dataclass
class ShuffledRows(NamedRows):
    """Every pass in an order of its own."""

    seed: int = 0

    def row_of(self, draw: int) -> int | None:
        if super().row_of(draw) is None:
            return None
        return RowOrder(self.num_rows, self.seed, is_shuffled=True).row(*divmod(draw, self.num_rows))


@dataclass
class MixedRows:
    """Sources by name."""

    by_name: Mapping[str, NamedRows]
    weights: Mapping[str, float]
    fingerprint: str = "mixed"

    def num_held_out(self, name: str = "") -> int:
        return 0

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return ()


def mixed(**sizes: int | tuple[int, int]) -> MixedRows:
    """Sources of so many rows (and passes), all of one weight."""
    found = {name: size if isinstance(size, tuple) else (size, 0) for name, size in sorted(sizes.items())}
    return MixedRows({name: NamedRows(name, *size) for name, size in found.items()}, dict.fromkeys(found, 1.0))


@dataclass
class Desk:
    """A cursor and its ledger, as a buffer has them."""

    path: Path
    source: MixedRows | NamedRows
    told: dict[int, Prompt] = field(default_factory=dict)
    """Group -> the prompt that it was given out with."""

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.path, run="r", fingerprint=self.source.fingerprint, wall=lambda: 0.0)
        self.cursor = PromptCursor(self.source, self.ledger)

    def restart(self) -> None:
        self.ledger.close()
        self.open()

    def draw(self, num_groups: int) -> list[Row]:
        """As one draw of a rollout actor does it, and as often as it has to be asked."""
        given: list[Row] = []
        while True:
            draft = self.cursor.draft(2)
            while len(given) < num_groups and (row := draft.next()) is not None:
                given.append(row)
            self.ledger.dispatch(draft.rows, stretch=draft.stretch)
            self.told |= draft.prompts
            if not self.cursor.is_searching:
                return given

    def finish(self, row: Row, reward: float, *, is_kept: bool = True) -> None:
        if is_kept:
            self.ledger.finish(row.group_id, b"whole", version=0, num_tokens=1, reward=reward)
        else:
            self.ledger.refuse(row.group_id, "zero_variance", detail="", num_tokens=1, reward=reward)
        self.cursor.finished(row, reward)
