"""Both weight channels: what is published is what is read, and nothing torn, altered or gone is ever handed out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from myxa.actors.models.tiny import init_weights, make_tiny_model, tiny_config
from myxa.actors.weights.channels import host
from myxa.actors.weights.channels.host import make_writer, read_version
from myxa.core.config import RunConfig
from myxa.core.errors import EngineError, TrainError
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


def read(manifest: WeightManifest) -> dict[str, bytes]:
    with read_version(manifest) as found:
        return {name: bytes(tensor.data) for name, tensor in found.items()}


def test_what_is_published_is_read_until_it_is_released_and_overwritten(writer: WeightWriter) -> None:
    manifests = [writer.publish(version, tensors(version)) for version in range(3)]
    for version, manifest in enumerate(manifests):
        assert read(manifest) == {t.spec.name: bytes(t.data) for t in tensors(version)}
    writer.release(0)
    last = writer.publish(3, tensors(3))
    with pytest.raises(EngineError, match="weight version 0"):
        read(manifests[0])
    assert read(last) == {t.spec.name: bytes(t.data) for t in tensors(3)}


def test_a_digest_that_does_not_fit_is_refused(writer: WeightWriter) -> None:
    manifest = msgspec.structs.replace(writer.publish(0, tensors(0)), digest="crc32:00000000")
    with pytest.raises(EngineError, match="digest"):
        read(manifest)


def test_shared_memory_stays_as_it_is_while_it_is_read_and_is_no_other_hosts(tmp_path: Path) -> None:
    writer = make_writer("shm", tmp_path, tmp_path)
    manifest = writer.publish(0, tensors(0))
    with pytest.raises(EngineError, match=r"another host \(elsewhere\)"):
        read(msgspec.structs.replace(manifest, host="elsewhere"))
    with read_version(manifest) as found:
        writer.release(0)
        writer.publish(0, tensors(1))
        assert {name: bytes(tensor.data) for name, tensor in found.items()} == {
            t.spec.name: bytes(t.data) for t in tensors(0)
        }
        assert all(tensor.data.readonly for tensor in found.values())
    writer.close()


@pytest.mark.parametrize("place", ["/etc/passwd", "/proc/1/fd/999", "/proc/self/fd/0", "", "pipe"])
def test_what_is_no_shared_memory_of_a_trainer_is_not_opened(tmp_path: Path, place: str) -> None:
    ends = os.pipe()
    writer = make_writer("shm", tmp_path, tmp_path)
    manifest = writer.publish(0, tensors(0))
    location = f"/proc/{os.getpid()}/fd/{ends[0]}" if place == "pipe" else place
    with pytest.raises(EngineError, match="weight version 0"):
        read(msgspec.structs.replace(manifest, location=location))
    (first, *rest) = manifest.tensors
    outside = msgspec.structs.replace(first, offset=1 << 40)
    with pytest.raises(EngineError, match="lies outside"):
        read(msgspec.structs.replace(manifest, tensors=(outside, *rest)))
    writer.close()
    for end in ends:
        os.close(end)


def test_too_much_is_refused_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = make_writer("shm", tmp_path, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    with pytest.raises(TrainError, match=r"weight version 0 was not published: no shared memory of \d+ bytes: 1000"):
        writer.publish(0, tensors(0))
    assert len(os.listdir("/proc/self/fd")) == before


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
        read(old[1])
    assert read(manifest) == {t.spec.name: bytes(t.data) for t in tensors(2)}
    assert await leader.publish(3, backend, at_once, (2,)) is not None
    assert read(manifest), "only what was there before the first"
    leader.close()
    assert not folder.exists()
    for ends in (leader, other_rank):
        ends.thread.shutdown()


def test_memory_is_freed_with_its_version(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = make_writer("shm", tmp_path, tmp_path)
    for version in range(12):
        manifest = writer.publish(version, tensors(version))
        assert read(manifest)
        writer.release(version - 1)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "memfd:myxa-weights" not in Path("/proc/self/maps").read_text()
