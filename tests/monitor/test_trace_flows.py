"""Arrows of the trace: their ends lie in slices, and a group's stations are joined in their order."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from tests.harness.manual_clock import ManualClock
from tests.monitor.sink_world import context, hop, weights
from tests.monitor.trace_rules import check_events, follow

from myxa.actors.sinks.chrome_trace import ChromeTraceSink, Lanes
from myxa.core.activity import FlowSampler, TelemetryBuffer
from myxa.core.messages import Event, Span, Telemetry

HOPS = ("dispatch", "generate", "reward", "claim", "train")
SEED = 5


def written(folder: Path, bundles: list[Telemetry]) -> list[dict[str, object]]:
    """What a sink makes of these bundles."""
    sink = ChromeTraceSink()
    sink.open(context(folder))
    for bundle in bundles:
        sink.write(bundle)
        sink.flush()
    sink.close()
    return json.loads((folder / "trace.json").read_text())


def life(group_id: int, start_s: float) -> list[Span]:
    return [
        hop("buffer", "dispatch", [group_id], start_s, 0.0),
        hop("rollout/0", "generate", [group_id], start_s + 0.1, 2.0),
        hop("rollout/0", "reward", [group_id], start_s + 1.0, 1.5),  # begins while other members are still generated
        hop("buffer", "claim", [group_id], start_s + 3.0, 0.0),
        hop("trainer/0", "train", [group_id], start_s + 3.1, 1.0),
    ]


@pytest.mark.parametrize("seed", range(2))
def test_stations_that_come_in_any_order_are_joined_in_their_own(seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    spans = [station for group_id in range(40) for station in life(group_id, 1000.0 + group_id * 0.3)]
    # Each actor sends once a second, in its own rhythm; two bundles of one actor keep their order.
    by_bundle: dict[tuple[str, int], list[Span]] = {}
    for one in spans:
        by_bundle.setdefault((one.source, int(one.start_wall_s + one.duration_s)), []).append(one)
    order = sorted(by_bundle, key=lambda key: key[1] + rng.random() * 2.5)
    events = written(tmp_path, [Telemetry(spans=tuple(by_bundle[key])) for key in order])
    check_events(events)
    joined: dict[str, set[tuple[str, str]]] = {}
    for arrow in follow(events):
        joined.setdefault(arrow.name, set()).add((arrow.source["name"], arrow.target["name"]))
        assert int(arrow.name.removeprefix("group ")) in arrow.source["args"]["flows"]
        assert int(arrow.name.removeprefix("group ")) in arrow.target["args"]["flows"]
    steps = set(pairwise(HOPS))
    assert joined == {f"group {group_id}": steps for group_id in range(40)}


def test_a_version_is_followed_from_its_making_through_every_adoption(tmp_path: Path) -> None:
    bundles: list[Telemetry] = []
    for version in range(6):
        adoptions = [weights(f"rollout/{i}", version, 10.0 * version + 1 + i, is_made=False) for i in range(3)]
        maker = weights("trainer/0", version, 10.0 * version, is_made=True)
        bundles += [Telemetry(spans=(adoptions[0], maker)), Telemetry(spans=tuple(adoptions[1:]))]
    events = written(tmp_path, bundles)
    check_events(events)
    arrows = follow(events)
    assert len(arrows) == 18
    for version in range(6):
        mine = [arrow for arrow in arrows if arrow.name == f"version {version}"]
        assert mine[0].source["args"] == {"makes_version": version}
        assert [arrow.target["args"] for arrow in mine] == [{"adopts_version": version}] * 3
        assert len({arrow.target["pid"] for arrow in mine}) == 3


def test_a_group_handed_out_again_goes_on_from_its_newest_station(tmp_path: Path) -> None:
    first = hop("buffer", "dispatch", [3], 1.0, 0.0)  # the engine died: nothing came of it
    events = written(tmp_path, [Telemetry(spans=(first, *life(3, 20.0)))])
    arrows = follow(events)
    assert [arrow.target["name"] for arrow in arrows] == list(HOPS[1:])
    assert min(arrow.source["ts"] for arrow in arrows) == 20_000_000


def test_rows_for_what_overlaps_are_few() -> None:
    lanes = Lanes(max_lanes=3)
    names = [lanes.take("rollout/0", "generate", start, start + 10) for start in (0, 1, 2, 3, 10, 20)]
    assert names == ["generate", "generate 2", "generate 3", None, "generate", "generate"]


def test_many_groups_are_thinned_in_step_by_all_who_see_them() -> None:
    fine, coarse = FlowSampler(max_per_s=50), FlowSampler(max_per_s=50)
    seen: set[int] = set()
    followed: set[int] = set()
    rng = random.Random(SEED)
    for second in range(20):
        groups = range(second * 1000, second * 1000 + 1000)
        mine = [group for group in groups if rng.random() < 0.25]
        seen |= set(fine.pick("generate", mine, float(second)))
        followed |= set(coarse.pick("dispatch", groups, float(second)))
    assert coarse.num_skipped + len(followed) == 20_000
    settled = {group for group in followed if group >= 2000}
    assert 15 * 18 <= len(settled) <= 50 * 18
    both = settled & seen
    assert len(both) > 0.15 * len(settled)  # a quarter of them went to this actor, and it follows a finer choice
    few = FlowSampler(max_per_s=50)
    assert few.pick("reward", range(-3, 20), 0.0) == tuple(range(20))


def test_a_hop_travels_as_a_span_and_what_was_left_out_is_told() -> None:
    clock = ManualClock()
    buffer = TelemetryBuffer("rollout/0", clock)
    buffer.hop("generate", [7], 5.0, 1.5, prompt="x")
    (sent,) = buffer.drain().spans
    assert (sent.name, sent.track, sent.duration_s) == ("generate", "generate", 1.5)
    assert sent.args == {"prompt": "x", "hop": "generate", "flows": [7]}
    buffer.hop("generate", [-3], 5.0, 1.5)
    assert not buffer.drain().spans


def test_a_change_of_knobs_is_a_line_through_the_whole_trace(tmp_path: Path) -> None:
    change = Event(
        source="coordinator", wall_s=2.0, kind="knob", text="lr 1e-3 -> 1e-4", data={"name": "lr", "epoch": 3}
    )
    other = Event(source="buffer", wall_s=2.0, kind="note", text="x")
    events = written(tmp_path, [Telemetry(events=(change,)), Telemetry(events=(other,))])
    check_events(events)
    scopes = {event["name"]: event["s"] for event in events if event["ph"] == "i"}
    assert scopes == {"knob": "g", "note": "p"}
    told = next(event for event in events if event["name"] == "knob")
    assert told["args"] == {"name": "lr", "epoch": 3, "text": "lr 1e-3 -> 1e-4"}
