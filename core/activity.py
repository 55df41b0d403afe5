"""Where an actor's time goes, and the bounded buffer of telemetry for the monitor.

An actor is in exactly one state at a time, so its shares add up to all of its wall time. The state is, in this order:

    1. the innermost `during(...)` block that is still open       (explicit, nestable, inner wins)
    2. "compute" while at least one `working(...)` block is open  (for actors with many tasks at once)
    3. the last `switch(...)`                                     (the reason to wait)

Blocks may close in any order. Not thread-safe: call it from the actor's loop.

`FlowSampler` chooses which groups the trace follows: all while they are few, one in k when they are many; k is a power
of two, so actors need not agree on it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

import msgspec

from .clock import Clock
from .messages import ActivityKind, Event, GroupText, MetricPoint, Span, Telemetry

Hop = Literal["dispatch", "generate", "reward", "claim", "train"]
"""The stations of a group, in their order."""


ACTIVITY_KINDS: tuple[ActivityKind, ...] = get_args(ActivityKind)

_NUMBER = re.compile(r"[\s#/:-]*\d+$")
_MAX_NAMES = 48
_MAX_TEXT = 4096
_SHORT_S = 0.002
"""Spans are as long at least, but for those with arguments."""
_MAX_SAMPLES = 64
"""Groups with their texts that wait for the monitor: some MiB."""
_TelemetryRecord = MetricPoint | Event | Span | GroupText


@functools.lru_cache(maxsize=256)
def _family(name: str) -> str:
    """A state's name without the number at its end."""
    return _NUMBER.sub("", name)


@dataclass(frozen=True, slots=True)
class _State:
    kind: ActivityKind
    name: str
    args: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ActivityMeter:
    """Partitions one actor's wall time into activity kinds and cuts it into spans."""

    def __init__(self, source: str, clock: Clock, *, max_spans: int = 8192, max_span_s: float = 10.0) -> None:
        """`max_spans` bounds what waits to be drained (the oldest go first, counted); a state that lasts is reported in
        pieces of about `max_span_s`, so a trace shows it before it ends. States that change within `_SHORT_S` are one
        span, with the name of what lasted longest; totals are exact."""
        self.source = source
        self._clock = clock
        self._max_span_s = max_span_s
        self._base = _State("other", "start")  # until the actor says what it does
        self._blocks: list[_State] = []
        self._working: list[_State] = []
        self._state = self._base
        now = clock.monotonic()
        # One anchor for all spans: a stepping wall clock must not make them overlap.
        self._wall_offset_s = clock.wall() - now
        self._settled_s = now
        self._span_start_s = self._state_start_s = now
        self._lasted = defaultdict[tuple[ActivityKind, str], float](float)
        """Seconds of the states of the running span, by kind and name."""
        self._totals: dict[ActivityKind, float] = dict.fromkeys(ACTIVITY_KINDS, 0.0)
        self._named: dict[str, float] = {}
        self._spans: deque[Span] = deque()
        self._max_spans = max_spans
        self._num_dropped = 0

    @property
    def kind(self) -> ActivityKind:
        return self._state.kind

    def during(self, kind: ActivityKind, name: str = "", **args: Any) -> contextlib.AbstractContextManager[None]:
        """The block's time counts as `kind`; an inner block takes over until it ends. `args` go into the trace."""
        return self._within(self._blocks, _State(kind, name, args))

    def working(self, name: str = "", **args: Any) -> contextlib.AbstractContextManager[None]:
        """One of many concurrent pieces of work: the actor counts as computing while any is open."""
        return self._within(self._working, _State("compute", name, args))

    @contextlib.contextmanager
    def _within(self, blocks: list[_State], block: _State) -> Generator[None]:
        blocks.append(block)
        self._update()
        try:
            yield
        finally:
            del blocks[max(index for index, open_block in enumerate(blocks) if open_block is block)]
            self._update()

    def switch(self, kind: ActivityKind, name: str = "", **args: Any) -> None:
        """Set the state that holds while no block is open. Saying the same again costs nothing."""
        base = self._base
        if (base.kind, base.name, base.args) != (kind, name, args):
            self._base = _State(kind, name, args)
            self._update()

    def totals(self) -> dict[ActivityKind, float]:
        """Seconds per kind since the meter was made; they sum to the elapsed time."""
        self._settle()
        return dict(self._totals)

    def named_totals(self) -> dict[str, float]:
        """Seconds per "kind/name" for states that have a name, e.g. "wait-data/reward"; a number at the name's end is
        left out ("claim 7" is booked as "claim"). They are parts of `totals`."""
        self._settle()
        return dict(self._named)

    def drain_spans(self) -> tuple[tuple[Span, ...], int]:
        """Finished spans in order of time, and how many were thrown away since the last drain."""
        self._settle()
        if self._settled_s - self._span_start_s >= self._max_span_s:
            self._close_state(0.0)
        spans, dropped = tuple(self._spans), self._num_dropped
        self._spans.clear()
        self._num_dropped = 0
        return spans, dropped

    def close_span(self) -> None:
        """End the running span now, so that the next drain holds everything up to this moment."""
        self._settle()
        self._close_state(0.0)

    def _current(self) -> _State:
        if self._blocks:
            return self._blocks[-1]
        # The oldest names the work: with many tasks the newest would cut a span for each of them.
        return self._working[0] if self._working else self._base

    def _update(self) -> None:
        state = self._current()
        if state is self._state or state == self._state:
            return
        self._settle()
        self._close_state(_SHORT_S)
        self._state = state

    def _settle(self) -> None:
        now = max(self._clock.monotonic(), self._settled_s)
        elapsed_s = now - self._settled_s
        if elapsed_s > 0.0:
            state = self._state
            self._totals[state.kind] += elapsed_s
            self._book_name(state, elapsed_s)
        self._settled_s = now

    def _book_name(self, state: _State, elapsed_s: float) -> None:
        family = _family(state.name)
        if not family:
            return
        key = f"{state.kind}/{family}"
        if key not in self._named and len(self._named) >= _MAX_NAMES:
            return  # a name made from an id would grow without end; its kind is booked all the same
        self._named[key] = self._named.get(key, 0.0) + elapsed_s

    def _close_state(self, short_s: float) -> None:
        """And the running span, unless that is shorter."""
        now_s, state = self._settled_s, self._state
        lasted_s, duration_s = now_s - self._state_start_s, now_s - self._span_start_s
        if duration_s <= 0.0:
            return
        self._state_start_s = now_s
        self._lasted[state.kind, state.name] += lasted_s
        if duration_s < short_s and not state.args:
            return
        kind, name = max(self._lasted, key=self._lasted.__getitem__)
        if state.args:
            kind, name = state.kind, state.name
        if len(self._spans) >= self._max_spans:
            self._spans.popleft()
            self._num_dropped += 1
        self._spans.append(
            Span(
                source=self.source,
                name=name or kind,
                activity=kind,
                start_wall_s=self._span_start_s + self._wall_offset_s,
                duration_s=duration_s,
                args=dict(state.args),
            )
        )
        self._span_start_s = now_s
        self._lasted.clear()


