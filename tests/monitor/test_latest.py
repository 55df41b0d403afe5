"""What `snapshot` says, made from bundles."""

from __future__ import annotations

import pytest

from myxa.actors.monitor.latest import Latest
from myxa.core.messages import MetricPoint, Telemetry


def put(latest: Latest, source: str, step: int, wall_s: float, values: dict[str, float], dropped: int = 0) -> None:
    point = MetricPoint(source=source, step=step, wall_s=wall_s, values=values)
    latest.apply(Telemetry(metrics=(point,), dropped={"spans": dropped}), wall_s)


def test_latest_values_per_source_and_merged() -> None:
    latest = Latest()
    put(latest, "trainer/0", 3, 100.0, {"train/loss": 0.5})
    put(latest, "rollout/0", 3, 101.0, {"rollout/running": 4})
    put(latest, "rollout/1", 4, 102.0, {"rollout/running": 7})
    put(latest, "rollout/0", 3, 103.0, {"rollout/running": 5}, dropped=2)
    view = latest.snapshot(110.0)
    assert view["rollout/0"] == {"rollout/running": 5}
    assert view["metrics"] == {"train/loss": 0.5, "rollout/running": 7}  # the newest step wins over the newest message
    assert view["age_s"] == {"trainer/0": 10.0, "rollout/0": 7.0, "rollout/1": 8.0}
    assert view["monitor"] == {"dropped": 2.0, "refused": 0.0}


def test_a_source_s_age_is_by_the_monitor_s_clock_and_not_by_its_own() -> None:
    latest = Latest()
    for source, wall_s in (("rollout/0", 1_000.0), ("rollout/1", 9_000.0)):  # clocks that differ by hours
        point = MetricPoint(source=source, step=1, wall_s=wall_s, values={"rollout/running": 1.0})
        latest.apply(Telemetry(metrics=(point,)), 50.0)
    assert latest.snapshot(53.0)["age_s"] == {"rollout/0": 3.0, "rollout/1": 3.0}


def test_a_trainer_that_goes_back_to_its_checkpoint_shows_what_it_does_now() -> None:
    latest = Latest()
    put(latest, "trainer/0", 50, 100.0, {"train/loss": 0.5})
    put(latest, "trainer/0", 41, 200.0, {"train/loss": 0.7})
    assert latest.snapshot(201.0)["metrics"] == {"train/loss": 0.7}


def test_time_shares_come_from_cumulative_seconds() -> None:
    latest = Latest(window_s=60.0)
    for second in range(0, 200, 10):  # waits for 100 s, then computes
        values = {"time/wait-data": min(second, 100.0), "time/compute": max(0.0, second - 100.0)}
        values["time/wait-data/claim"] = values["time/wait-data"]
        put(latest, "trainer/0", 1, 1000.0 + second, values)
    view = latest.snapshot(1200.0)
    assert view["time/trainer/0"]["compute"] == pytest.approx(1.0)
    assert "trainer/0" not in view  # times are not metrics
    assert "time/compute" not in view["metrics"]


def test_lost_bundles_change_nothing() -> None:
    whole, holes = Latest(), Latest()
    for second in range(100):
        values = {"time/compute": second * 0.75, "time/wait-data": second * 0.25}
        put(whole, "a", 1, float(second), values)
        if second in (0, 41, 99):
            put(holes, "a", 1, float(second), values)
    assert whole.snapshot(0)["time/a"]["compute"] == pytest.approx(0.75)
    assert holes.snapshot(0)["time/a"]["compute"] == pytest.approx(0.75)


def test_a_restarted_actor_does_not_go_backwards() -> None:
    latest = Latest()
    put(latest, "rollout/0", 1, 0.0, {"time/compute": 90.0, "time/wait-data": 0.0})
    put(latest, "rollout/0", 1, 10.0, {"time/compute": 0.0, "time/wait-data": 10.0})
    view = latest.snapshot(10.0)
    assert view["time/rollout/0"]["wait-data"] == 1.0


def test_names_and_sources_are_capped() -> None:
    latest = Latest()
    put(latest, "a", 0, 0.0, {f"m/{index}": 1.0 for index in range(10_000)})
    for index in range(20_000):
        put(latest, f"actor/{index}", 0, 0.0, {"x": 1.0})
    view = latest.snapshot(0.0)
    assert len(view["a"]) == 4096
    assert len(view) < 16_500
    assert view["monitor"]["refused"] == 10_000 - 4096 + 20_000 - 16_383
