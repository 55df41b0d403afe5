"""Copies in memory are a convenience: what goes wrong with one is told with its true cause, and costs no training."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.survival.checkpoint_room import Ranks, refused

from myxa.actors.trainer.start_point import Standby
from myxa.core.activity import ActivityMeter, TelemetryBuffer
from myxa.core.clock import SystemClock
from myxa.core.knobs import LiveKnobs


def standby(folder: Path, ranks: Ranks, live_knobs: Callable[[], Awaitable[LiveKnobs]]) -> tuple[Standby, Any]:
    clock = SystemClock()
    telemetry = TelemetryBuffer("trainer/0", clock)
    of_ranks: Any = ranks
    made = Standby(folder, 1, of_ranks, ActivityMeter("trainer/0", clock), telemetry, live_knobs)
    return made, lambda: [event.text for event in telemetry.drain().events]


async def no_knobs() -> LiveKnobs:
    return LiveKnobs()


async def test_a_rank_that_cannot_write_ends_them_and_leaves_nothing_half_made(tmp_path: Path):
    ranks, ram = Ranks(), tmp_path / "ram"
    copies, told = standby(ram, ranks, no_knobs)
    await copies.copy(1)
    ranks.failing["checkpoint_written"] = [refused("trainer/1", "the optimizer has no masters")]
    await copies.copy(2)
    (text,) = told()
    assert "trainer/1: the optimizer has no masters" in text
    assert not copies.is_due(3)
    assert [path.name for path in ram.iterdir()] == ["version_00000001"], (
        "the best there is, until there is a checkpoint"
    )
    await copies.superseded(-1)
    await copies.superseded(0)
    assert [path.name for path in ram.iterdir()] == ["version_00000001"]
    await copies.superseded(4)
    assert list(ram.iterdir()) == []


async def test_copies_that_are_being_made_stay_beside_checkpoints(tmp_path: Path):
    copies, _ = standby(tmp_path / "ram", Ranks(), no_knobs)
    await copies.copy(1)
    await copies.superseded(1)
    assert [path.name for path in (tmp_path / "ram").iterdir()] == ["version_00000001"]
