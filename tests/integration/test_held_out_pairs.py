"""Comparing held-out pairs between steps: it gives way to the end of a run, and a rank that fails there ends the gang."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.harness.waiting import until
from tests.integration.trainer_room import make_group, trainer_room

from myxa.actors.contracts import TrainerContract
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.errors import CallError, TrainError
from myxa.core.messages import EvalRequest, SamplingParams, WeightManifest
from myxa.core.protocols import StepStats
from myxa.core.samples import Group, Message, Prompt, TrainShard

PAIRS = {"kind": "dpo"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, preset="0p5m", seed=0)
    return folder


def held_out(num: int) -> EvalRequest:
    row = (Message(role="user", content="q"),)
    prompts = tuple(Prompt(group_id=-10 - at, row=at, pass_index=0, messages=row) for at in range(num))
    return EvalRequest(prompts=prompts, num_samples=1, sampling=SamplingParams(max_new_tokens=1))


def pair(prompt: Prompt) -> Group:
    return make_group(-prompt.group_id, 0)


async def test_a_stop_waits_for_no_held_out_pairs(model: Path, tmp_path: Path) -> None:
    made: list[Prompt] = []

    def make(prompt: Prompt) -> Group:
        made.append(prompt)
        return pair(prompt)

    async with trainer_room(model, tmp_path, algo=PAIRS, make_pair=make) as room:
        trainer = room.conductor.trainer
        room.data.allow(1)
        await room.conductor.steps(1)
        asked = asyncio.ensure_future(trainer.evaluate(held_out(1000)))
        await until(lambda: len(made) == 1000, "all pairs are made")
        await trainer.stop_leader("enough")
        with pytest.raises(TrainError, match="stops before"):
            await asked
        await asyncio.wait_for(room.conductor.finished.wait(), 30)
        found = await trainer.evaluate(held_out(8))
        assert (found.num_samples, found.newest_version) == (16, 1), "after the end nothing has to wait"


class FailsWhereItIsHeldOut(TrainerContract):
    """Another rank."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def train_shard(self, shard: TrainShard, knobs: dict[str, float]) -> StepStats:
        if shard.is_held_out:
            raise TrainError("out of memory")
        self.steps.append(shard.step)
        return StepStats(metrics={})

    async def publish(self, version: int, unreleased: tuple[int, ...]) -> WeightManifest | None:
        return None


async def test_a_rank_that_fails_in_an_evaluation_ends_the_gang_before_another_step(
    model: Path, tmp_path: Path
) -> None:
    """The others may wait for it in a collective: they cannot be called again."""
    second = FailsWhereItIsHeldOut()
    async with trainer_room(model, tmp_path, algo=PAIRS, make_pair=pair, second=second) as room:
        room.data.allow(1)
        await room.conductor.steps(1)
        with pytest.raises(TrainError, match="trainer/1 failed"):
            await room.conductor.trainer.evaluate(held_out(8))
        room.data.allow(9)
        with pytest.raises(CallError):
            while True:
                await room.conductor.trainer.evaluate(held_out(1))
        assert second.steps == [0]
