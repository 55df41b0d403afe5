"""Versions as deltas over the disk channel: equal to the bit over random updates; torn, hostile, missing and strange
files; actors that restart in the middle of a chain; versions that are released; a whole run."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tests.harness.run_job import events, make_job, metrics
from tests.weights.weight_lab import serving

from myxa.actors.models.safetensors_file import write_safetensors
from myxa.actors.models.tiny import init_weights, make_tiny_model, tiny_config
from myxa.actors.weights.channels.delta import decode, encode
from myxa.actors.weights.channels.host import DiskWeightWriter, RebuiltFolder, read_version
from myxa.core.errors import EngineError, MyxaError, PeerDied, RemoteError, TrainError
from myxa.core.messages import TensorSpec, WeightManifest
from myxa.core.protocols import NamedArray
from myxa.core.weight_channel import FETCH_BYTES, FetchReply, FetchRequest

SEED = int.from_bytes(os.urandom(4), "little")
CONFIG = tiny_config("0p5m")


@pytest.fixture(autouse=True)
def said() -> None:
    print(f"seed {SEED}")


class Model:
    """Weights that change at random, and a writer of every fourth version as a whole."""

    def __init__(self, folder: Path, full_every: int = 4) -> None:
        make_tiny_model(folder / "model", preset="0p5m", seed=0)
        self.root, self.random = folder / "weights", np.random.default_rng(SEED)
        self.writer = DiskWeightWriter(self.root, folder / "model", "here", full_every)
        self.bytes = {t.spec.name: np.frombuffer(t.data, np.uint8).copy() for t in init_weights(CONFIG, seed=1)}
        self.specs = [t.spec for t in init_weights(CONFIG, seed=1)]
        self.version = -1

    def publish(self, share: float = 0.02) -> WeightManifest:
        """The next version: so many of its bytes are others, in half of the tensors."""
        self.version += 1
        for whole in self.bytes.values():
            if self.random.random() < 0.5:
                places = self.random.random(whole.size) < share
                whole[places] = self.random.integers(0, 256, int(places.sum()), np.uint8)
        return self.writer.publish(self.version, self.arrays())

    def arrays(self) -> list[NamedArray]:
        return [NamedArray(spec=spec, data=self.bytes[spec.name].data) for spec in self.specs]

    def is_in(self, manifest: WeightManifest) -> bool:
        assert not manifest.deltas
        with read_version(manifest) as found:
            return {name: bytes(t.data) for name, t in found.items()} == {k: v.tobytes() for k, v in self.bytes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    made = Model(tmp_path)
    yield made
    made.writer.close()
    assert not made.root.exists()


@pytest.fixture
def rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RebuiltFolder]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    made = RebuiltFolder()
    yield made
    asyncio.run(made.close())
    assert not os.listdir(tmp_path / "scratch"), "nothing is left of it"


def take(rebuilt: RebuiltFolder, manifest: WeightManifest) -> tuple[WeightManifest, str]:
    """As a rollout actor does."""
    if manifest.deltas:
        return rebuilt.rebuild(manifest)
    rebuilt.seen(manifest)
    return manifest, ""


@pytest.mark.parametrize("kind", ["u1", "u2", "u4", "u8"])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.02, 0.5, 1.0])
def test_a_delta_makes_the_new_numbers_of_the_old_to_the_bit(kind: str, share: float) -> None:
    dice = np.random.default_rng(SEED)
    for size in (1, 2, 255, 256, 257, 70_001):
        old = dice.integers(0, np.iinfo(kind).max, size, kind, endpoint=True)
        new = np.where(dice.random(size) < share, dice.integers(0, np.iinfo(kind).max, size, kind), old)
        data, found = encode(old, new), old.copy()
        if data:
            decode(data, found)
        assert bool(data) == bool((old != new).any())
        assert np.array_equal(found, new)


def test_bytes_that_are_no_delta_change_nothing() -> None:
    dice, old = random.Random(SEED), np.arange(5000, dtype=np.uint16)
    good = encode(old, old * 3)
    torn = [good[:cut] for cut in (0, 1, len(good) // 2, len(good) - 1)]
    flipped = [good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :] for at in dice.sample(range(len(good)), 40)]
    bomb = zlib.compress(bytes(1 << 26))
    beyond = zlib.compress(b"\xff" * 30 + b"\0") + zlib.compress(bytes(2))
    for bad in [*torn, bomb + bomb, beyond, good + b"x", zlib.compress(b"\xff") + zlib.compress(b"")]:
        words = old.copy()
        with pytest.raises(ValueError):
            decode(bad, words)
        assert np.array_equal(words, old)
    for bad in flipped:
        words = old.copy()
        try:
            decode(bad, words)
        except ValueError:
            assert np.array_equal(words, old)
        else:
            assert np.array_equal(words, old * 3), "a bit that means nothing"


def test_every_version_is_rebuilt_to_the_bit_and_all_of_it_goes(model: Model, rebuilt: RebuiltFolder) -> None:
    forms, manifest = "", model.publish()
    for number in range(10):
        manifest = model.publish() if number else manifest
        forms += "d" if manifest.deltas else "F"
        made, why = take(rebuilt, manifest)
        assert model.is_in(made) and not why
        assert model.is_in(take(rebuilt, manifest)[0]), "asked again"
        model.writer.release(model.version - 1)
        needed = len(manifest.deltas) + 1
        assert len(list(model.root.iterdir())) == needed, "older chains are gone"
    assert forms == "FdddFdddFd"
    assert all(delta.num_bytes < manifest.num_bytes / 4 for delta in manifest.deltas)


def test_an_engine_skips_versions_and_one_that_comes_late_begins_with_the_full_folder(
    model: Model, rebuilt: RebuiltFolder
) -> None:
    take(rebuilt, model.publish())
    model.publish()
    made, why = take(rebuilt, model.publish())
    assert model.is_in(made) and not why, "two deltas at once"
    late = RebuiltFolder()
    made, why = take(late, model.publish())
    assert model.is_in(made)
    assert "version 3 is made from" in why and "version_00000000" in why and "(nothing)" in why
    asyncio.run(late.close())
    assert not list(Path(made.location).parent.glob("*"))


@pytest.mark.parametrize("harm", ["held", "delta", "base"])
def test_what_is_damaged_is_told_and_never_served(model: Model, rebuilt: RebuiltFolder, harm: str) -> None:
    full = model.publish()
    take(rebuilt, full)
    held, _ = take(rebuilt, model.publish())
    manifest = model.publish()
    if harm == "held":
        flip(next(Path(held.location).glob("*.safetensors")))
        made, why = take(rebuilt, manifest)
        assert model.is_in(made) and "does not match its digest" in why and full.location in why
        return
    flip(Path(manifest.deltas[-1].path) if harm == "delta" else next(Path(full.location).glob("*.safetensors")))
    if harm == "base":
        assert model.is_in(take(rebuilt, manifest)[0]), "what is held is enough"
        rebuilt = RebuiltFolder()
    for _ in range(2):
        with pytest.raises(EngineError, match=f"weight version 2 cannot be made from {full.location} and 2 deltas"):
            take(rebuilt, manifest)
    again = model.writer.publish(2, model.arrays())
    assert not again.deltas, "what is published again is whole"
    assert model.is_in(take(rebuilt, again)[0]) and model.is_in(take(rebuilt, model.publish())[0])
    asyncio.run(rebuilt.close())


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1 - len(content) // 5] ^= 1
    file.write_bytes(content)


def test_hostile_deltas_are_refused(model: Model, rebuilt: RebuiltFolder, tmp_path: Path) -> None:
    take(rebuilt, model.publish())
    manifest = model.publish()
    good = Path(manifest.deltas[0].path).read_bytes()
    name = model.specs[0].name
    for number, content in enumerate((b"", b"\xff" * 64, good[: len(good) // 2], None, f"0/{name}", "9/x", "../../x")):
        file = tmp_path / f"bad{number}"
        if isinstance(content, str):
            spec = TensorSpec(name=content, dtype="uint8", shape=(5,), offset=0, num_bytes=5)
            write_safetensors(file, [NamedArray(spec=spec, data=memoryview(b"\x78\x01abc"))])
        elif content is not None:
            file.write_bytes(content)
        bad = replace(manifest, deltas=(replace(manifest.deltas[0], path=str(file)),))
        with pytest.raises(EngineError, match="cannot be made from"):
            take(rebuilt, bad)
    assert model.is_in(take(rebuilt, manifest)[0]), "and nothing of them stays"


def test_a_trainer_that_begins_again_and_other_tensors_are_told_apart(
    model: Model, rebuilt: RebuiltFolder, tmp_path: Path
) -> None:
    for _ in range(3):
        take(rebuilt, model.publish())
    again = Model(tmp_path)
    again.random = np.random.default_rng(SEED + 1)
    again.publish()
    for _ in range(2):
        made, why = take(rebuilt, again.publish(0.3))
        assert again.is_in(made)
        assert ("is the base of none" in why) == (again.version == 1), "the same numbers, of other weights"
    fewer = again.arrays()[1:]
    assert not again.writer.publish(9, fewer).deltas
    again.writer.close()


def test_a_version_whose_base_has_gone_is_whole(model: Model) -> None:
    model.publish()
    assert model.publish().deltas
    for file in Path(model.publish().deltas[0].path).parent.iterdir():
        file.unlink()
    assert not model.publish().deltas


def test_a_manifest_with_deltas_is_never_read_as_its_folder(model: Model) -> None:
    model.publish()
    manifest = model.publish(0.0)
    with pytest.raises(EngineError, match="is not weight version 1"), read_version(manifest):
        pass


class Far:
    """The trainer's rank as a rollout actor of another host reaches it."""

    def __init__(self, writer: DiskWeightWriter) -> None:
        self.writer, self.num_bytes, self.fails_at = writer, 0, -1

    async def ask(self, sender: str, order: Any) -> Any:
        assert sender == "trainer/0"
        if self.fails_at == 0:
            raise PeerDied("trainer/0 died")
        self.fails_at -= 1
        try:
            reply = await asyncio.to_thread(self.writer.answer, order)
        except MyxaError as err:
            raise RemoteError(err.message, remote_type="TrainError") from err
        self.num_bytes += reply.data.nbytes
        return reply


