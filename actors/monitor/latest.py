"""The monitor's picture of the run: latest values and time shares.

Memory is bounded: names and sources are capped, whatever the senders do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping

from ...core.activity import ACTIVITY_KINDS
from ...core.actor import MANY_PEERS
from ...core.messages import MetricPoint, Telemetry

TIME_PREFIX = "time/"
LONGEST_WINDOW_S = 600.0
"""Shares can be asked for over so many of the last seconds at most."""

_SPACING_S = 2.0
"""Between two points that are kept, but for the newest."""
_MAX_SOURCES = MANY_PEERS
_MAX_NAMES = 4096


class _TimeShares:
    """Shares from cumulative seconds per kind; survives lost bundles and restarts of the actor."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, Mapping[str, float]]] = deque()

    def put(self, wall_s: float, totals: Mapping[str, float]) -> None:
        if self._recent and _sum(totals) < _sum(self._recent[-1][1]):
            self._recent.clear()  # the meter began again at 0: a new incarnation
        if len(self._recent) > 1 and self._recent[-1][0] < self._recent[-2][0] + _SPACING_S:
            self._recent.pop()
        self._recent.append((wall_s, totals))
        while len(self._recent) > 2 and self._recent[1][0] < wall_s - LONGEST_WINDOW_S:
            self._recent.popleft()

    def recent(self, window_s: float) -> dict[str, float]:
        """Shares over about the last window that was heard of; since the actor's start where that is shorter."""
        if len(self._recent) < 2:
            return _normalised(self._recent[-1][1]) if self._recent else {}
        newest_s, last = self._recent[-1]
        older = [totals for wall_s, totals in self._recent if wall_s <= newest_s - window_s]
        first = older[-1] if older else self._recent[0][1]
        return _normalised({key: seconds - first.get(key, 0.0) for key, seconds in last.items()})


def _sum(totals: Mapping[str, float]) -> float:
    return sum(totals.get(kind, 0.0) for kind in ACTIVITY_KINDS)


def _normalised(seconds: Mapping[str, float]) -> dict[str, float]:
    total = _sum(seconds)
    if total <= 0.0:
        return {}
    return {key: value / total for key, value in seconds.items() if value > 0.0 or key in ACTIVITY_KINDS}


class Latest:
    """Folds bundles into what `snapshot` answers."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._values: dict[str, dict[str, float]] = {}
        self._merged: dict[str, tuple[MetricPoint, float]] = {}
        self._time = defaultdict[str, _TimeShares](_TimeShares)
        self._heard_s: dict[str, float] = {}
        """By the monitor's own clock: those of other machines may differ."""
        self._steps: dict[str, float] = {}
        self._events: dict[str, Counter[str]] = {}
        """Source -> kind -> how many."""
        self.dropped = Counter[str]()
        """See `Telemetry.dropped`."""
        self.num_refused = 0
        """Values that were not kept because there are too many names or sources."""

    def apply(self, bundle: Telemetry, now_s: float) -> None:
        for kind, num in bundle.dropped.items():
            self.dropped[kind if kind in self.dropped or len(self.dropped) < _MAX_NAMES else "others"] += num
        for point in bundle.metrics:
            self._apply_point(point, now_s)
        for event in bundle.events:
            if event.source in self._events or len(self._events) < _MAX_SOURCES:
                kinds = self._events.setdefault(event.source, Counter())
                if event.kind in kinds or len(kinds) < _MAX_NAMES:
                    kinds[event.kind] += 1

    def _apply_point(self, point: MetricPoint, now_s: float) -> None:
        if point.source not in self._values and len(self._values) >= _MAX_SOURCES:
            self.num_refused += len(point.values)
            return
        self._heard_s[point.source] = now_s
        if point.step >= 0:
            self._steps[point.source] = float(point.step)
        values = self._values.setdefault(point.source, {})
        seconds: dict[str, float] = {}
        for name, value in point.values.items():
            if name.startswith(TIME_PREFIX):
                seconds[name.removeprefix(TIME_PREFIX)] = value
            elif name in values or len(values) < _MAX_NAMES:
                values[name] = value
                newest = self._merged[name][0] if name in self._merged else point
                if newest.step <= point.step or point.step < 0 or newest.source == point.source:
                    self._merged[name] = (point, value)
            else:
                self.num_refused += 1
        if seconds:
            self._time[point.source].put(point.wall_s, seconds)

    def shares(self, window_s: float) -> dict[str, dict[str, float]]:
        """Actor -> kind, or "kind/name", -> share of its time over the last `window_s` seconds."""
        window_s = min(max(window_s, 0.0), LONGEST_WINDOW_S)
        return {source: time.recent(window_s) for source, time in self._time.items()}

    def snapshot(self, now_s: float) -> dict[str, dict[str, float]]:
        """`metrics`: newest value by name over all sources; `<source>`: its own latest values; `time/<source>`: shares
        over the last window, with parts such as "wait-data/reward"; `events/<source>`: how many of each kind; `age_s`:
        seconds since each source was heard; `step`: of its newest point; `monitor`: counts."""
        view: dict[str, dict[str, float]] = {source: dict(values) for source, values in self._values.items() if values}
        view["metrics"] = {name: value for name, (_, value) in self._merged.items()}
        for source, time in self._time.items():
            view[f"time/{source}"] = time.recent(self._window_s)
        view["age_s"] = {source: now_s - heard_s for source, heard_s in self._heard_s.items()}
        for source, kinds in self._events.items():
            view[f"events/{source}"] = {kind: float(num) for kind, num in kinds.items()}
        view["step"] = dict(self._steps)
        view["monitor"] = {"dropped": float(self.dropped.total()), "refused": float(self.num_refused)}
        return view
