"""Groups in a row that gave nothing to train on: when a person must hear of it, and when going on is hopeless.

A run whose groups are all left out would otherwise generate for ever and look as if it only were slow. It is not
stopped: a model may yet learn to solve a task, and filters are there to filter. Prompts that cannot be used at all are
another matter: nothing that training does makes them shorter. Pure: no clock, no IO.
"""

from __future__ import annotations

from collections import Counter

from ...core.errors import DataError

NUM_BATCHES = 20
"""So many batches' worth of groups in a row are told."""
UNUSABLE = "prompt-too-long"
REMEDIES = {
    "zero_variance": "all samples of each group got the same reward: the task is too hard or too easy, or the reward "
    "is constant",
}
OTHER_REMEDY = "the events of kind group-dropped, the ledger and the actors' logs say more"
_MAX_REASONS = 8


class Drought:
    """Counts groups from the last one that could be used on."""

    def __init__(self, batch_size: int) -> None:
        self._limit = NUM_BATCHES * batch_size
        self._reasons: Counter[str] = Counter()
        self._last_detail = ""
        self._tell_at = self._limit

    def kept(self) -> None:
        """A group is ready to be trained on."""
        self._reasons.clear()
        self._tell_at = self._limit

    def left_out(self, reason: str, detail: str = "") -> None:
        """A group was filtered or dropped."""
        is_known = reason in self._reasons or len(self._reasons) < _MAX_REASONS
        self._reasons[reason if is_known else "other"] += 1
        self._last_detail = detail

    @property
    def complaint(self) -> str:
        """Empty, or what a person should know now."""
        num = self._reasons.total()
        if num < self._limit:
            return ""
        counts = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        remedy = REMEDIES.get(self._reasons.most_common(1)[0][0], OTHER_REMEDY)
        return f"the last {num} groups in a row were all left out ({counts}) -- {remedy}"

    def news(self) -> str:
        """The complaint when it is due: first at the limit, then whenever the number has doubled; else nothing."""
        if self._reasons.total() < self._tell_at:
            return ""
        self._tell_at = 2 * self._reasons.total()
        return self.complaint

    @property
    def verdict(self) -> DataError | None:
        """Why going on is hopeless, if it is."""
        num = self._reasons.total()
        if num < self._limit or set(self._reasons) != {UNUSABLE}:
            return None
        return DataError(f"none of the last {num} prompts could be used; the last one: {self._last_detail}")
