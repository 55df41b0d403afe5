"""What there is of a group that runs, at any moment: for whoever must go on with it elsewhere."""

from __future__ import annotations

from ...core.samples import Sample
from ..workflows.episode import Episode


class GroupSoFar:
    """See the module's head."""

    def __init__(self, recorded: dict[int, Sample]) -> None:
        """`recorded`: index -> what an earlier attempt left."""
        self._recorded = recorded
        self._episodes: dict[int, Episode] = {}
        self._finished: dict[int, Sample] = {}

    def begun(self, index: int, episode: Episode) -> None:
        """That member is in the making."""
        self._episodes[index] = episode

    def finished(self, sample: Sample) -> None:
        """That member is whole."""
        self._finished[sample.index] = sample

    def samples(self) -> tuple[Sample, ...]:
        """Members with at least one token, finished or not."""
        known = self._recorded | {i: e.so_far() for i, e in self._episodes.items()} | self._finished
        return tuple(known[index] for index in sorted(known) if known[index].response_ids.size)
