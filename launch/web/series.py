"""Curves of bounded size, whatever the length of the run: neighbours are merged when there is no room left. Pure.

Knows numbers. Must not know metrics or pages. A library of sketches was considered: means with their extremes, in
order, are all that a plot 600 pixels wide can show.
"""

from __future__ import annotations

from collections.abc import Mapping

Bucket = tuple[float, float, float, float]
"""x (of its last point), mean, lowest, highest."""


class Series:
    """y over x, where x mostly grows. A point before the newest one rewinds: what it repeats is forgotten."""

    def __init__(self, limit: int = 400) -> None:
        self._limit = limit
        self._per_bucket = 1
        self._buckets: list[list[float]] = []
        """[x, sum, count, lowest, highest]"""

    def put(self, x: float, y: float) -> None:
        """One point."""
        while self._buckets and self._buckets[-1][0] > x:
            self._buckets.pop()
        last = self._buckets[-1] if self._buckets else None
        if last is not None and (
            last[2] < self._per_bucket or last[0] == x
        ):  # several readings of one step are averaged
            last[:] = [x, last[1] + y, last[2] + 1, min(last[3], y), max(last[4], y)]
            return
        self._buckets.append([x, y, 1.0, y, y])
        if len(self._buckets) > self._limit:
            self._merge()

    def _merge(self) -> None:
        self._per_bucket *= 2
        pairs = [self._buckets[index : index + 2] for index in range(0, len(self._buckets), 2)]
        self._buckets = [
            [
                pair[-1][0],
                sum(bucket[1] for bucket in pair),
                sum(bucket[2] for bucket in pair),
                min(bucket[3] for bucket in pair),
                max(bucket[4] for bucket in pair),
            ]
            for pair in pairs
        ]

    def points(self) -> list[Bucket]:
        """In order of x."""
        return [(x, total / count, low, high) for x, total, count, low, high in self._buckets]


class TimeBins:
    """Gauges of several sources over wall time, summed: of each source its mean in the bin."""

    def __init__(self, limit: int = 240, width_s: float = 1.0) -> None:
        self._limit = limit
        self.width_s = width_s
        self._start_s: float | None = None
        self._bins: dict[int, dict[str, tuple[float, int]]] = {}

    def put(self, wall_s: float, source: str, value: float) -> None:
        """One reading."""
        if self._start_s is None:
            self._start_s = wall_s
        index = max(0, int((wall_s - self._start_s) / self.width_s))
        while index >= self._limit:
            self._widen()
            index //= 2
        total, count = self._bins.setdefault(index, {}).get(source, (0.0, 0))
        self._bins[index][source] = (total + value, count + 1)

    def _widen(self) -> None:
        self.width_s *= 2
        wider: dict[int, dict[str, tuple[float, int]]] = {}
        for index, sources in self._bins.items():
            into = wider.setdefault(index // 2, {})
            for source, (total, count) in sources.items():
                before = into.get(source, (0.0, 0))
                into[source] = (before[0] + total, before[1] + count)
        self._bins = wider

    def points(self) -> list[Bucket]:
        """Wall time of the middle of each bin that heard anything, and the sum; a silent source adds nothing."""
        start_s = self._start_s or 0.0
        sums = {index: sum(total / count for total, count in bins.values()) for index, bins in self._bins.items()}
        return [
            (start_s + (index + 0.5) * self.width_s, sums[index], sums[index], sums[index]) for index in sorted(sums)
        ]


class ShareBins:
    """How one actor's time was shared over wall time, from readings of cumulative seconds by kind."""

    def __init__(self, limit: int = 120, width_s: float = 2.0) -> None:
        self._limit = limit
        self.width_s = width_s
        self._start_s: float | None = None
        self._bins: dict[int, dict[str, float]] = {}
        self._last: tuple[float, Mapping[str, float]] | None = None

    def put(self, wall_s: float, totals: Mapping[str, float]) -> None:
        """A reading: seconds by kind since the actor began. A sum that fell means that it began anew."""
        last, self._last = self._last, (wall_s, dict(totals))
        if last is not None and wall_s < last[0]:
            self._last = last
            return
        if last is None or sum(totals.values()) < sum(last[1].values()):
            spent = dict(totals)
            before_s = max(wall_s - sum(totals.values()), last[0] if last else float("-inf"))
        else:
            spent = {kind: max(0.0, seconds - last[1].get(kind, 0.0)) for kind, seconds in totals.items()}
            before_s = last[0]
        self._spread(before_s, wall_s, spent)

    def _spread(self, begin_s: float, end_s: float, spent: Mapping[str, float]) -> None:
        if self._start_s is None:
            self._start_s = begin_s
        if end_s <= begin_s:
            return
        while int((end_s - self._start_s) / self.width_s) >= self._limit:
            self._widen()
        first = max(0, int((begin_s - self._start_s) / self.width_s))
        for index in range(first, int((end_s - self._start_s) / self.width_s) + 1):
            left_s = self._start_s + index * self.width_s
            part = (min(end_s, left_s + self.width_s) - max(begin_s, left_s)) / (end_s - begin_s)
            into = self._bins.setdefault(index, {})
            for kind, seconds in spent.items():
                into[kind] = into.get(kind, 0.0) + seconds * max(0.0, part)

    def _widen(self) -> None:
        self.width_s *= 2
        wider: dict[int, dict[str, float]] = {}
        for index, kinds in self._bins.items():
            into = wider.setdefault(index // 2, {})
            for kind, seconds in kinds.items():
                into[kind] = into.get(kind, 0.0) + seconds
        self._bins = wider

    def total(self) -> dict[str, float]:
        """Share of all the time that was told, by kind."""
        sums: dict[str, float] = {}
        for kinds in self._bins.values():
            for kind, seconds in kinds.items():
                sums[kind] = sums.get(kind, 0.0) + seconds
        whole = sum(sums.values())
        return {kind: seconds / whole for kind, seconds in sums.items()} if whole > 0 else {}

    def shares(self) -> list[tuple[float, dict[str, float]]]:
        """(wall time of the left edge, kind -> share) of each bin in which time was spent."""
        start_s = self._start_s or 0.0
        found: list[tuple[float, dict[str, float]]] = []
        for index in sorted(self._bins):
            total = sum(self._bins[index].values())
            if total > 0:
                shares = {kind: seconds / total for kind, seconds in self._bins[index].items()}
                found.append((start_s + index * self.width_s, shares))
        return found
