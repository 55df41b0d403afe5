"""The memory itself: reading another process's, slabs of others, warm memory, copies in threads."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from myxa.core.errors import SlabError
from myxa.transport.tensors import kernel
from myxa.transport.tensors.shared_array_transfer import IDLE_S, MAX_LOANS, PullGrants, ReceiveMemory
from myxa.transport.tensors.slabs import (
    DATA_OFFSET,
    INLINE_BYTES,
    STEP_BYTES,
    Copier,
    Slab,
    SlabMapping,
    address_of,
    read_only,
    region,
)

pytestmark = pytest.mark.timeout(60)

OWNER = """
import ctypes, sys
data = ctypes.create_string_buffer(b"seen from outside", 64)
word = ctypes.c_uint64(77)
print(ctypes.addressof(data), ctypes.addressof(word), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    """A process, an address in it, and that of a word which is 77."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    address, word = map(int, process.stdout.readline().split())
    yield process, address, word
    process.kill()
    process.wait()
    process.stdout.close()
    process.stdin.close()


def test_another_process_s_memory_is_read_with_its_word_before_and_after(other):
    process, address, word = other
    target = np.zeros(17, np.uint8)
    assert kernel.pull(process.pid, address, address_of(target), 17, word) == (77, 77)
    assert target.tobytes() == b"seen from outside"
    assert kernel.read_bytes(process.pid, address, 4) == b"seen"
    with pytest.raises(OSError, match="Bad address") as caught:
        kernel.pull(process.pid, 4096, address_of(target), 17, word)
    assert caught.value.errno == errno.EFAULT
    with pytest.raises(OSError, match="8 of 24 bytes"):  # the word is there, the data is not
        kernel.pull(process.pid, 4096, address_of(target), 8, word)
    watch = kernel.watch_process(process.pid)
    assert not kernel.has_exited(watch)
    process.kill()
    process.wait()
    assert kernel.has_exited(watch)
    os.close(watch)
    with pytest.raises(ProcessLookupError):
        kernel.pull(process.pid, address, address_of(target), 17, word)
    with pytest.raises(ProcessLookupError):
        kernel.watch_process(process.pid)


def test_only_relatives_are_admitted_where_yama_restricts(other, monkeypatch, tmp_path):
    process, _, _ = other
    assert kernel.ancestry(process.pid)[:2] == (process.pid, os.getpid())
    assert kernel.ancestry(1 << 30) == (1 << 30,)
    named: list[int] = []

    class Libc:
        def prctl(self, option: int, pid: int, *_: int) -> int:
            assert option == kernel._PR_SET_PTRACER
            named.append(pid)
            return 0

    monkeypatch.setattr(kernel, "_libc", Libc)
    yama = tmp_path / "ptrace_scope"
    monkeypatch.setattr(kernel, "_YAMA", yama)
    kernel.admit_reader(process.pid)  # no Yama
    yama.write_text("0\n")
    kernel.admit_reader(process.pid)  # everybody of the same user may
    assert named == []
    yama.write_text("1\n")
    kernel.admit_reader(process.pid)  # our child
    kernel.admit_reader(1 << 30)  # nobody's
    assert named == [os.getppid() if os.getppid() > 1 else os.getpid()]
    monkeypatch.setattr(kernel.os, "getppid", lambda: 1)  # as an orphan
    kernel.admit_reader(process.pid)
    assert named[1:] == [os.getpid()]


def test_a_slab_is_read_by_others_and_cannot_be_cut_short():
    slab = Slab(77, 100_000)
    slab.memory[:5] = [1, 2, 3, 4, 5]
    slab.publish(3, 99)
    mapping = SlabMapping.open(slab.path, 77)
    assert mapping.memory(1, 3).tolist() == [2, 3, 4]
    assert (mapping.generation(3), mapping.generation(4), mapping.generation(10**6)) == (99, 0, 0)
    with pytest.raises(SlabError, match="outside"):
        mapping.memory(99_999, 2)
    with pytest.raises(ValueError, match="read-only"):
        mapping.memory(0, 1)[0] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(slab.path, 10)
    with pytest.raises(SlabError, match="is not slab"):
        SlabMapping.open(slab.path, 78)
    view = mapping.memory(0, 5)
    del mapping
    slab.close()
    slab.close()
    with pytest.raises(SlabError):
        SlabMapping.open(slab.path, 77)
    assert view.tolist() == [1, 2, 3, 4, 5]  # memory stays with its last view


def test_what_is_no_slab_or_could_be_cut_short_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(8192))
    for path in (str(file), "/proc/self/fd/0", f"/proc/{os.getpid()}/mem"):
        with pytest.raises(SlabError, match="no slab's path"):
            SlabMapping.open(path, 1)
    with file.open("rb") as opened, pytest.raises(SlabError, match="no slab"):
        SlabMapping.open(f"/proc/{os.getpid()}/fd/{opened.fileno()}", 1)
    unsealed = os.memfd_create("myxa-pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 2 * DATA_OFFSET)
    with pytest.raises(SlabError, match="not sealed"):
        SlabMapping.open(f"/proc/{os.getpid()}/fd/{unsealed}", 1)
    os.close(unsealed)
    with pytest.raises(SlabError, match="are available"):
        Slab(1, 1 << 50)


def test_the_end_of_the_last_view_is_heard_of():
    memory, told = np.arange(100, dtype=np.uint8), []
    made = region(address_of(memory), 100, lambda: told.append(1))
    part, frozen = np.asarray(made)[10:20].reshape(2, 5), read_only(made)
    with pytest.raises(ValueError, match="WRITEABLE"):
        frozen.flags.writeable = True
    del made
    assert part.sum() == sum(range(10, 20))
    del frozen
    gc.collect()
    assert told == []
    del part
    gc.collect()
    assert told == [1]


def test_memory_is_kept_warm_up_to_a_limit_and_for_a_while():
    receive_memory = ReceiveMemory(5 << 20)
    first = receive_memory.take(2_000_000, 0.0)
    address = address_of(first)
    first[:] = 7
    del first
    again = receive_memory.take(1_900_000, 0.0)
    assert address_of(again) == address
    too_small = receive_memory.take(1_000_000, 0.0)
    assert address_of(too_small) != address
    three = [receive_memory.take(2_000_000, 0.0) for _ in range(3)]
    del again, too_small, three
    receive_memory.trim(1.0)
    assert 0 < receive_memory.num_spare_bytes <= 5 << 20
    receive_memory.trim(1.0 + IDLE_S)
    assert receive_memory.num_spare_bytes == 0
    with pytest.raises(MemoryError, match="more than the host has"):
        receive_memory.take(1 << 50, 0.0)
    kept = receive_memory.take(100, 0.0)
    receive_memory.close()
    kept[:] = 1  # still there
    del kept
    assert receive_memory.num_spare_bytes == 0


def test_loans_run_out_and_their_words_are_cleared():
    grants = PullGrants(1000)
    memory = memoryview(bytes(range(64)))
    made = [grants.lend(memory) for _ in range(MAX_LOANS)]
    assert grants.lend(memory) is None
    assert len({loan.generation for loan in made if loan}) == MAX_LOANS
    one = made[5]
    assert one is not None
    assert kernel.read_bytes(os.getpid(), one.word, 8) == one.generation.to_bytes(8, "little")
    grants.end(one)
    assert kernel.read_bytes(os.getpid(), one.word, 8) == bytes(8)
    next_one = grants.lend(memory)
    assert next_one is not None
    assert (next_one.slot, next_one.generation) != (one.slot, one.generation)


# -- copies


@pytest.mark.asyncio
@pytest.mark.parametrize("num_bytes", [1, INLINE_BYTES, INLINE_BYTES + 1, 9 * STEP_BYTES + 5])
@pytest.mark.parametrize("num_threads", [1, 3])
async def test_every_byte_is_copied_once(num_bytes, num_threads):
    copier = Copier()
    copier._num_threads = num_threads

    async def copied() -> bool:
        counts = np.zeros(num_bytes, np.uint8)

        def step(offset: int, count: int) -> None:
            counts[offset : offset + count] += 1

        await copier.copy(step, num_bytes)
        return bool((counts == 1).all())

    try:
        assert all(await asyncio.gather(copied(), copied()))
    finally:
        copier.close()


@pytest.mark.asyncio
async def test_a_copy_that_ends_early_touches_nothing_any_more():
    copier = Copier()
    steps: list[int] = []

    def step(offset: int, _count: int) -> None:
        time.sleep(0.01)
        steps.append(offset)

    for _ in range(3):
        task = asyncio.ensure_future(copier.copy(step, 50 * STEP_BYTES))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = len(steps)
        await asyncio.sleep(0.03)
        assert len(steps) == seen

    def broken(offset: int, _count: int) -> None:
        if offset:
            raise SlabError("torn")

    with pytest.raises(SlabError, match="torn"):
        await copier.copy(broken, 5 * STEP_BYTES)
    task = asyncio.ensure_future(copier.copy(step, 500 * STEP_BYTES))
    await asyncio.sleep(0.03)
    copier.close()
    with pytest.raises(SlabError, match="closing"):
        await task
    with pytest.raises(SlabError, match="closing"):
        await copier.run(lambda: 1)
    copier.close()


@pytest.mark.asyncio
async def test_the_loop_goes_on_and_copies_take_turns():
    copier = Copier()
    order: list[str] = []

    def step_of(name: str):
        def step(_offset: int, _count: int) -> None:
            time.sleep(0.002)
            order.append(name)

        return step

    copies = asyncio.gather(*(copier.copy(step_of(name), 40 * STEP_BYTES) for name in "ab"))
    num_turns = 0
    while not copies.done():
        await asyncio.sleep(0.002)
        num_turns += 1
    await copies
    assert num_turns > 10
    assert "b" in order[:40]
    assert "a" in order[-40:]
    copier.close()
