"""Several sources of numbered rows in file order, and a cursor over them with its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.buffer.conftest import NumberedRows

from myxa.actors.buffer.cursor import PromptCursor, Quarantine, Sources
from myxa.actors.data.prompts import RowOrder
from myxa.actors.ledger.file import Row
from myxa.actors.ledger.ledger import Ledger
from myxa.core.samples import Prompt


@dataclass
class ShuffledRows(NumberedRows):
    seed: int = 0

    def row_of(self, draw: int) -> int | None:
        if super().row_of(draw) is None:
            return None
        return RowOrder(self.num_rows, self.seed, is_shuffled=True).row(*divmod(draw, self.num_rows))


@dataclass
class MixedRows:
    by_name: Mapping[str, NumberedRows]
    weights: Mapping[str, float]
    fingerprint: str = "mixed"

    def num_held_out(self, name: str = "") -> int:
        return 0

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        return ()


def mixed(**sizes: int | tuple[int, int]) -> MixedRows:
    """Sources of so many rows (and passes), all of one weight."""
    found = {name: size if isinstance(size, tuple) else (size, 0) for name, size in sorted(sizes.items())}
    return MixedRows({name: NumberedRows(*size, name) for name, size in found.items()}, dict.fromkeys(found, 1.0))


@dataclass
class Desk:
    path: Path
    source: MixedRows | NumberedRows
    told: dict[int, Prompt] = field(default_factory=dict)
    """Group -> the prompt that it was given out with."""
    news: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.path, run="r", fingerprint=self.source.fingerprint, wall=lambda: 0.0)
        sources = Sources(self.source)
        quarantine = Quarantine(sources, self.ledger, 0, self._tell)
        self.cursor = PromptCursor(sources, self.ledger, quarantine, self._tell)

    def _tell(self, kind: str, text: str) -> None:
        self.news.append((kind, text))

    def take_news(self) -> list[tuple[str, str]]:
        news, self.news = self.news, []
        return news

    def restart(self) -> None:
        self.ledger.close()
        self.open()

    def draw(self, num_groups: int) -> list[Row]:
        """As one draw of a rollout actor does it, and as often as it has to be asked."""
        given: list[Row] = []
        while True:
            while len(given) < num_groups and (drawn := self.cursor.draw(2)) is not None:
                given.append(drawn[0])
                self.told[drawn[0].group_id] = drawn[1]
            if not self.cursor.is_searching:
                return given

    def finish(self, row: Row, reward: float, *, is_kept: bool = True) -> None:
        if is_kept:
            self.ledger.finish(row.group_id, b"whole", version=0, num_tokens=1, reward=reward)
        else:
            self.ledger.refuse(row.group_id, "zero_variance", detail="", num_tokens=1, reward=reward)
        self.cursor.note_reward(row, reward)