@dataclass(eq=False)
class TelemetryBuffer:
    """Telemetry of an actor until the next bundle leaves. Where there is too much the oldest records go, counted; of
    events the oldest of the kind that there are most of, so that a flood of one kind leaves the others. With a meter
    its totals are metrics "time/<kind>" and "time/<kind>/<name>" in cumulative seconds: a lost bundle costs resolution
    alone."""

    source: str
    clock: Clock
    _: KW_ONLY
    meter: ActivityMeter | None = None
    max_records: int = 4096
    time_every_s: float = 1.0

    def __post_init__(self) -> None:
        self._waiting: dict[str, deque[Any]] = {name: deque() for name in ("events", "metrics", "spans", "samples")}
        """By the fields of `Telemetry`, in the order in which they leave."""
        self._next_time_s = self.clock.monotonic()
        self._last_step = -1
        self._dropped = Counter[str]()
        self._flows = FlowSampler()
        self.more_seconds: list[Callable[[], Mapping[str, float]]] = []
        """Further sums of seconds to tell with those of the meter, by names with a "/": they are no part of them."""
        self._num_untold = 0
        self.unconfirmed: Telemetry | None = None
        """The bundle that was sent last, until the monitor is known to have it."""
        self._sender, self._number = f"{self.source} {secrets.token_hex(4)}", 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def metric(self, step: int, values: Mapping[str, float], *, source: str = "") -> None:
        """Values of one step (step < 0: of this moment). A NaN or infinite value cannot travel as JSON: it becomes an
        event of kind "non-finite" that names it."""
        finite: dict[str, float] = {}
        for name, raw in values.items():
            value = float(raw)
            if math.isfinite(value):
                finite[name] = value
            else:
                text = f"{name} is {value} at step {step}"
                self.event("non-finite", text, metric=name, step=step, value=str(value))
        self._last_step = max(self._last_step, step)
        if finite:
            point = MetricPoint(source=source or self.source, step=step, wall_s=self.clock.wall(), values=finite)
            self._append("metrics", point)

    def event(self, kind: str, text: str, *, source: str = "", **data: Any) -> None:
        """Something a person may want to know. `data` must be JSON types."""
        now = self.clock.wall()
        event = Event(source=source or self.source, wall_s=now, kind=kind, text=text[:_MAX_TEXT], data=data)
        self._append("events", event)

    def span(
        self, name: str, activity: ActivityKind, start_wall_s: float, duration_s: float, *, track: str, **args: Any
    ) -> None:
        """A stretch of one of several concurrent things; `track`: an own row of the trace. No time is booked."""
        span = Span(
            source=self.source,
            name=name,
            activity=activity,
            start_wall_s=start_wall_s,
            duration_s=max(0.0, duration_s),
            track=track,
            args=args,
        )
        self._append("spans", span)

    def samples_to_tell(self, num: int) -> int:
        """Of so many groups how many may be told now without pushing out others; the rest counts as left out."""
        num_told = min(num, max(0, self._limit("samples") - len(self._waiting["samples"])))
        self._num_untold += num - num_told
        return num_told

    def sample(self, group: GroupText) -> None:
        self._append("samples", group)

    def hop(self, hop: Hop, group_ids: Iterable[int], start_wall_s: float, duration_s: float, **args: Any) -> None:
        """These groups passed a station: the trace joins it to their others. Of many only some are followed."""
        picked = self._flows.pick(hop, group_ids, self.clock.monotonic())
        if picked:
            flows = list(picked)
            self.span(hop, "compute", start_wall_s, duration_s, track=hop, **args, hop=hop, flows=flows)

    def drain(self, max_bytes: int = 400_000) -> Telemetry:
        """The next bundle, of about `max_bytes` encoded. Call again while `len(buffer)` is not 0."""
        self._take_from_meter()
        budget, fields = max_bytes, dict[str, Any]()
        for name, queue in self._waiting.items():
            records: list[Any] = []
            while queue and budget > 0:
                records.append(queue.popleft())
                budget -= _size_bytes(records[-1])
            fields[name] = tuple(records)
        dropped, self._dropped = self._dropped, Counter[str]()
        return self.numbered(Telemetry(**fields, dropped=dict(dropped)))

    def numbered(self, bundle: Telemetry) -> Telemetry:
        self._number += 1
        return msgspec.structs.replace(bundle, sender=self._sender, number=self._number)

    def lost(self, bundle: Telemetry) -> None:
        """A drained bundle could not be sent: its records count as dropped in the next one."""
        self._dropped.update(bundle.dropped)
        self._dropped.update(bundle.counts())

    def _limit(self, name: str) -> int:
        return min(self.max_records, _MAX_SAMPLES) if name == "samples" else self.max_records

    def _take_from_meter(self) -> None:
        if self.meter is None:
            return
        spans, dropped = self.meter.drain_spans()
        self._dropped.update({"spans": dropped} if dropped else {})
        for span in spans:
            self._append("spans", span)
        now = self.clock.monotonic()
        if now >= self._next_time_s:
            self._next_time_s = now + self.time_every_s
            values = {f"time/{kind}": seconds for kind, seconds in self.meter.totals().items()}
            seconds_by_name = self.meter.named_totals()
            for more in self.more_seconds:
                seconds_by_name |= more()
            values |= {f"time/{name}": seconds for name, seconds in seconds_by_name.items()}
            if self._flows.num_skipped:
                values["trace/hops_skipped"] = float(self._flows.num_skipped)
            if self._num_untold:
                values["samples/left_out"] = float(self._num_untold)
            wall_s = self.clock.wall()
            self._append("metrics", MetricPoint(source=self.source, step=self._last_step, wall_s=wall_s, values=values))

    def _append(self, name: str, record: _TelemetryRecord) -> None:
        if len(self._waiting[name]) >= self._limit(name):
            self._make_room(name)
        self._waiting[name].append(record)

    def _make_room(self, name: str) -> None:
        queue = self._waiting[name]
        if name != "events":
            queue.popleft()
            self._dropped[name] += 1
            return
        kind, count = Counter(event.kind for event in queue).most_common(1)[0]
        num_left = -(-count // 2)
        self._dropped[f"{name} {kind}"] += num_left
        remaining = deque[Any]()
        for event in queue:
            if event.kind == kind and num_left:
                num_left -= 1
            else:
                remaining.append(event)
        self._waiting[name] = remaining


def _size_bytes(record: _TelemetryRecord) -> int:
    """About how long the record is as JSON; an estimate, since encoding twice would cost more than it saves."""
    if isinstance(record, MetricPoint):
        return 90 + 44 * len(record.values)
    if isinstance(record, Event):
        return 120 + len(record.text) + len(repr(record.data))
    if isinstance(record, GroupText):
        return len(msgspec.json.encode(record))
    return 180 + len(record.name) + len(repr(record.args))


class FlowSampler:
    """Chooses among the groups of one actor; every hop has its own stride."""

    def __init__(self, max_per_s: float = 50.0) -> None:
        """`max_per_s`: groups followed per second and hop, about, over the time since the first."""
        self._max_per_s = max_per_s
        self._seen: dict[Hop, tuple[float, int]] = {}
        """When the first group passed the hop, and how many have."""
        self.num_skipped = 0
        """Hops that were not followed."""

    def pick(self, hop: Hop, group_ids: Iterable[int], now_s: float) -> tuple[int, ...]:
        """Those that are followed. Groups without a real number (below 0: checks, evaluation) never are."""
        began_s, num_seen = self._seen.get(hop, (now_s, 0))
        groups = [group_id for group_id in group_ids if group_id >= 0]
        num_seen += len(groups)
        self._seen[hop] = began_s, num_seen
        excess = num_seen / (now_s - began_s + 1.0) / self._max_per_s
        stride = 1 << max(0, math.ceil(math.log2(excess))) if excess > 1 else 1
        picked = tuple(group_id for group_id in groups if group_id % stride == 0)
        self.num_skipped += len(groups) - len(picked)
        return picked
