"""Which groups are followed through the trace, hop by hop: all of them while they are few, one in k when they are many.

Every actor decides for itself and still they agree mostly: the stride is a power of two and a group is followed when
the stride divides its number, so whoever samples more coarsely follows a part of what the others follow. An arrow is
drawn only where both of its ends were followed; nothing has to be said between actors.

Knows group numbers and times that are passed in. Must not know telemetry, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Hop = Literal["dispatch", "generate", "reward", "claim", "train"]
"""The stations of a group, in their order."""

_WINDOW_S = 1.0
_MAX_STRIDE = 1 << 20


@dataclass(slots=True)
class _Rate:
    """Of one hop, in the second that runs."""

    began_s: float
    stride: int = 1
    num_seen: int = 0
    num_picked: int = 0


class FlowSampler:
    """Chooses among the groups of one actor; every hop has its own stride."""

    def __init__(self, max_per_s: float = 50.0) -> None:
        """`max_per_s`: groups followed per second and hop, about; in the second in which a burst begins, so many again
        for each doubling of the stride."""
        self._max_per_s = max_per_s
        self._rates: dict[Hop, _Rate] = {}
        self.num_skipped = 0
        """Hops that were not followed."""

    def pick(self, hop: Hop, group_ids: Iterable[int], now_s: float) -> tuple[int, ...]:
        """Those that are followed. Groups without a number of their own (below 0: checks, evaluation) never are."""
        rate = self._rates.setdefault(hop, _Rate(now_s))
        if now_s - rate.began_s >= _WINDOW_S:
            rate = self._rates[hop] = _Rate(now_s, self._stride(rate.num_seen / (now_s - rate.began_s)))
        picked: list[int] = []
        for group_id in group_ids:
            if group_id < 0:
                continue
            rate.num_seen += 1
            if group_id % rate.stride:
                self.num_skipped += 1
                continue
            picked.append(group_id)
            rate.num_picked += 1
            if rate.num_picked >= self._max_per_s * _WINDOW_S:
                rate.stride, rate.num_picked = min(2 * rate.stride, _MAX_STRIDE), 0
        return tuple(picked)

    def _stride(self, per_s: float) -> int:
        """The finest at which that many groups a second stay within the rate."""
        stride = 1
        while per_s / stride > self._max_per_s and stride < _MAX_STRIDE:
            stride *= 2
        return stride
