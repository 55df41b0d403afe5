"""The true protocol between real processes: trainer's sender -> server, over gloo. Deaths: `test_fault_matrix.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.weights.model_tensors import tensors_of
from tests.weights.weight_lab import CONTEXT, VOCAB, InProcess, Server, engine_of, greedy, own_answer, serving, started

from myxa.actors.models.tiny import make_tiny_model
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.process import boot_id
from myxa.core.weight_channel import LeaveOrder

pytestmark = pytest.mark.timeout(120)
BUCKET_BYTES = 1 << 18


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = [tmp_path_factory.mktemp(f"version{n}") for n in range(3)]
    for seed, folder in enumerate(made):
        make_tiny_model(folder, "0p5m", seed=seed, vocab_size=VOCAB, context_length=CONTEXT)
    return made


@pytest.fixture(scope="module")
def shared(folders: list[Path]) -> Iterator[Server]:
    """A server for the tests that do not kill theirs."""
    with serving(folders[0]) as server:
        yield server


async def answers_like(engine, folder: Path, version: int) -> None:
    ids, logprobs, versions = await greedy(engine, f"v{version}")
    expected_ids, expected_logprobs, _ = await own_answer(folder)
    assert versions == {version}
    assert ids == expected_ids and logprobs == pytest.approx(expected_logprobs, abs=1e-5)


def sender_of():
    sender = DeviceWeightSender("trainer/0", channel="nccl", bucket_bytes=BUCKET_BYTES, host=boot_id())

    def publish(version: int, folder: Path):
        manifest = sender.publish(version, lambda: iter(tensors_of(folder)))
        assert manifest is not None
        return manifest

    return sender, publish


async def test_versions_arrive_whole_while_tokens_flow(folders: list[Path], shared: Server):
    sender, publish = sender_of()
    senders = InProcess(sender)
    async with started(engine_of(shared.url, senders)) as engine:
        flowing = asyncio.gather(*(greedy(engine, f"flow{n}") for n in range(4)))
        for version in (1, 2, 3, 4):
            manifest = publish(version, folders[version % 3])
            await engine.prepare_weights(manifest)
            await engine.commit_weights(version)
            sender.release(version - 1)
        assert all(len(ids) == 24 for ids, _, _ in await flowing)
        await answers_like(engine, folders[1], 4)
        assert len(sender._channels) == 1 and not senders.left, "one group served all versions"
    assert not sender._channels, "and was left at the end"
    sender.close()


async def test_a_transfer_that_breaks_once_is_repeated_through_a_new_group(folders: list[Path], shared: Server):
    sender, publish = sender_of()
    senders = InProcess(sender)

    async def leave(number: int) -> None:
        if number == 3:  # the sender gives up in the middle, once
            for channel in list(sender._channels):
                sender.answer(LeaveOrder(channel=channel, reason="a cable was pulled"))

    async with started(engine_of(shared.url, senders, leave, join_s=20, send_s=10)) as engine:
        await engine.prepare_weights(publish(1, folders[1]))
        await engine.commit_weights(1)
        await answers_like(engine, folders[1], 1)
        assert [r for r in senders.left if "a cable was pulled" in r]
    sender.close()
