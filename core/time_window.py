"""Seconds per key over the last stretch of time, in buckets: fixed memory whatever the rate of changes.

Knows numbers and keys. Must not know clocks: times are passed in and arrive in order.
"""

from __future__ import annotations

import math
from collections import deque


class TimeWindow:
    """Seconds per key over the last `window_s`."""

    def __init__(self, window_s: float, bucket_s: float) -> None:
        self._bucket_s = bucket_s
        self._num_buckets = max(1, round(window_s / bucket_s))
        self._buckets: deque[tuple[int, dict[str, float]]] = deque()

    def add(self, key: str, start_s: float, end_s: float) -> None:
        """Book the stretch [start_s, end_s); stretches arrive in order of time."""
        last = math.floor(end_s / self._bucket_s)
        start_s = max(start_s, (last - self._num_buckets + 1) * self._bucket_s)
        while start_s < end_s:
            index = math.floor(start_s / self._bucket_s)
            stop_s = min(end_s, (index + 1) * self._bucket_s)
            if stop_s <= start_s:  # the bucket's edge is not representable: do not spin on it
                stop_s = end_s
            self._book(index, key, stop_s - start_s)
            start_s = stop_s
        self._forget(last)

    def sums(self) -> dict[str, float]:
        """Seconds per key inside the window."""
        total: dict[str, float] = {}
        for _, bucket in self._buckets:
            for key, seconds in bucket.items():
                total[key] = total.get(key, 0.0) + seconds
        return total

    def _book(self, index: int, key: str, seconds: float) -> None:
        if not self._buckets or self._buckets[-1][0] < index:
            self._buckets.append((index, {}))
        bucket = self._buckets[-1][1]
        bucket[key] = bucket.get(key, 0.0) + seconds

    def _forget(self, last: int) -> None:
        while self._buckets and self._buckets[0][0] <= last - self._num_buckets:
            self._buckets.popleft()
