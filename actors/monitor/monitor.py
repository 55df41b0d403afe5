"""The monitor: takes telemetry from every actor, keeps a picture of the run, feeds the sinks.

Nothing here is needed for training: actors send lossy casts, sinks run in their own threads, and a monitor that
is slow or dead costs telemetry only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec

from ...core.activity import ActivityMeter, TelemetryBuffer
from ...core.actor import MANY_PEERS
from ...core.clock import Clock, SystemClock
from ...core.messages import MetricPoint, Telemetry
from ...core.sink import Sink
from ...core.timeouts import TIMEOUTS
from ..contracts import MonitorContract
from ..telemetry import REPORT_S
from .latest import TIME_PREFIX, Latest
from .sink_thread import Sinks

_NAME = "monitor"

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Monitor(MonitorContract):
    """Fans telemetry out to sinks; answers `snapshot`."""

    run_dir: Path
    sinks: Sequence[Sink]
    _: KW_ONLY
    run_name: str = ""
    clock: Clock = field(default_factory=SystemClock)
    time_every_s: float = 10.0
    """How often the cumulative times of one actor go to the sinks. They arrive every second: most of metrics.jsonl."""
    written_until_wall_s: float = 0.0
    """When the monitor before this one wrote last; 0: there was none."""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """See `SinkContext`."""

    def __post_init__(self) -> None:
        self.run_name = self.run_name or self.run_dir.name
        self._latest = Latest()
        self._time_written_s: dict[str, float] = {}
        self._held_times: dict[str, MetricPoint] = {}
        self._newest: dict[str, int] = {}
        """`Telemetry.sender` -> number of its newest bundle."""
        self._drops_told = Counter[str]()
        self._drops_told_s = self.clock.monotonic()
        self._meter = ActivityMeter(_NAME, self.clock)
        self._meter.switch("other", "start")
        self._own = TelemetryBuffer(_NAME, self.clock, meter=self._meter)
        self._own_told_s = self.clock.monotonic()
        self._sinks = Sinks(
            self.sinks, run_dir=self.run_dir, run_name=self.run_name, clock=self.clock, settings=self.settings
        )

    async def on_start(self) -> None:
        """Open the sinks. Raises LaunchError or ConfigError when one refuses, e.g. a port in use."""
        await self._sinks.start()
        self._mark_gap()
        self._meter.switch("wait-data", "messages")

    def _mark_gap(self) -> None:
        """Telemetry sent while there was no monitor is lost: an event says when."""
        since_s, now_s = self.written_until_wall_s, self.clock.wall()
        if since_s:
            text = f"nothing was written for {now_s - since_s:.1f} s: there was no monitor"
            self._sinks.emit("telemetry-gap", text, since_s=since_s, until_s=now_s)

    async def on_stop(self, why: str) -> None:
        self._tell_own()
        self._tell_drops()
        self._write_held()
        await self._sinks.stop(TIMEOUTS.monitor.close_s)

    async def telemetry(self, bundle: Telemetry) -> None:
        if self._is_known(bundle):
            return
        with self._meter.working("fold"):
            self._take(bundle)
        if self.clock.monotonic() >= self._own_told_s + REPORT_S:
            self._tell_own()
        if self.clock.monotonic() >= self._drops_told_s + TIMEOUTS.monitor.report_drops_s:
            self._tell_drops()

    def _is_known(self, bundle: Telemetry) -> bool:
        """Whether it came before: a sender that hears no answer sends it again."""
        newest = self._newest.pop(bundle.sender, 0)
        self._newest[bundle.sender] = max(newest, bundle.number)
        if len(self._newest) > MANY_PEERS:  # the sender that has been silent for the longest time goes
            del self._newest[next(iter(self._newest))]
        return bool(bundle.sender) and bundle.number <= newest

    def _take(self, bundle: Telemetry) -> None:
        self._latest.apply(bundle, self.clock.monotonic())
        self._sinks.put(self._thinned(bundle))

    def _tell_own(self) -> None:
        """What this actor says of itself goes the way of all bundles, but for its spans, one for every bundle."""
        self._own_told_s = self.clock.monotonic()
        self._take(msgspec.structs.replace(self._own.drain(), spans=()))

    async def snapshot(self) -> dict[str, dict[str, float]]:
        """See `Latest.snapshot`; under `monitor` also the records that the sinks were too slow for."""
        view = self._latest.snapshot(self.clock.monotonic())
        view["monitor"]["sinks_dropped"] = float(self._sinks.dropped.total())
        view["monitor"]["sinks"] = float(len(self._sinks.active))
        view["monitor"]["sinks_off"] = float(len(self.sinks) - len(self._sinks.active))
        return view

    async def shares(self, window_s: float) -> dict[str, dict[str, float]]:
        return self._latest.shares(window_s)

    def _write_held(self) -> None:
        if self._held_times:
            self._sinks.put(Telemetry(metrics=tuple(self._held_times.values())))
            self._held_times.clear()

    def _thinned(self, bundle: Telemetry) -> Telemetry:
        """Hold time totals back that come more often than `time_every_s`; the last ones are written by `on_stop`."""
        if not any(_is_time(point) for point in bundle.metrics):
            return bundle
        now = self.clock.monotonic()
        points: list[MetricPoint] = []
        for point in bundle.metrics:
            if _is_time(point) and now < self._time_written_s.get(point.source, -1e18) + self.time_every_s:
                self._held_times[point.source] = point
                continue
            if _is_time(point):
                self._time_written_s[point.source] = now
                self._held_times.pop(point.source, None)
            points.append(point)
        return msgspec.structs.replace(bundle, metrics=tuple(points))

    def _tell_drops(self) -> None:
        """One event for losses since the last one."""
        self._drops_told_s = self.clock.monotonic()
        places = {"actors": self._latest.dropped, "sinks": self._sinks.dropped}
        dropped = Counter({f"{kind} ({place})": num for place, lost in places.items() for kind, num in lost.items()})
        if not (news := dropped - self._drops_told):
            return
        self._drops_told = dropped
        parts = ", ".join(f"{num} {kind}" for kind, num in news.most_common(8))
        text = f"{news.total()} telemetry records were lost, there were more than monitor or sinks could take: {parts}"
        self._sinks.emit("telemetry-dropped", text, **news)


def _is_time(point: MetricPoint) -> bool:
    return any(name.startswith(TIME_PREFIX) for name in point.values)
