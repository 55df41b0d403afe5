"""Copies that would hold up the loop run in threads, a bounded piece at a time, so that several go on side by side.

The threads hold no interpreter lock while they copy. asyncio's default executor was considered: a host program may
have filled it with work of its own, and its end is not ours to wait for.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import length_hint
from typing import TypeVar

from ...core.errors import SlabError

T = TypeVar("T")

Step = Callable[[int, int], None]
"""Copies `count` bytes from `offset` on. Called in several threads at once, for different pieces."""

INLINE_BYTES = 1 << 20
"""Up to this size the copy is cheaper than handing it over: about 0.1 ms."""
STEP_BYTES = 8 << 20
"""A copy can be stopped between steps, and threads share one step by step."""
STEPS_PER_TURN = 8
"""After so many steps of one thread another copy has its turn."""
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

        A copy that was cancelled or failed does not return before its last step has: then nobody touches the memory
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
