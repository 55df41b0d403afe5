"""Several sources by name, and how the data of a run is opened, one source or several.

Knows datasets. Must not know which source comes next: that is chosen when a prompt is drawn.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping

from ...core.config import RunConfig
from ...core.errors import DataError
from ...core.samples import Prompt
from .held_out import HeldOutSets, open_held_out
from .overlong import limit_of
from .prompts import PromptDataset, open_prompts, open_source
from .row_set import SHOWN_BAD_ROWS

_log = logging.getLogger(__name__)


class MixedDataset:
    """Training prompts of several sources, each in its own draw order, and the held-out ones."""

    def __init__(
        self, by_name: Mapping[str, PromptDataset], weights: Mapping[str, float], held_out: HeldOutSets
    ) -> None:
        """`weights`: of each, as the run file says. The sources themselves have no held-out rows."""
        self._held_out = held_out
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

    @property
    def num_bad(self) -> int:
        """Rows left out because they are bad."""
        return sum(rows.num_bad for rows in self._parts)

    @property
    def bad_rows(self) -> tuple[str, ...]:
        """What is wrong with the first few of each source."""
        return tuple(text for rows in self._parts for text in rows.bad_rows)

    @property
    def _parts(self) -> tuple[PromptDataset | HeldOutSets, ...]:
        return (*self._by_name.values(), self._held_out)

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

    def num_held_out(self, name: str = "") -> int:
        """Held-out rows of a set."""
        return self._held_out.num_rows(name)

    def eval_prompts(self, limit: int, name: str = "") -> tuple[Prompt, ...]:
        """The first held-out prompts, which are of no source."""
        return self._held_out.prompts(limit, name)


def open_data(config: RunConfig) -> PromptDataset | MixedDataset:
    """Open and check all data of a run; bad rows that are skipped are told in the log. Raises ConfigError for files
    that are not there, DataError for bad rows."""
    found = _opened(config)
    if found.num_bad:
        _log.warning(
            "%d bad rows are left out; the first: %s", found.num_bad, "; ".join(found.bad_rows[:SHOWN_BAD_ROWS])
        )
    return found


def _opened(config: RunConfig) -> PromptDataset | MixedDataset:
    sources = config.data.sources
    if not sources:
        return open_prompts(config)
    limit = limit_of(config)
    by_name = {name: open_source(config, name, limit) for name in sources}
    weights = {name: source.weight for name, source in sources.items()}
    return MixedDataset(by_name, weights, open_held_out(config, limit))
