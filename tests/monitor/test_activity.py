"""An actor's time adds up to all of its time, whatever it does and in whatever order blocks end."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.manual_clock import ManualClock

from myxa.core.activity import ACTIVITY_KINDS, ActivityMeter, TelemetryBuffer
from myxa.core.messages import Telemetry


def make_meter(**options: float) -> tuple[ManualClock, ActivityMeter]:
    clock = ManualClock(start_s=17.3)
    return clock, ActivityMeter("trainer/0", clock, **options)  # pyright: ignore[reportArgumentType]


def test_an_inner_block_takes_over_until_it_ends() -> None:
    clock, meter = make_meter()
    with meter.during("wait-data", name="claim"):
        clock.advance(2)
        with meter.during("compute", name="decode"):
            assert meter.kind == "compute"
            clock.advance(1)
        clock.advance(4)
    clock.advance(3)
    totals = meter.totals()
    assert totals["wait-data"] == pytest.approx(6)
    assert totals["compute"] == pytest.approx(1)
    assert totals["other"] == pytest.approx(3)
    assert meter.named_totals() == pytest.approx({"other/start": 3, "wait-data/claim": 6, "compute/decode": 1})


def test_a_reentrant_actor_computes_while_any_request_runs() -> None:
    clock, meter = make_meter()
    meter.switch("wait-capacity", "staleness")
    clock.advance(1)
    first, second = meter.working("generate"), meter.working("generate")
    first.__enter__()
    clock.advance(1)
    second.__enter__()
    clock.advance(1)
    first.__exit__(None, None, None)  # closes before the one that opened after it
    meter.switch("wait-data", "draw")
    clock.advance(1)
    assert meter.kind == "compute"
    second.__exit__(None, None, None)
    clock.advance(1)
    assert meter.kind == "wait-data"
    spans, _ = meter.drain_spans()
    # Three requests in one stretch are one span: the trace must not be cut by every request.
    assert [(span.activity, round(span.duration_s)) for span in spans] == [("wait-capacity", 1), ("compute", 3)]
    assert meter.totals()["wait-data"] == pytest.approx(1)


def test_an_explicit_block_wins_over_running_requests() -> None:
    clock, meter = make_meter()
    with meter.working(), meter.during("paused"):
        clock.advance(5)
    assert meter.totals()["paused"] == pytest.approx(5)
    assert meter.totals()["compute"] == 0


def test_too_many_spans_drop_the_oldest_and_say_so() -> None:
    clock, meter = make_meter(max_spans=3)
    for _ in range(5):
        with meter.during("compute"):
            clock.advance(1)
    spans, dropped = meter.drain_spans()
    assert (len(spans), dropped) == (3, 2)
    assert meter.drain_spans() == ((), 0)


def test_an_actor_that_changes_its_state_all_the_time_has_few_spans_and_all_of_its_time() -> None:
    clock, meter = make_meter()
    start_s = clock.monotonic()
    for number in range(100_000):
        meter.switch("wait-data" if number % 3 else "compute", ("generate", "reward", "hand over")[number % 3])
        clock.advance((60e-6, 30e-6, 10e-6)[number % 3])
    with meter.during("compute", "publish", makes_version=3):
        clock.advance(50e-6)
    meter.close_span()
    spans, dropped = meter.drain_spans()
    elapsed_s = clock.monotonic() - start_s
    assert (dropped, len(spans) < 500 * elapsed_s + 10) == (0, True)
    assert sum(span.duration_s for span in spans) == pytest.approx(elapsed_s)
    assert meter.named_totals()["wait-data/reward"] == pytest.approx(1.0, rel=1e-3)
    assert {span.name for span in spans} == {"generate", "publish"}, "what it mostly did"
    assert [span.args for span in spans if span.args] == [{"makes_version": 3}], "an arrow begins there"


def test_a_long_state_shows_in_the_trace_before_it_ends() -> None:
    clock, meter = make_meter(max_span_s=10.0)
    meter.switch("wait-data", "claim")
    clock.advance(9)
    assert meter.drain_spans()[0] == ()
    clock.advance(2)
    (piece,), _ = meter.drain_spans()
    assert piece.duration_s == pytest.approx(11)
    clock.advance(1)
    meter.close_span()
    (rest,), _ = meter.drain_spans()
    assert rest.start_wall_s == pytest.approx(piece.start_wall_s + 11)


def test_names_made_from_ids_do_not_grow_without_end() -> None:
    clock, meter = make_meter()
    for index in range(500):
        with meter.during("compute", name=f"group {index}"):
            clock.advance(0.01)
        with meter.during("wait-data", name=f"{index} groups"):
            clock.advance(0.01)
    assert meter.named_totals()["compute/group"] == pytest.approx(5.0)
    assert len(meter.named_totals()) < 100
    assert meter.totals()["wait-data"] == pytest.approx(5.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("during", "working", "switch", "close")), st.sampled_from(ACTIVITY_KINDS),
        st.floats(min_value=0.0, max_value=200.0, allow_nan=False), st.integers(min_value=0, max_value=7),
    ),
    max_size=60,
)  # fmt: skip


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_time_is_a_partition(steps: list[tuple[str, str, float, int]]) -> None:
    """Whatever the order of openings and closings: totals = elapsed, spans tile the time."""
    clock, meter = make_meter(max_spans=10_000)
    start_s, open_blocks = clock.monotonic(), []
    for what, kind, seconds, index in steps:
        if what == "switch":
            meter.switch(kind)  # pyright: ignore[reportArgumentType]
        elif what == "close" and open_blocks:
            open_blocks.pop(index % len(open_blocks)).__exit__(None, None, None)
        elif what != "close":
            block = meter.during(kind) if what == "during" else meter.working()  # pyright: ignore[reportArgumentType]
            block.__enter__()
            open_blocks.append(block)
        clock.advance(seconds)
    elapsed_s = clock.monotonic() - start_s
    assert sum(meter.totals().values()) == pytest.approx(elapsed_s, abs=1e-6)
    meter.close_span()
    spans, dropped = meter.drain_spans()
    assert dropped == 0
    assert sum(span.duration_s for span in spans) == pytest.approx(elapsed_s, abs=1e-6)
    for before, after in itertools.pairwise(spans):
        assert after.start_wall_s == pytest.approx(before.start_wall_s + before.duration_s, abs=1e-5)
    for block in open_blocks:
        block.__exit__(None, None, None)


def test_a_nan_loss_becomes_an_event_and_the_rest_of_the_point_travels() -> None:
    buffer = TelemetryBuffer("trainer/0", ManualClock())
    buffer.metric(7, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 1e-4})
    bundle = buffer.drain()
    assert bundle.metrics[0].values == {"train/lr": 1e-4}
    assert [event.kind for event in bundle.events] == ["non-finite", "non-finite"]
    assert "train/loss is nan at step 7" in bundle.events[0].text
    # The point of it all: the bundle survives the wire's JSON.
    assert msgspec.json.decode(msgspec.json.encode(bundle), type=Telemetry) == bundle


def test_bundles_stay_below_the_size_of_the_control_lane() -> None:
    buffer = TelemetryBuffer("trainer/0", ManualClock(), max_records=5000)
    for step in range(3000):
        buffer.metric(step, {f"train/some_quite_long_metric_name_{i}": float(i) for i in range(20)})
        buffer.event("group-dropped", "x" * 9000, group_id=step)
    sizes, steps = [], []
    while len(buffer):
        bundle = buffer.drain()
        sizes.append(len(msgspec.json.encode(bundle)))
        steps += [point.step for point in bundle.metrics]
    assert steps == list(range(3000))
    assert max(sizes) < 1024 * 1024
    assert len(sizes) > 3


def test_with_a_meter_the_bundle_holds_spans_and_cumulative_times() -> None:
    clock, meter = make_meter()
    buffer = TelemetryBuffer("trainer/0", clock, meter=meter)
    with meter.during("wait-data", name="claim"):
        clock.advance(3)
    buffer.metric(4, {"train/loss": 1.0})
    bundle = buffer.drain()
    assert [span.name for span in bundle.spans] == ["claim"]
    times = next(point for point in bundle.metrics if "time/compute" in point.values)
    assert times.values["time/wait-data"] == pytest.approx(3)
    assert times.values["time/wait-data/claim"] == pytest.approx(3)
    assert times.step == 4
    assert not buffer.drain().metrics  # at most once per second


def test_a_span_of_a_track_never_has_a_negative_length() -> None:
    buffer = TelemetryBuffer("rollout/0", ManualClock())
    buffer.span("generate", "compute", 10.0, -1e-9, track="group 3", group_id=3)
    (span,) = buffer.drain().spans
    assert (span.duration_s, span.track, span.args) == (0.0, "group 3", {"group_id": 3})
