"""Trainer ranks that each hold a part of the model: published together, asked by reference, released together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.decider import Decider
from tests.integration.trainer_room import FixedStart
from tests.weights.model_tensors import arrays_of, tensors_of
from tests.weights.weight_lab import CONTEXT, VOCAB, engine_of, greedy, own_answer, serving, started
from torch import Tensor

from myxa.actors.contracts import RolloutContract
from myxa.actors.engines.sglang.engine import SglangEngine
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.trainer.checkpoints import CheckpointOptions
from myxa.actors.trainer.step_plan import StepPlanOptions
from myxa.actors.trainer.train_loop import TrainLoopOptions
from myxa.actors.trainer.trainer import Trainer, TrainerOptions
from myxa.actors.weights.channels.sender import DeviceWeightSender, SentChannel
from myxa.actors.weights.publish import ChannelEnd
from myxa.actors.weights.receive import TrainerSenders
from myxa.core.config import AlgoConfig
from myxa.core.errors import MyxaError
from myxa.core.messages import WeightManifest
from myxa.core.process import boot_id
from myxa.core.protocols import NamedArray, StepStats
from myxa.core.weight_channel import PlanRequest, ShareRequest
from myxa.transport.node import Node


class StageBackend:
    """A pipeline stage that "trains" by taking the next folder's weights; training can be made to last."""

    def __init__(self, folders: list[Path], layer: str, takes: bool) -> None:
        self._folders = folders
        self._layer = layer
        self._takes = takes
        self.version = 0
        self.num_exports = self.num_exhausted = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def setup(self):
        return {}

    def exchange(self, text: str) -> tuple[str, ...]:
        return (text, text)  # both begin anew

    def train(self, shard, knobs):
        assert self.may_go_on.wait(30)
        return StepStats(metrics={})

    def export_device(self, *, to_all: bool = False) -> Iterator[tuple[str, Tensor]]:
        self.num_exports += 1
        for name, tensor in tensors_of(self._folders[self.version]):
            if to_all or (self._layer in name) == self._takes:
                yield name, tensor
        self.num_exhausted += 1

    def export_weights(self) -> list[NamedArray]:
        return arrays_of(self._folders[self.version])

    def judge_knobs(self, values):
        return ""

    def close(self) -> None:
        self.may_go_on.set()


def trainer(rank: int, backend: StageBackend, run_dir: Path, channel: SentChannel = "nccl", beside: int = 2) -> Trainer:
    """`beside`: so many ranks, the first ones, are on the GPUs of engines."""
    plan = StepPlanOptions(AlgoConfig(), num_ranks=2, max_tokens=100, minibatches=1)
    leader = TrainLoopOptions(
        world_size=2, num_steps=1, plan=plan, publishes=True, run_dir=str(run_dir),
        checkpoints=CheckpointOptions(run_dir=str(run_dir)), channel=channel,
    )  # fmt: skip
    sender = DeviceWeightSender(
        f"trainer/{rank}", channel=channel, bucket_bytes=1 << 18, host=boot_id(), is_needed=rank < beside
    )
    return Trainer(
        backend=backend,  # pyright: ignore[reportArgumentType]
        end=ChannelEnd(channel, sender=sender),
        options=TrainerOptions(rank=rank, leader=leader),
        start=FixedStart(),
    )


class Asker(RolloutContract):
    """The rollout actor whose calls the engine's are."""


async def serves(engine: SglangEngine, manifest: WeightManifest) -> tuple[list[int], list[float]]:
    """What it answers once it has adopted that version."""
    await engine.prepare_weights(manifest)
    await engine.commit_weights(manifest.version)
    ids, logprobs, versions = await greedy(engine, f"at-{manifest.version}")
    assert versions == {manifest.version}
    return ids, logprobs


