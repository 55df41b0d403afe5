"""Trainer ranks that each hold a part of the model: published together, asked by reference, released together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_tensors import tensors_of
from torch import Tensor
from weight_lab import CONTEXT, VOCAB, engine_of, greedy, serving, started

from myxa.actors.engines.embedded.engine import EmbeddedEngine
from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.rollout.weight_senders import TrainerSenders
from myxa.actors.trainer.checkpoints import CheckpointOptions
from myxa.actors.trainer.leader_options import LeaderOptions
from myxa.actors.trainer.step_plan import PlanOptions
from myxa.actors.trainer.trainer import Trainer, TrainerOptions
from myxa.actors.weights.sender import DeviceWeightSender
from myxa.core.actor import Actor
from myxa.core.clock import SystemClock
from myxa.core.errors import MyxaError
from myxa.core.host import boot_id
from myxa.core.protocols import StepStats
from myxa.transport.node import Node


class StageBackend:
    """A pipeline stage that "trains" by taking the next folder's weights; training can be made to last."""

    def __init__(self, folders: list[Path], layer: str, takes: bool) -> None:
        self._folders = folders
        self._layer = layer
        self._takes = takes
        self.version = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def setup(self):
        return {}

    def exchange(self, text: str) -> tuple[str, ...]:
        return (text, text)  # both begin anew

    def train(self, shard, knobs):
        assert self.may_go_on.wait(30)
        return StepStats(metrics={})

    def export_device(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors_of(self._folders[self.version]):
            if (self._layer in name) == self._takes:
                yield name, tensor

    def close(self) -> None:
        self.may_go_on.set()


def trainer(rank: int, backend: StageBackend, run_dir: Path) -> tuple[Trainer, DeviceWeightSender]:
    plan = PlanOptions(kind="grpo", normalise_std=True, num_ranks=2, max_tokens=100, minibatches=1)
    leader = LeaderOptions(
        world_size=2, num_steps=1, plan=plan, publishes=True, run_dir=str(run_dir),
        checkpoints=CheckpointOptions(run_dir=str(run_dir)), max_unreleased=2,
    )  # fmt: skip
    sender = DeviceWeightSender(f"trainer/{rank}", channel="nccl", bucket_bytes=1 << 18, host=boot_id())
    made = Trainer(
        backend=backend,  # pyright: ignore[reportArgumentType]
        writer=None,
        sender=sender,
        options=TrainerOptions(rank=rank, leader=leader),
        clock=SystemClock(),
    )
    return made, sender


class Asker(Actor):
    """The rollout actor whose calls the engine's are."""


@pytest.mark.asyncio
@pytest.mark.timeout(90)
async def test_stages_publish_send_and_release_together_while_they_train(tmp_path: Path):
    folders = [tmp_path / f"version{n}" for n in range(2)]
    for seed, folder in enumerate(folders):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    stages = [StageBackend(folders, ".layers.1.", takes) for takes in (False, True)]
    (first, first_sender), (second, second_sender) = (trainer(r, stages[r], tmp_path) for r in (0, 1))
    asker, senders = Asker(), TrainerSenders()
    node = await Node.attach(name="launcher/0")
    try:
        with serving(folders[0]) as server:
            await node.start(first, name="trainer/0")
            await node.start(second, name="trainer/1")
            await node.start(asker, name="rollout/0")
            senders.speak_as(asker)
            async with asyncio.timeout(30):
                while first._leader is None:
                    await asyncio.sleep(0.01)
            for stage in stages:
                stage.version = 1
            manifest = await first._leader._publisher.publish(1)
            assert manifest.location == "trainer/0,trainer/1" and manifest.digest.count(",") == 1
            assert manifest.lineage == first.ctx.epoch
            for stage in stages:
                stage.may_go_on.clear()
            training = [asyncio.get_running_loop().run_in_executor(t._thread, s.train, None, {})
                        for t, s in zip((first, second), stages, strict=True)]  # fmt: skip
            async with started(engine_of(server.url, senders)) as engine:
                await engine.prepare_weights(manifest)
                await engine.commit_weights(1)
                ids, logprobs, versions = await greedy(engine, "after")
            assert versions == {1} and not any(t.done() for t in training), "nobody waited for the training step"
            await first.release_weights(1)
            for sender in (first_sender, second_sender):
                with pytest.raises(MyxaError, match="version 1 is not staged"):
                    sender._staging.read(1)
            for stage in stages:
                stage.may_go_on.set()
            await asyncio.gather(*training)
        own = EmbeddedEngine(folders[1])
        await own.start()
        expected = await greedy(own, "own")
        await own.close()
        assert ids == expected[0] and logprobs == pytest.approx(expected[1], abs=1e-5)
    finally:
        await node.close(grace_s=1)
