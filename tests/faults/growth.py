"""What a process holds: objects by type, resident memory, descriptors, threads. For tests that nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.harness.waiting import until


@dataclass(frozen=True)
class Held:
    objects: Counter[str]
    rss_bytes: int
    num_fds: int
    num_threads: int


def held() -> Held:
    """After freed memory went back to the system: the allocator keeps some, now more and now less."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return Held(
        Counter(f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in gc.get_objects()),
        process.memory_info().rss,
        num_fds(),
        process.num_threads(),
    )


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def growth(before: Held, after: Held) -> str:
    """Types of which there are more now, the worst first."""
    more = {name: after.objects[name] - before.objects[name] for name in after.objects}
    worst = sorted(((count, name) for name, count in more.items() if count > 0), reverse=True)[:15]
    head = (
        f"{sum(after.objects.values()) - sum(before.objects.values()):+d} objects, "
        f"{(after.rss_bytes - before.rss_bytes) / 2**20:+.1f} MiB, {after.num_fds - before.num_fds:+d} descriptors, "
        f"{after.num_threads - before.num_threads:+d} threads"
    )
    return "\n".join([head, *(f"{count:+8d} {name}" for count, name in worst)])


def check_flat(before: Held, after: Held, *, per_type: int = 300, mebibytes: float = 32.0) -> None:
    """AssertionError with what grew. asyncio keeps some more than a hundred cancelled timers on a busy machine, each with
    what it holds, two weak references for example; a leak is more than that."""
    text = growth(before, after)
    print(text)
    assert all(count - before.objects[name] <= per_type for name, count in after.objects.items()), text
    assert (after.rss_bytes - before.rss_bytes) / 2**20 <= mebibytes, text
    assert after.num_fds <= before.num_fds, text
    assert after.num_threads <= before.num_threads, text


async def check_work(
    work: Callable[[int], Awaitable[object]], few: int, many: int, rest_s: float = 0.3, **limits: Any
) -> None:
    """Flat from after a few pieces of work to after many more."""
    await work(few)
    await asyncio.sleep(rest_s)
    before = held()
    await work(many)
    await asyncio.sleep(rest_s)
    with contextlib.suppress(AssertionError):  # libzmq closes descriptors and ends threads a little later
        await until(lambda: num_fds() <= before.num_fds and psutil.Process().num_threads() <= before.num_threads)
    check_flat(before, held(), **limits)
