"""What there is of a group that runs, at any moment: for whoever must go on with it elsewhere."""

from __future__ import annotations

from typing import Protocol

from ...core.samples import Sample


class HasTokens(Protocol):
    """An episode, wherever it runs."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of it."""
        ...

    def so_far(self) -> Sample:
        """The record of everything so far."""
        ...


class GroupSoFar:
    """See the module's head."""

    def __init__(self, recorded: dict[int, Sample]) -> None:
        """`recorded`: index -> what an earlier attempt left."""
        self._recorded = recorded
        self._episodes: dict[int, HasTokens] = {}
        self._finished: dict[int, Sample] = {}

    def begun(self, index: int, episode: HasTokens) -> None:
        """That member is in the making."""
        self._episodes[index] = episode

    def finished(self, sample: Sample) -> None:
        """That member is whole."""
        self._finished[sample.index] = sample

    def again(self, index: int) -> None:
        """That member begins anew: what it has is of no use."""
        self._recorded.pop(index, None)
        self._episodes.pop(index, None)

    def of(self, index: int) -> Sample | None:
        """What there is of an unfinished member; None: nothing."""
        episode = self._episodes.get(index)
        return None if episode is None or episode.is_empty else episode.so_far()

    def samples(self) -> tuple[Sample, ...]:
        """Members with at least one token, finished or not."""
        begun = {i: e.so_far() for i, e in self._episodes.items() if not e.is_empty}
        known = self._recorded | begun | self._finished
        return tuple(known[index] for index in sorted(known) if known[index].response_ids.size)