@pytest.fixture
def far(model: Model) -> Far:
    model.writer.channel = "tcp"
    return Far(model.writer)


async def test_over_tcp_deltas_are_fetched_and_the_whole_folder_only_once(
    model: Model, far: Far, rebuilt: RebuiltFolder
) -> None:
    rebuilt._senders = far
    manifest = model.publish()
    for number in range(8):
        manifest = model.publish() if number else manifest
        before = far.num_bytes
        made, why = await rebuilt.whole(manifest)
        assert model.is_in(made) and not why and made.location.startswith(tempfile.gettempdir())
        fetched = far.num_bytes - before
        if manifest.deltas:
            assert fetched == manifest.deltas[-1].num_bytes < manifest.num_bytes / 4
        else:
            assert number in (0, 4) and fetched > manifest.num_bytes
        before = far.num_bytes
        assert model.is_in((await rebuilt.whole(manifest))[0]) and far.num_bytes == before, "asked again"
        model.writer.release(model.version - 1)
    late = RebuiltFolder(far)
    made, why = await late.whole(manifest)
    assert model.is_in(made) and "version 7 is made from" in why, "a joiner begins with the whole folder"
    await late.close()
    await rebuilt.close()


async def test_over_tcp_a_trainer_that_dies_costs_nothing_that_was_held(
    model: Model, far: Far, rebuilt: RebuiltFolder
) -> None:
    rebuilt._senders = far
    manifest = model.publish()
    for fails_at in (0, 1, 2):
        far.fails_at = fails_at
        with pytest.raises(MyxaError, match=r"trainer/0 died"):
            await rebuilt.whole(manifest)
    far.fails_at = -1
    assert model.is_in((await rebuilt.whole(manifest))[0])
    manifest = model.publish()
    for fails_at in (0, 1):
        far.fails_at = fails_at
        with pytest.raises(MyxaError, match="trainer/0 died"):
            await rebuilt.whole(manifest)
    far.fails_at, before = -1, far.num_bytes
    made, why = await rebuilt.whole(manifest)
    assert model.is_in(made) and not why and far.num_bytes - before == manifest.deltas[0].num_bytes
    held = Path(made.location)
    model.writer.full_every = 1
    manifest = model.publish()
    assert not manifest.deltas
    for fails_at in (0, 1, 2):
        far.fails_at = fails_at
        with pytest.raises(MyxaError, match="trainer/0 died"):
            await rebuilt.whole(manifest)
        assert held.exists(), "what is held goes when all of the next whole version has come"
    far.fails_at = -1
    model.writer.close()
    with pytest.raises(MyxaError, match="it was released, or never written"):
        await rebuilt.whole(manifest)
    assert held.exists(), "what is held is not given up for what cannot come"
    await rebuilt.close()


