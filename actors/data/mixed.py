"""Several sources by name, and how the data of a run is opened, one source or several.

Knows datasets. Must not know which source comes next: that is chosen when a prompt is drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ...core.config import RunConfig
from ...core.errors import DataError
from ...core.samples import Prompt
from .prompts import PromptDataset, open_held_out, open_prompts, open_source


class MixedDataset:
    """Training prompts of several sources, each in its own draw order, and the held-out ones."""

    def __init__(self, by_name: Mapping[str, PromptDataset], weights: Mapping[str, float]) -> None:
        """All of them share the held-out rows. `weights`: of each, as the run file says."""
        self._by_name = dict(sorted(by_name.items()))
        self._weights = dict(weights)
        told = " ".join(f"{name}={source.fingerprint}" for name, source in self._by_name.items())
        self._fingerprint = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    @property
    def by_name(self) -> Mapping[str, PromptDataset]:
        """In the order of names."""
        return self._by_name

    @property
    def weights(self) -> Mapping[str, float]:
        """Name -> share in proportion to the others'."""
        return self._weights

    @property
    def fingerprint(self) -> str:
        """Equal exactly when every draw from every source gives the same prompt, whatever the weights."""
        return self._fingerprint

    def check_batch(self, batch_size: int) -> None:
        """Raise DataError if all passes of all sources that have a weight are less than one batch."""
        counts = [source.num_draws for name, source in self._by_name.items() if self._weights[name]]
        known = [count for count in counts if count is not None]
        if len(known) == len(counts) and sum(known) < batch_size:
            raise DataError(
                f"data.sources: all passes over {len(counts)} sources are {sum(known)} prompts, fewer than one batch, "
                f"algo.batch_size = {batch_size}",
                remedy="lower algo.batch_size, or raise max_passes of the sources (0 = endless)",
            )

    def eval_prompts(self, limit: int) -> tuple[Prompt, ...]:
        """The first held-out prompts, which are of no source."""
        return next(iter(self._by_name.values())).eval_prompts(limit)


def open_data(config: RunConfig) -> PromptDataset | MixedDataset:
    """Open and check all data of a run. Raises ConfigError for files that are not there, DataError for bad rows."""
    sources = config.data.sources
    if not sources:
        return open_prompts(config)
    held_out = open_held_out(config)
    by_name = {name: open_source(config, name, held_out) for name in sources}
    return MixedDataset(by_name, {name: source.weight for name, source in sources.items()})
