"""What a trainer does while it waits: it finishes the checkpoint that is being written, it begins none over one that is
still at work, it ends although a disk hangs, and it takes no order that was given to the gang before."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.harness.waiting import until
from tests.harness.waits import waits
from tests.integration.trainer_room import BATCH, Conductor, Room, make_group, trainer_room

from myxa.actors.checkpoints.folder import RUN_FILE
from myxa.actors.contracts import TrainerContract
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.trainer import train_loop as leader_module
from myxa.core.errors import StalenessError
from myxa.core.knobs import LiveKnobs
from myxa.core.messages import WeightManifest

HANG_S = 15.0
"""What hangs here ends then, so that a trainer that waits for it fails the test and does not hang it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, preset="0p5m", seed=0)
    return folder


async def test_a_checkpoint_beside_training_is_finished_although_no_step_follows(model: Path, tmp_path: Path):
    async with trainer_room(model, tmp_path, checkpoints={"checkpoint_every": 1, "async_save": True}) as room:
        for version, blocked_by in enumerate(("wait-data", "paused"), 1):
            room.data.blocked_by = blocked_by
            room.data.allow(version)
            await until(lambda at=version: len(room.data.durables) >= at, "the checkpoint", timeout_s=HANG_S)
            assert room.data.durables == list(range(1, version + 1))
            assert (tmp_path / "checkpoints" / f"version_0000000{version}" / RUN_FILE).exists()
            assert len(room.conductor.reports) == version


async def five_claims(room: Room) -> None:
    wanted = len(room.data.claims) + 5
    await until(lambda: len(room.data.claims) >= wanted, "more claims", timeout_s=HANG_S)


class Turns:
    """Of trainer and engines on one device; says who has it."""

    has_newcomers = False

    def __init__(self) -> None:
        self.log: list[str] = []

    async def take(self) -> None:
        self.log.append("take")

    def trained(self) -> None: ...

    async def offer(self) -> None: ...

    async def give(self) -> None:
        self.log.append("give")

    def metrics(self) -> dict[str, float]:
        return {}


class TakesAtOnce(Conductor):
    """Engines that copy what they are given, as on a device that they share."""

    async def _given(self, manifest: WeightManifest | None) -> None:
        if manifest is not None:
            self.given.append(manifest.version)
            self.ctx.spawn(self.trainer.release_weights(manifest.version), name="release")
        self._news.set()


async def test_where_engines_have_the_device_it_is_finished_with_the_next_step(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(leader_module, "TIMEOUTS", waits(trainer={"claim_s": 0.05}))
    options = {"checkpoint_every": 1, "async_save": True}
    async with trainer_room(model, tmp_path, checkpoints=options, conductor=TakesAtOnce()) as room:
        leader: Any = room.trainer._leader
        turns = leader.share = Turns()
        room.data.allow(1)
        await room.conductor.steps(1)
        checkpoints = leader.checkpoints
        await until(lambda: checkpoints.is_written, "the files", timeout_s=HANG_S)
        await five_claims(room)
        assert (turns.log, room.data.durables) == (["take", "give"], []), "the engines work: no turn for that yet"
        room.data.allow(2)
        await until(lambda: room.data.durables[:1] == [1], "the next step", timeout_s=HANG_S)
        assert (tmp_path / "checkpoints" / "version_00000001" / RUN_FILE).exists()


class SlowSave:
    """A rank's part of a checkpoint that is long in coming."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.has_ended = False

    def write(self) -> None:
        self.may_end.wait(HANG_S)
        self.has_ended = True

    def finish(self) -> None: ...


async def test_a_rank_begins_no_checkpoint_over_one_that_it_is_still_writing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with trainer_room(model, tmp_path) as room:
        saves: list[SlowSave] = []

        def begin_save(folder: str, extra: dict[str, Any]) -> SlowSave:
            assert all(save.has_ended for save in saves), "two would write files of the same names"
            saves.append(SlowSave())
            return saves[-1]

        monkeypatch.setattr(room.trainer.backend, "begin_save", begin_save)
        rank = room.node.ref(TrainerContract, "trainer/0")
        await rank.begin_checkpoint("somewhere", LiveKnobs())
        again = asyncio.create_task(rank.begin_checkpoint("somewhere", LiveKnobs()))
        await asyncio.sleep(0.1)
        assert len(saves) == 1
        saves[0].may_end.set()
        await again
        assert len(saves) == 2
        saves[1].may_end.set()
        await rank.finish_checkpoint()


async def test_it_ends_although_a_publication_hangs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_end, hangs = threading.Event(), threading.Event()

    def publish(version: int, tensors: Any) -> None:
        hangs.set()
        may_end.wait(4 * HANG_S)

    async with trainer_room(model, tmp_path) as room:
        monkeypatch.setattr(room.trainer.end._writer, "publish", publish)
        room.data.allow(1)
        while not hangs.is_set():
            await asyncio.sleep(0.01)
        release = threading.Timer(HANG_S, may_end.set)
        release.start()
        await room.node.stop("trainer/0", grace_s=0)
        assert not may_end.is_set(), "it waited for what may hang for ever"
        release.cancel()
        may_end.set()


async def test_a8_a_batch_with_a_token_beyond_the_bound_ends_the_run_and_is_not_trained(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The buffer chose step 1's groups for max_staleness = 0; one that it hands out holds a token of version 0."""
    async with trainer_room(model, tmp_path) as room:

        async def fetch(group_ids: tuple[int, ...]) -> tuple[object, ...]:
            return tuple(make_group(g, 0 if g == BATCH + 1 else g // BATCH) for g in group_ids)

        monkeypatch.setattr(room.data, "fetch", fetch)
        room.data.allow(3)
        error = await room.node.failed
        assert isinstance(error, StalenessError), error
        assert "step 1 was given group 5 with tokens of version 0" in str(error)
        assert [report.step for report in room.conductor.reports] == [0]