async def test_over_tcp_what_a_strange_trainer_says_is_refused(
    model: Model, far: Far, rebuilt: RebuiltFolder, tmp_path: Path
) -> None:
    rebuilt._senders = far
    manifest = model.publish()
    for files in ({"../x": 4}, {"/etc/x": 4}, {"a/b": 4}, {"model.safetensors": 1 << 50}, {}, {"..": 1}):
        told = FetchReply(data=np.zeros(3, np.uint8), files=files)

        async def ask(sender: str, order: Any, told: Any = told) -> Any:
            return told

        far.ask = ask
        with pytest.raises(MyxaError):
            await rebuilt.whole(manifest)
        assert not list(tmp_path.rglob("x")) and not Path("/etc/x").exists()
    await rebuilt.close()


def test_files_of_versions_alone_are_handed_out(model: Model, far: Far, tmp_path: Path) -> None:
    manifest = model.publish()
    (tmp_path / "secret").write_text("s")
    listed = model.writer.answer(FetchRequest(version=0))
    assert "model.safetensors" in listed.files and not listed.data.size
    for file in ("../../secret", str(tmp_path / "secret"), "..", "nothing"):
        assert not model.writer.answer(FetchRequest(version=0, file=file, num_bytes=9)).data.size
    for order in (
        FetchRequest(version=7),
        FetchRequest(version=-1),
        FetchRequest(version=0, file="config.json", offset=-1),
    ):
        with pytest.raises(TrainError, match="cannot be read"):
            model.writer.answer(order)
    most = model.writer.answer(FetchRequest(version=0, file="model.safetensors", num_bytes=1 << 60)).data
    assert most.nbytes == min(FETCH_BYTES, listed.files["model.safetensors"])
    assert not model.writer.answer(FetchRequest(version=0, file="model.safetensors", num_bytes=-1)).data.size
    with pytest.raises(EngineError), read_version(manifest):
        pass