@pytest.mark.timeout(60)
async def test_over_a_shared_channel_each_rank_beside_an_engine_has_the_whole_model(tmp_path: Path):
    folders = [tmp_path / f"version{n}" for n in range(2)]
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    stages = [StageBackend(folders, ".layers.1.", takes) for takes in (False, True)]
    senders = TrainerSenders()
    for beside, location in ((2, "trainer/0,trainer/1"), (1, "trainer/0")):
        ranks = [trainer(rank, stages[rank], tmp_path, "cuda_ipc", beside) for rank in (0, 1)]
        node = await Node.attach(name="launcher/0")
        try:
            for rank, actor in enumerate(ranks):
                await node.start(actor, name=f"trainer/{rank}")
            await node.start(asker := Asker(), name="rollout/0")
            senders.speak_as(asker)
            async with asyncio.timeout(30):
                while ranks[0]._leader is None:
                    await asyncio.sleep(0.01)
            for stage in stages:
                stage.num_exports = stage.num_exhausted = 0
            for version in (1, 2):
                manifest = await ranks[0]._leader.publisher.publish(version)
                assert (manifest.location, manifest.channel) == (location, "cuda_ipc")
                assert manifest.num_bytes == sum(tensor.nbytes for _, tensor in tensors_of(folders[0])), "not twice"
                plans = [await senders.ask(name, PlanRequest(version=version)) for name in location.split(",")]
                names = [sorted(t.name for bucket in plan.buckets for t in bucket.tensors) for plan in plans]
                assert names == [sorted(name for name, _ in tensors_of(folders[0]))] * beside
                assert len({(plan.buckets, plan.digest) for plan in plans}) == 1
                with pytest.raises(MyxaError, match='"cuda_ipc" shares GPU memory, but the weights are on cpu'):
                    await senders.ask("trainer/0", ShareRequest(version=version, num_ranks=1))
                if beside == 1:
                    with pytest.raises(MyxaError, match=f"weight version {version} is not staged"):
                        await senders.ask("trainer/1", ShareRequest(version=version, num_ranks=1))
            assert {(s.num_exports, s.num_exhausted) for s in stages} == {(3, 3)}, "gathering takes all, equally often"
            for version in (1, 2):
                await ranks[0].release_weights(version)
            with pytest.raises(MyxaError, match="weight version 2 is not staged"):
                await senders.ask("trainer/0", PlanRequest(version=2))
        finally:
            await node.close(grace_s=1)


@pytest.mark.timeout(90)
async def test_stages_publish_send_and_release_together_while_they_train(tmp_path: Path):
    folders = [tmp_path / f"version{n}" for n in range(2)]
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    stages = [StageBackend(folders, ".layers.1.", takes) for takes in (False, True)]
    first, second = (trainer(rank, stages[rank], tmp_path) for rank in (0, 1))
    asker, senders = Asker(), TrainerSenders()
    node = await Node.attach(name="launcher/0")
    try:
        with serving(folders[0]) as server:
            await node.start(Decider(), name="coordinator")
            await node.start(first, name="trainer/0")
            await node.start(second, name="trainer/1")
            await node.start(asker, name="rollout/0")
            senders.speak_as(asker)
            async with asyncio.timeout(30):
                while first._leader is None:
                    await asyncio.sleep(0.01)
            for stage in stages:
                stage.version = 1
            manifest = await first._leader.publisher.publish(1)
            assert manifest.location == "trainer/0,trainer/1" and manifest.digest.count(",") == 1
            assert manifest.lineage == first.ctx.epoch
            for stage in stages:
                stage.may_go_on.clear()
            training = [asyncio.get_running_loop().run_in_executor(t._thread, s.train, None, {})
                        for t, s in zip((first, second), stages, strict=True)]  # fmt: skip
            async with started(engine_of(server.url, senders)) as engine:
                sent = await serves(engine, manifest)
                assert not any(t.done() for t in training), "nobody waited for the training step"
                for stage in stages:
                    stage.may_go_on.set()
                await asyncio.gather(*training)
                await first.release_weights(1)
                with pytest.raises(MyxaError, match="weight version 1 is not staged"):
                    await senders.ask("trainer/1", PlanRequest(version=1))
        expected = await own_answer(folders[1])
        assert sent[0] == expected[0] and sent[1] == pytest.approx(expected[1], abs=1e-5)
    finally:
        await node.close(grace_s=1)
