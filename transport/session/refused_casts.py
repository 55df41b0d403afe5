"""What is known of casts after they left: nobody waits for them, but their callee may have refused them.

The refusal comes late and says that the callee's mailbox is full; then the next casts to it are refused here for a
moment, so that the sender hears of it at all. Sans-IO.
"""

from __future__ import annotations

from collections import OrderedDict

from ...core.errors import Overloaded

MAX_RECENT = 1024


class RefusedCasts:
    """Of all callees of a process."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, str] = OrderedDict()
        self._refused_until: dict[str, float] = {}
        self.num_refused = 0

    def check(self, target: str, now: float) -> None:
        """Raises Overloaded if `target` refused a cast a moment ago."""
        left_s = self._refused_until.get(target, 0.0) - now
        if left_s > 0:
            raise Overloaded(f"{target} refused a cast a moment ago: its mailbox is full", retry_after_s=left_s)

    def sent(self, corr: int, target: str) -> None:
        """A cast is on its way."""
        self._recent[corr] = target
        if len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def target_of(self, corr: int) -> str | None:
        """Whose refusal it is that came with that number, once; None: of no cast that is remembered."""
        return self._recent.pop(corr, None)

    def refused(self, target: str, error: Exception, now: float) -> None:
        """That cast was not executed."""
        self.num_refused += 1
        if isinstance(error, Overloaded):
            self._refused_until[target] = now + error.retry_after_s
