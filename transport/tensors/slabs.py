"""Slabs: shared memory that one process writes and others of the same host read, and the pool of a process's slabs.

The owner makes an anonymous memory file, so nothing is left in /dev/shm and the kernel frees it with its last holder.
Readers open it once, through `/proc/<pid>/fd/<n>`, and keep it mapped; this needs no ptrace permission. Passing the
descriptor over a Unix socket (SCM_RIGHTS) was considered: it needs a second listener, its own handshake and blocking
code in every process, and it works only where this does: same user, same host.

    page 0: magic, slab id, capacity, then one generation word per block | blocks, on page boundaries

A generation word is 0 while its block is free or being written. A reader looks at it before and after.

`region` gives memory to numpy and calls back when its last array is gone: an array, and every view of it, keeps its
memory's exporter alive. Python 3.11 has no `__buffer__`, hence a ctypes array over the address.

`Copier` runs large copies in threads, in bounded pieces, so that several progress side by side; the threads hold no
interpreter lock while they copy. The pool is bounded: a request without room waits, and then falls back to sending.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import length_hint
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ...core.errors import SlabError
from ..shm import F_SEAL_FUTURE_WRITE, available_bytes, open_to_read, path_of
from .blocks import NUM_SLOTS, BlockTable, SharedBlock, whole_pages
from .kernel import populate

DATA_OFFSET = 4096
_MAGIC = b"myxapool"
_HEADER = struct.Struct("<8sQQ")
_FIRST_WORD = 8
_NAME = "myxa-pool"
_F_GET_SEALS = 1034
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slab:
    """The owner's end."""

    def __init__(self, slab_id: int, num_bytes: int) -> None:
        """Takes the memory at once: call it where blocking is allowed. Raises SlabError if there is not that much."""
        self._fd = -1
        self.slab_id = slab_id
        self.num_bytes = num_bytes
        free = available_bytes()
        if num_bytes > free:
            raise SlabError(f"no shared memory of {num_bytes} bytes: {free} are available")
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            mapping = self._mapped(DATA_OFFSET + num_bytes)
        except (OSError, ValueError) as error:
            self.close()
            raise SlabError(f"no shared memory of {num_bytes} bytes: {error}") from error
        _HEADER.pack_into(mapping, 0, _MAGIC, slab_id, num_bytes)
        self._all = np.frombuffer(mapping, dtype=np.uint8)
        self._words = np.frombuffer(mapping, dtype=np.uint64, count=DATA_OFFSET // 8)[_FIRST_WORD:]
        self.base = address_of(self._all) + DATA_OFFSET
        """Address of the first block."""

    def _mapped(self, size: int) -> mmap.mmap:
        os.ftruncate(self._fd, size)
        mapping = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
        if not populate(address_of(np.frombuffer(mapping, dtype=np.uint8)), size, for_writing=True):
            os.posix_fallocate(self._fd, 0, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | F_SEAL_FUTURE_WRITE)
        return mapping

    @property
    def path(self) -> str:
        """Opens it in another process until this one ends."""
        return path_of(self._fd)

    @property
    def memory(self) -> Bytes:
        """All of its blocks. The memory stays while an array over it does."""
        return self._all[DATA_OFFSET:]

    def publish(self, slot: int, generation: int) -> None:
        """What the block of that slot holds is whole; 0: it is not (any more)."""
        self._words[slot] = generation

    def close(self) -> None:
        """Close the file; readers and arrays that use it keep its memory until they are done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Its creator may have been cancelled before it was there."""
        self.close()


class SlabMapping:
    """A reader's end."""

    def __init__(self, memory: Bytes) -> None:
        self._all = memory
        self._words = memory[:DATA_OFFSET].view(np.uint64)[_FIRST_WORD:]
        self.base = address_of(memory) + DATA_OFFSET

    @classmethod
    def open(cls, path: str, slab_id: int) -> SlabMapping:
        """Map a slab: call it where blocking is allowed. Raises SlabError if it is gone or not the one meant."""
        descriptor = open_to_read(path, _NAME)
        try:
            memory = _map_to_read(descriptor, path)
        finally:
            os.close(descriptor)
        magic, found, capacity = _HEADER.unpack_from(memory.data)
        if magic != _MAGIC or found != slab_id or capacity + DATA_OFFSET != memory.nbytes:
            raise SlabError(f"{path} is not slab {slab_id:x}")
        return cls(memory)

    @property
    def num_bytes(self) -> int:
        return self._all.nbytes - DATA_OFFSET

    def generation(self, slot: int) -> int:
        """Of the block of that slot now; 0: free, or being written."""
        return int(self._words[slot]) if 0 <= slot < NUM_SLOTS else 0

    def memory(self, offset: int, num_bytes: int) -> Bytes:
        """Bytes of a block, read-only. Raises SlabError out of bounds."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise SlabError(f"{num_bytes} bytes at {offset} lie outside a slab of {self.num_bytes}")
        return self._all[DATA_OFFSET + offset : DATA_OFFSET + offset + num_bytes]


def _map_to_read(descriptor: int, path: str) -> Bytes:
    size = os.fstat(descriptor).st_size
    seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    if seals & _SEALS != _SEALS or size <= DATA_OFFSET:
        # Without the seals its owner could cut it short under us, and touching it would kill this process.
        raise SlabError(f"{path} is not sealed, or too short for a slab")
    mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    populate(address_of(memory), size, for_writing=False)
    return memory


Bytes = npt.NDArray[np.uint8]

_ends: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
"""By the exporter's identity. Not `weakref.finalize`: it registers an exit function, and we may be guests."""


def region(address: int, num_bytes: int, when_gone: Callable[[], None]) -> Bytes:
    """Writable bytes at that address. `when_gone` is called, in whatever thread, once no view of them is left.

    `when_gone` must itself hold what keeps the address valid.
    """
    exporter = (ctypes.c_ubyte * num_bytes).from_address(address)
    key = id(exporter)

    def gone(_: object) -> None:
        del _ends[key]
        when_gone()

    _ends[key] = weakref.ref(exporter, gone)
    return np.frombuffer(memoryview(exporter), dtype=np.uint8)


def read_only(memory: Bytes) -> Bytes:
    """The same bytes; no view of them can be made writable."""
    return np.frombuffer(memory.data.toreadonly(), dtype=np.uint8)


def address_of(memory: npt.NDArray[np.uint8]) -> int:
    """Where an array's first byte lies."""
    return int(memory.__array_interface__["data"][0])


T = TypeVar("T")

Step = Callable[[int, int], None]
"""Copies `count` bytes from `offset` on. Called in several threads at once, for different pieces."""

INLINE_BYTES = 1 << 20
"""Up to this size the copy is cheaper than handing it over: about 0.1 ms."""
STEP_BYTES = 8 << 20
"""A copy can be stopped between steps, and threads share one step by step."""
STEPS_PER_TURN = 8
"""After so many steps of one thread another copy continues."""
CORES_PER_THREAD = 4
MAX_THREADS = 4
"""One core copies at a fraction of what a server's memory can do."""


def num_threads() -> int:
    """One, and more where there are cores to spare."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // CORES_PER_THREAD))


class Copier:
    """Runs steps of copies."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._num_threads = num_threads()
        self._is_closed = threading.Event()

    async def copy(self, step: Step, num_bytes: int) -> None:
        """Call `step` for pieces until all is copied. What it raises passes through; SlabError after `close`.

        A copy that was cancelled or failed does not return before its last step has: then no thread touches the memory
        any more.
        """
        if num_bytes <= INLINE_BYTES:
            step(0, num_bytes)
            return
        is_over = threading.Event()
        starts = iter(range(0, num_bytes, STEP_BYTES))  # its `next` is atomic: the threads share it

        def turn() -> bool:
            """Whether there may be more to do."""
            for _, start in zip(range(STEPS_PER_TURN), starts, strict=False):
                if is_over.is_set() or self._is_closed.is_set():
                    return False
                step(start, min(STEP_BYTES, num_bytes - start))
            return length_hint(starts) > 0

        num_steps = -(-num_bytes // STEP_BYTES)
        while any(await self._in_threads(turn, min(self._num_threads, num_steps), is_over.set)):
            pass
        self._check_open()

    async def run(self, work: Callable[[], T]) -> T:
        """Something that blocks for a moment, such as mapping memory."""
        return (await self._in_threads(work, 1, lambda: None))[0]

    async def _in_threads(self, work: Callable[[], T], count: int, stop: Callable[[], None]) -> list[T]:
        self._check_open()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="myxa-tensors")
        futures = [self._threads.submit(work) for _ in range(count)]
        try:
            return [await asyncio.wrap_future(future) for future in futures]
        except BaseException:
            stop()
            await _settled(futures)
            raise

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise SlabError("this process is closing")

    def close(self) -> None:
        """End the threads after their present steps. Harmless to call again."""
        self._is_closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None


async def _settled(futures: list[Future[T]]) -> None:
    """Until the threads are done with them, however often the waiter is cancelled: one step at most."""
    loop = asyncio.get_running_loop()
    for future in futures:
        if future.cancel() or future.done():
            continue
        done = asyncio.Event()
        future.add_done_callback(lambda _, done=done: loop.call_soon_threadsafe(done.set))
        while not done.is_set():
            try:
                await done.wait()
            except asyncio.CancelledError:
                continue


SLAB_BYTES = 64 << 20
"""Of a slab for blocks that are no larger; a larger block has a slab of its size."""
IDLE_S = 30.0

_log = logging.getLogger("myxa.transport")


class SlabPool:
    """Owns the memory; `BlockTable` decides who has it."""

    def __init__(self, block_table: BlockTable, copier: Copier, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        """All slabs together, at most."""
        self._block_table = block_table
        self._copier = copier
        self._slabs: dict[int, Slab] = {}
        self._numbers = itertools.count()
        self._idle_since: dict[int, float] = {}
        self._growing = asyncio.Lock()
        self._room = asyncio.Event()
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Taken from the host now."""
        return sum(slab.num_bytes for slab in self._slabs.values())

    async def allocate(self, num_bytes: int, wait_s: float) -> SharedBlock | None:
        """A block, after waiting for room up to `wait_s`; None: there is none (and never will be, if it is larger
        than the pool)."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while not self._is_closed and whole_pages(num_bytes) <= self.pool_bytes:
            block = self._block_table.allocate(num_bytes)
            if block is not None:
                return block
            if await self._grow(num_bytes):
                continue
            self._room.clear()
            try:
                async with asyncio.timeout_at(give_up_at):
                    await self._room.wait()
            except TimeoutError:
                return None
        return None

    async def _grow(self, num_bytes: int) -> bool:
        """Take a slab that has room for such a block; True: look again."""
        async with self._growing:
            needed = whole_pages(num_bytes)
            for number in self._block_table.idle_slabs():
                if self.num_bytes + needed <= self.pool_bytes:
                    break
                self._drop(number)
            room = self.pool_bytes - self.num_bytes
            if room < needed or self._is_closed:
                return False
            size = max(needed, min(SLAB_BYTES, room))
            try:
                slab = await self._copier.run(lambda: Slab(secrets.randbits(62), size))
            except SlabError as error:
                _log.warning("%s", error)
                return False
            if self._is_closed:
                slab.close()
                return False
            number = next(self._numbers)
            self._slabs[number] = slab
            self._block_table.add_slab(number, size)
            return True

    def slab(self, block: SharedBlock) -> Slab:
        return self._slabs[block.slab]

    def memory(self, block: SharedBlock) -> Bytes:
        """The block's bytes, writable, for as long as there is an array over them; the pool may be closed before."""
        slab = self._slabs[block.slab]
        start = slab.base + block.offset
        whole = slab.memory
        return region(start, block.num_bytes, lambda: _keep(whole))

    def publish(self, block: SharedBlock) -> None:
        """It is written; readers may look."""
        self._set_word(block, block.generation)

    def unpublish(self, block: SharedBlock) -> None:
        """It is about to be written."""
        self._set_word(block, 0)

    def _set_word(self, block: SharedBlock, word: int) -> None:
        slab = self._slabs.get(block.slab)  # none after `close`, when producers may still be in the middle
        if slab is not None:
            slab.publish(block.slot, word)

    def find(self, address: int, num_bytes: int) -> tuple[SharedBlock, int] | None:
        """The block in use that contains these bytes of our own memory, and their offset in its slab."""
        for number, slab in self._slabs.items():
            offset = address - slab.base
            if 0 <= offset <= slab.num_bytes - num_bytes:
                block = self._block_table.find(number, offset, num_bytes)
                return (block, offset) if block is not None else None
        return None

    def freed(self, blocks: Iterable[SharedBlock]) -> None:
        """These are unused now."""
        for block in blocks:
            self._set_word(block, 0)
            self._room.set()

    def trim(self, now: float) -> None:
        """Give slabs back that were idle for a while."""
        idle = self._block_table.idle_slabs()
        self._idle_since = {number: self._idle_since.get(number, now) for number in idle}
        for number in idle:
            if now - self._idle_since[number] >= IDLE_S:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._block_table.remove_slab(number)
        self._idle_since.pop(number, None)
        self._slabs.pop(number).close()

    def close(self) -> None:
        """Close all slabs; readers keep what they use."""
        self._is_closed = True
        self._room.set()
        for slab in self._slabs.values():
            slab.close()
        self._slabs.clear()


def _keep(_whole: Bytes) -> None:
    """Called when the last array over a block is gone; until then its argument kept the slab's memory."""
