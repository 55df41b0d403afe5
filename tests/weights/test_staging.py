"""Staging copies: right bytes, held while they are read, used again after; and the digest that proves them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from myxa.actors.weights.channels.staging import ROW_BYTES, Staging, buffer_mark, join_marks, padded_bytes, place
from myxa.actors.weights.publish import max_unreleased
from myxa.actors.weights.rollout_update import Adoption
from myxa.core.errors import TrainError
from myxa.core.messages import WeightManifest

SEED = 5


def model(seed: int) -> list[tuple[str, Tensor]]:
    maker = torch.Generator().manual_seed(seed)
    return [
        (f"model.layers.{n}.mlp.{kind}_proj.weight", torch.randn(7, 5 + n, generator=maker).to(dtype))
        for n in range(4)
        for kind, dtype in (("up", torch.bfloat16), ("down", torch.float32))
    ]


def test_a_staged_version_holds_the_tensors_bit_for_bit():
    staging = Staging(200)
    for version in (1, 2, 3):
        staged = staging.publish(version, partial(lambda v: iter(model(v)), version))
        assert staged is not None and len(staged.buffers.plan.buckets) > 1
        for number, bucket in enumerate(staged.buffers.plan.buckets):
            for spec in bucket.tensors:
                assert torch.equal(place(staged.buffers.bucket(number), spec), dict(model(version))[spec.name])
        staging.release(version - 1)


def test_memory_is_used_again_only_when_released_and_read_to_the_end():
    staging = Staging(1 << 20)
    first = staging.publish(1, lambda: iter(model(1)))
    assert first is not None
    reading = staging.read(1)
    staging.release(1)
    second = staging.publish(2, lambda: iter(model(2)))
    assert second is not None and second.buffers is not first.buffers, "version 1 is still being read"
    staging.done(reading)
    third = staging.publish(3, lambda: iter(model(3)))
    assert third is not None and third.buffers is first.buffers, "and now it is not"
    with pytest.raises(TrainError, match="version 1 is not staged"):
        staging.read(1)


def test_a_trainer_stages_as_many_versions_as_the_plan_counts():
    """The newest stays for engines that come late, so the next one needs other memory, however fast engines adopt."""
    staging, adoption, held = Staging(1 << 20), Adoption(), list[object]()
    adoption.arrived("rollout/0", 1)
    adoption.joined("rollout/0", 1)
    for version in range(5):
        staged = staging.publish(version, lambda: iter(model(1)))
        assert staged is not None
        held += [staged.buffers] if all(staged.buffers is not one for one in held) else []
        adoption.published(
            WeightManifest(version=version, channel="nccl", location="", num_bytes=1, tensors=(), digest="", host="")
        )
        assert adoption.next() is not None and adoption.adopted("rollout/0", 1, version)
        for old in adoption.releasable():
            staging.release(old)
    assert len(held) == max_unreleased("nccl")


def test_a_model_that_changes_is_refused_by_name():
    staging = Staging(1 << 20)
    staging.publish(1, lambda: iter(model(1)))
    with pytest.raises(TrainError, match="7 of 8"):
        staging.publish(2, lambda: iter(model(2)[:-1]))
    stranger = ("model.layers.0.mlp.up_proj.weight", torch.zeros(2, 2))
    with pytest.raises(TrainError, match=r"layers.0.mlp.up_proj.weight came as torch.float32 \[2, 2\]"):
        staging.publish(2, lambda: iter([stranger, *model(2)[1:]]))


def test_a_rank_that_hands_nothing_over_stages_nothing():
    staging = Staging(1 << 20)
    assert staging.publish(1, lambda: iter([])) is None
    assert staging.device is None


def reference_mark(raw: bytes) -> str:
    """The definition, in whole numbers."""
    words = np.frombuffer(raw, dtype="<i8").astype(object).reshape(-1, ROW_BYTES // 8)
    rows, columns = words.sum(axis=1), words.sum(axis=0)
    total = sum(int(r) * (2 * n + 1) for n, r in enumerate(rows))
    total += sum(int(c) * n * 4354685564936845354 for n, c in enumerate(columns))
    return f"{total % (1 << 64):016x}"


def test_the_digest_is_what_it_is_defined_to_be_and_finds_changes():
    maker = np.random.default_rng(SEED)
    raw = bytearray(maker.integers(0, 256, 3 * ROW_BYTES, dtype=np.uint8).tobytes())

    def mark(data: bytearray) -> str:
        return join_marks([buffer_mark(torch.frombuffer(bytearray(data), dtype=torch.uint8))])

    whole = mark(raw)
    assert whole == reference_mark(bytes(raw))
    for _ in range(64):  # one bit anywhere
        at, bit = int(maker.integers(len(raw))), int(maker.integers(8))
        raw[at] ^= 1 << bit
        assert mark(raw) != whole
        raw[at] ^= 1 << bit
    for first, second in ((0, 8), (0, ROW_BYTES), (8, ROW_BYTES + 16), (ROW_BYTES, 2 * ROW_BYTES)):
        swapped = bytearray(raw)
        swapped[first : first + 8], swapped[second : second + 8] = raw[second : second + 8], raw[first : first + 8]
        assert mark(swapped) != whole
    torn = raw[: 2 * ROW_BYTES] + bytes(ROW_BYTES)
    assert mark(torn) != whole
    assert padded_bytes(1) == padded_bytes(ROW_BYTES) == ROW_BYTES and padded_bytes(ROW_BYTES + 1) == 2 * ROW_BYTES