REBUILD = """
import sys, time
from pathlib import Path
import msgspec
from myxa.actors.weights.channels.host import RebuiltFolder
from myxa.core.messages import WeightManifest
made = RebuiltFolder()
made.rebuild(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WeightManifest))
print("done", flush=True)
time.sleep(60)
"""


def test_what_a_killed_actor_left_is_removed_by_the_next(model: Model, tmp_path: Path, rebuilt: RebuiltFolder) -> None:
    model.publish()
    manifest = model.publish()
    (tmp_path / "manifest").write_bytes(msgspec.json.encode(manifest))
    env = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    words = [sys.executable, "-c", REBUILD, str(tmp_path / "manifest")]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as actor:
        assert actor.stdout is not None and actor.stdout.readline() == b"done\n"
        (left,) = (tmp_path / "scratch").iterdir()
        os.utime(left, (1, 1))
        take(rebuilt, manifest)
        assert left.exists(), "it lives"
        asyncio.run(rebuilt.close())
        actor.send_signal(signal.SIGKILL)
        actor.wait()
    assert model.is_in(take(rebuilt, manifest)[0])
    assert not left.exists()


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_run_with_deltas_makes_the_weights_of_the_same_run_without(tmp_path: Path) -> None:
    ends: dict[str, tuple[bytes, list[str]]] = {}
    for channel, every in (("disk", 1), ("disk", 3), ("tcp", 3)):
        job = make_job(tmp_path / f"{channel}{every}")
        status, said, run_dir = job.run(
            f"weights.channel={channel}", f"weights.full_every={every}", "rollout.deterministic=true",
            "async.max_staleness=0",
            "run.num_steps=6", "rollout.max_groups=4", "optimizer.lr=1e-4", "reward.fn=regex", 'reward.pattern="[1-4]"',
        )  # fmt: skip
        assert status == 0, said
        assert not events(run_dir, "weights-refused") and not events(run_dir, "engine-fenced")
        assert [e["data"]["version"] for e in events(run_dir, "weights-adopted")] == list(range(7))
        assert not events(run_dir, "weights-from-full"), "the actor always held the base"
        assert not (run_dir / "weights").exists()
        log = "".join(path.read_text() for path in run_dir.rglob("*.log"))
        published = [
            *dict.fromkeys(re.findall(r"version \d is published over \w+(, delta of \d+ bytes)?, digest (\S+)", log))
        ]
        assert [bool(delta) for delta, _ in published] == [every > 1 and version % 3 > 0 for version in range(7)]
        end = ends[channel + str(every)] = (
            (run_dir / "export" / "model.safetensors").read_bytes(), [digest for _, digest in published]
        )  # fmt: skip
        assert len(set(end[1])) == 7, "the weights changed"
    assert ends["disk1"] == ends["disk3"] == ends["tcp3"]


@pytest.mark.soak
@pytest.mark.timeout(180)
def test_a_server_of_the_actors_host_computes_with_what_was_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_KEY", "between-us")
    job = make_job(tmp_path)
    with serving(tmp_path / "model", key="between-us") as server:
        status, said, run_dir = job.run(
            "roles.rollout.kind=sglang", f'engine.attach=["{server.url}"]', "weights.channel=disk", "weights.full_every=4",
            "engine.key_env=FLEET_KEY", "async.max_staleness=0", "reward.fn=regex", 'reward.pattern="[1-4]"',
        )  # fmt: skip
    assert status == 0, said
    assert not events(run_dir, "weights-refused") and not events(run_dir, "engine-fenced")
    assert [e["data"]["version"] for e in events(run_dir, "weights-adopted")] == list(range(6))
    steps = [p["values"] for p in metrics(run_dir) if "train/logprob_diff_abs_max" in p["values"]]
    assert max(abs(s["train/grad_norm"]) for s in steps) > 0, "the weights changed"
    assert max(s["train/logprob_diff_abs_max"] for s in steps) < 2e-4, "the server computes with the trainer's weights"
