"""Both weight channels: what is published is what is read, and nothing torn, altered or gone is ever handed out."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from myxa.actors.models.tiny import init_weights, make_tiny_model, tiny_config
from myxa.actors.weights.channels.reader import ChannelReader, make_writer
from myxa.core.config import RunConfig
from myxa.core.errors import EngineError
from myxa.core.messages import WeightChannel, WeightManifest
from myxa.core.protocols import NamedArray, WeightWriter
from myxa.launch.composition.trainer_parts import channel_end

CONFIG = tiny_config("0p5m")


def tensors(version: int) -> list[NamedArray]:
    return init_weights(CONFIG, seed=version)


@pytest.fixture(params=["shm", "disk"])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> WeightWriter:
    make_tiny_model(tmp_path / "model", preset="0p5m", seed=0)
    made = make_writer(request.param, tmp_path / "weights", tmp_path / "model")
    request.addfinalizer(made.close)
    return made


def read(reader: ChannelReader, manifest: WeightManifest) -> dict[str, bytes]:
    with reader.open(manifest) as found:
        return {name: bytes(tensor.data) for name, tensor in found.items()}


def test_what_is_published_is_read_until_it_is_released_and_overwritten(writer: WeightWriter) -> None:
    reader = ChannelReader()
    manifests = [writer.publish(version, tensors(version)) for version in range(3)]
    for version, manifest in enumerate(manifests):
        assert read(reader, manifest) == {t.spec.name: bytes(t.data) for t in tensors(version)}
    writer.release(0)
    last = writer.publish(3, tensors(3))
    with pytest.raises(EngineError, match="weight version 0"):
        read(reader, manifests[0])
    assert read(reader, last) == {t.spec.name: bytes(t.data) for t in tensors(3)}


def test_a_digest_that_does_not_fit_is_refused(writer: WeightWriter) -> None:
    manifest = msgspec.structs.replace(writer.publish(0, tensors(0)), digest="crc32:00000000")
    with pytest.raises(EngineError, match="digest"):
        read(ChannelReader(), manifest)


def test_overwriting_during_the_read_and_shared_memory_of_another_host_are_noticed(tmp_path: Path) -> None:
    writer = make_writer("shm", tmp_path, tmp_path)
    manifest = writer.publish(0, tensors(0))
    with pytest.raises(EngineError, match=r"another host \(elsewhere\)"):
        read(ChannelReader(), msgspec.structs.replace(manifest, host="elsewhere"))
    with pytest.raises(EngineError, match="was overwritten while it was read"), ChannelReader().open(manifest):
        writer.release(0)
        writer.publish(1, tensors(1))
    writer.close()


class Backend:
    def export_weights(self) -> list[NamedArray]:
        return tensors(2)


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


@pytest.mark.parametrize("channel", ["disk", "shm"])
async def test_a_killed_trainers_folders_go_with_the_next_version(tmp_path: Path, channel: WeightChannel) -> None:
    """By whatever channel that goes. The ends are those of a run."""
    make_tiny_model(tmp_path / "model", preset="0p5m", seed=0)
    folder, backend = tmp_path / "weights", cast(Any, Backend())
    killed = make_writer("disk", folder, tmp_path / "model")
    old = [killed.publish(version, tensors(version)) for version in (3, 4)]
    run = RunConfig.model_validate(
        {"model": {"path": str(tmp_path / "model")}, "data": {"train": "d.jsonl"}, "weights": {"channel": channel}}
    )
    other_rank = channel_end(run, tmp_path, 1, local_rank=1)
    assert await other_rank.publish(2, backend, at_once) is None
    assert len(list(folder.iterdir())) == 2, "the others leave it to rank 0"
    leader = channel_end(run, tmp_path, 0, local_rank=0)
    manifest = await leader.publish(2, backend, at_once)
    assert manifest is not None
    assert [path.name for path in folder.glob("*")] == (["version_00000002"] if channel == "disk" else [])
    with pytest.raises(EngineError, match="weight version 4"):
        read(ChannelReader(), old[1])
    assert read(ChannelReader(), manifest) == {t.spec.name: bytes(t.data) for t in tensors(2)}
    assert await leader.publish(3, backend, at_once, (2,)) is not None
    assert read(ChannelReader(), manifest), "only what was there before the first"
    leader.close()
    assert not folder.exists()
    for ends in (leader, other_rank):
        ends.thread.shutdown()


def test_slabs_of_a_trainer_that_ended_are_let_go(tmp_path: Path) -> None:
    first, second = make_writer("shm", tmp_path, tmp_path), make_writer("shm", tmp_path, tmp_path)
    reader = ChannelReader()
    before = mapped_slabs()
    old = first.publish(7, tensors(7))
    assert read(reader, old)
    assert mapped_slabs() == before + 2, "the writer's and the reader's"
    manifest = second.publish(4, tensors(4))
    first.close()
    assert mapped_slabs() == before + 2, "the reader still holds what nobody offers any more"
    assert read(reader, manifest), "an older number is as good as any"
    assert mapped_slabs() == before + 2
    reader.close()
    second.close()


def mapped_slabs() -> int:
    return sum("myxa-slab" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_slabs_are_reused_and_freed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = make_writer("shm", tmp_path, tmp_path)
    for version in range(12):
        writer.publish(version, tensors(version))
        writer.release(version - 1)
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "two slabs, two descriptors each"
    writer.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
