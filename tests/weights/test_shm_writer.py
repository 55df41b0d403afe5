"""The trainer's end of the shared-memory channel: no slab is ever lost, whatever fails."""

from __future__ import annotations

import numpy as np
import pytest

from myxa.actors.weights.channels import shm
from myxa.actors.weights.channels.shm import ShmWeightReader, ShmWeightWriter
from myxa.core.errors import TrainError
from myxa.core.messages import TensorSpec
from myxa.core.protocols import NamedArray
from myxa.transport.shm import SlabWriter


def tensor(value: float, num_bytes: int = 400) -> NamedArray:
    spec = TensorSpec(name="w", dtype="float32", shape=(100,), offset=0, num_bytes=num_bytes)
    return NamedArray(spec=spec, data=np.full(100, value, dtype=np.float32).data.cast("B"))


@pytest.fixture
def made(monkeypatch) -> list[SlabWriter]:
    """Every slab that is made."""
    slabs: list[SlabWriter] = []
    create = SlabWriter.create

    def noted(capacity_bytes: int) -> SlabWriter:
        slabs.append(create(capacity_bytes))
        return slabs[-1]

    monkeypatch.setattr(shm.SlabWriter, "create", noted)
    return slabs


def test_a_slab_that_could_not_be_written_is_used_again_and_freed_at_the_end(made: list[SlabWriter]):
    writer = ShmWeightWriter("here")
    for version in range(1, 6):
        with pytest.raises(TrainError, match=f"weight version {version} was not published: w: 400 bytes"):
            writer.publish(version, [tensor(0.0, num_bytes=416)])
    first = writer.publish(6, [tensor(6.0)])
    assert len(made) == 1
    reader = ShmWeightReader()
    with reader.open(first) as arrays:
        assert np.frombuffer(arrays["w"].data, dtype=np.float32).tolist() == [6.0] * 100
    reader.close()
    writer.close()
    assert all(slab._fd < 0 for slab in made)
