"""A coordinator that is started anew is told where the trainer stands, and what it was to release is released."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.trainer_room import Conductor, trainer_room

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.knobs import LiveKnobs
from myxa.core.messages import WeightManifest


class Forgetful(Conductor):
    """Releases nothing, and notes what it is told when the trainer is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, int, bool]] = []

    async def trainer_ready(
        self,
        version: int,
        manifest: WeightManifest | None,
        facts: dict[str, str],
        live: LiveKnobs | None = None,
        is_leading: bool = False,
    ) -> None:
        self.told.append((version, -1 if manifest is None else manifest.version, is_leading))
        assert facts["backend"] == "torch"
        if not is_leading:
            await super().trainer_ready(version, manifest, facts, live)
        self._news.set()

    async def _given(self, manifest: WeightManifest | None) -> None:
        self.given += [manifest.version] if manifest is not None else []
        self._news.set()


@pytest.mark.asyncio
async def test_it_is_told_again_and_the_loop_goes_on(tmp_path: Path):
    make_tiny_model(tmp_path / "model", preset="0p5m", seed=0)
    first = Forgetful()
    async with trainer_room(tmp_path / "model", tmp_path / "run", conductor=first) as room:
        room.data.allow(2)
        await first.steps(2)
        assert first.told == [(0, 0, False)]
        node = room.node
        await node.stop("coordinator", grace_s=0)
        second = Forgetful()
        await node.start(second, name="coordinator")
        await second.until(lambda: bool(second.told), "word from the trainer")
        assert second.told == [(2, 2, True)]
        room.data.allow(5)  # three more versions would not fit beside three that nobody lets go of
        await second.steps(2)
        assert [report.step for report in second.reports[:2]] == [2, 3]
