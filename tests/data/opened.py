"""Rows in a file, and the data of a run with one source, opened: its training prompts, and all that the dataset says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from myxa.actors.data import open_data
from myxa.core.config import RunConfig
from myxa.core.samples import Prompt


def write_rows(path: Path, *rows: Any) -> str:
    """A row is an object, or the text of a line."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def run_on(train: Any, **sections: Any) -> RunConfig:
    data = {"train": train if isinstance(train, list) else str(train), **sections.pop("data", {})}
    return RunConfig.model_validate({"model": {"path": "m"}, "data": data, **sections})


class Opened:
    """The only source; the dataset where that has more to say."""

    def __init__(self, config: RunConfig) -> None:
        self.data = open_data(config)
        (self.source,) = self.data.by_name.values()

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        for holder in (self.data, self.source, self.source.rows):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(name)


def open_prompts(config: RunConfig) -> Any:
    return Opened(config)


def prompts(dataset: Any, count: int = 0) -> list[Prompt]:
    """The first so many, or those of one pass."""
    return [prompt for draw in range(count or len(dataset)) if (prompt := dataset.prompt(draw)) is not None]
