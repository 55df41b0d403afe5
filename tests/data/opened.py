"""The data of a run with one source, opened: its training prompts, and all that the dataset says."""

from __future__ import annotations

from typing import Any

from myxa.actors.data import open_data
from myxa.core.config import RunConfig


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
