"""Slabs: bytes arrive in other processes, torn reads are noticed, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from myxa.core.errors import SlabError
from myxa.core.messages import TensorSpec
from myxa.core.protocols import NamedArray
from myxa.transport.shm import ALIGNMENT, SlabReader, SlabWriter, available_bytes, needed_bytes

pytestmark = pytest.mark.timeout(60)

READ = """
import json, sys
import msgspec, numpy as np
from myxa.core.messages import TensorSpec
from myxa.transport.shm import SlabReader
path, digest, generation, specs = json.load(sys.stdin)
specs = msgspec.convert(specs, tuple[TensorSpec, ...])
reader = SlabReader.open(path)
reader.verify(specs, digest, generation)
sums = {}
for spec in specs:
    view = reader.view(spec)
    assert view.readonly
    sums[spec.name] = float(np.frombuffer(view, spec.dtype).sum())
    view.release()
reader.check(generation)
reader.close()
print(json.dumps(sums))
"""

OWN = """
import sys, time
from myxa.transport.shm import SlabWriter
writer = SlabWriter.create(100)
writer.write([])
print(writer.path, writer.generation, flush=True)
sys.stdin.read()
"""


def named(name, array):
    spec = TensorSpec(name=name, dtype=array.dtype.name, shape=array.shape, offset=0, num_bytes=array.nbytes)
    return NamedArray(spec=spec, data=np.ascontiguousarray(array).data.cast("B"))


@pytest.fixture
def weights():
    rng = np.random.default_rng(3)
    return [
        named("embed", rng.standard_normal((50, 8), np.float32)),
        named("bias", np.arange(7, dtype=np.int64)),
        named("scale", np.array([2.5], np.float16)),
    ]


@pytest.fixture
def slab(weights):
    writer = SlabWriter.create(needed_bytes([a.data.nbytes for a in weights]))
    yield writer
    writer.close()
    writer.close()


def test_another_process_reads_the_same_bytes(slab, weights):
    import json

    import msgspec

    specs, digest, generation = slab.write(weights)
    assert all(spec.offset % ALIGNMENT == 0 for spec in specs)
    told = json.dumps([slab.path, digest, generation, msgspec.to_builtins(specs)])
    done = subprocess.run(
        [sys.executable, "-c", READ], input=told, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    sums = json.loads(done.stdout)
    for array in weights:
        expected = np.frombuffer(array.data, array.spec.dtype).sum()
        assert sums[array.spec.name] == pytest.approx(float(expected), rel=1e-5)


def test_each_write_is_a_new_generation_and_old_manifests_are_refused(slab, weights):
    specs, digest, generation = slab.write(weights)
    with_other = [named(a.spec.name, np.zeros(a.spec.shape, a.spec.dtype)) for a in weights]
    reader = SlabReader.open(slab.path)
    try:
        reader.verify(specs, digest, generation)
        specs2, digest2, generation2 = slab.write(with_other)
        assert generation2 == generation + 2
        assert specs2 == specs
        assert digest2 != digest
        with pytest.raises(SlabError, match="holds another version"):
            reader.check(generation)
        reader.verify(specs2, digest2, generation2)
        with pytest.raises(SlabError, match="digest"):
            reader.verify(specs2, digest, generation2)
        with pytest.raises(SlabError, match="digest"):
            reader.verify(specs2[::-1], digest2, generation2)
    finally:
        reader.close()


def test_torn_reads_are_always_noticed(weights):
    """A writer that never stops: whatever passes both checks is of one piece."""
    size = 1 << 20
    writer = SlabWriter.create(size)
    reader = SlabReader.open(writer.path)
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 250
            writer.write([named("w", np.full(size, value, np.uint8))])

    thread = threading.Thread(target=write)
    thread.start()
    num_good = num_torn = 0
    spec = TensorSpec(name="w", dtype="uint8", shape=(size,), offset=4096, num_bytes=size)
    try:
        for _ in range(20_000):
            generation = reader.generation
            view = reader.view(spec)
            data = np.frombuffer(view, np.uint8).copy()
            view.release()
            try:
                reader.check(generation)
            except SlabError:
                num_torn += 1
            else:
                if generation % 2 == 0:
                    assert data.min() == data.max()
                    num_good += 1
            if num_torn > 200 and num_good > 5:
                break
    finally:
        stop.set()
        thread.join()
        reader.close()
        writer.close()
    assert num_torn > 0  # else this test has tested nothing


def test_while_it_is_written_nobody_may_read(slab, weights):
    specs, digest, generation = slab.write(weights)
    reader = SlabReader.open(slab.path)
    slab._words[2] += 1  # as in the middle of a write
    with pytest.raises(SlabError, match="is being written"):
        reader.verify(specs, digest, generation)
    reader.close()


def test_a_dead_owner_is_a_clear_error_and_what_is_mapped_stays():
    owner = subprocess.Popen([sys.executable, "-c", OWN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdin is not None
    path, generation = owner.stdout.readline().split()
    mapped = SlabReader.open(path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    mapped.check(int(generation))
    mapped.close()
    with pytest.raises(SlabError, match="has ended"):
        SlabReader.open(path)


def test_what_is_no_slab_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    for path in ("/dev/shm/x", str(file), f"/proc/{os.getpid()}/mem", "/proc/self/fd/0"):
        with pytest.raises(SlabError, match="no slab's path"):
            SlabReader.open(path)
    with file.open("rb") as open_file, pytest.raises(SlabError, match="no slab"):
        SlabReader.open(f"/proc/{os.getpid()}/fd/{open_file.fileno()}")
    other = os.memfd_create("myxa-slab")
    os.write(other, bytes(8192))
    with pytest.raises(SlabError, match="holds no slab"):
        SlabReader.open(f"/proc/{os.getpid()}/fd/{other}")
    os.close(other)


def test_too_much_is_refused_and_the_old_content_stays(slab, weights):
    specs, digest, generation = slab.write(weights)
    with pytest.raises(SlabError, match="do not fit"):
        slab.write([*weights, named("more", np.zeros(64, np.uint8))])
    wrong = NamedArray(spec=weights[0].spec, data=memoryview(b"short"))
    with pytest.raises(SlabError, match="its spec says"):
        slab.write([wrong])
    reader = SlabReader.open(slab.path)
    reader.verify(specs, digest, generation)
    reader.close()
    with pytest.raises(SlabError, match="no shared memory"):
        SlabWriter.create(available_bytes() + (1 << 30))  # refused before any of it is taken


def test_readers_cannot_write_or_reach_outside(slab, weights):
    specs, _, _ = slab.write(weights)
    reader = SlabReader.open(slab.path)
    view = reader.view(specs[0])
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(SlabError, match="views are in use"):
        reader.close()
    view.release()
    for offset, size in ((0, 8), (4096, 1 << 30), (-1, 4), (4096, -5)):
        with pytest.raises(SlabError, match="outside"):
            reader.view(TensorSpec(name="x", dtype="uint8", shape=(size,), offset=offset, num_bytes=size))
    descriptor = os.open(slab.path, os.O_RDWR)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(descriptor, b"x", 5000)  # sealed
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(descriptor, 10)
    os.close(descriptor)
    reader.close()
    reader.close()
