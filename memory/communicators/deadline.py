"""Work in a library that may hang, done in a thread of its own and left there when its deadline is over.

NCCL and gloo wait in C without looking at a clock of ours (a suspend's barrier has no time-out at all); a thread cannot
be ended, so the caller goes on without it and treats what it held as lost. Considered: `concurrent.futures`, whose
threads the interpreter joins at exit, so that one hung call would keep a process from ending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from ...core.errors import MemoryFault

T = TypeVar("T")
K = TypeVar("K")


class Overrun(MemoryFault):
    """The work went on beyond its deadline and was left alone."""


def within(seconds: float, what: Callable[[], str], work: Callable[[], T]) -> T:
    """The result, or error, of `work`; Overrun with `what()` after `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="communicators", daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
    if thread.is_alive():
        raise Overrun(f"{what()} did not end within {seconds:.1f} s")
    if errors:
        raise errors[0]
    return results[0]


def all_at_once(items: Iterable[K], work: Callable[[K], None], num_at_once: int) -> None:
    """`work` for every item, begun in their order, so many at a time; the first error is raised when all have ended."""
    left = deque(items)
    errors: list[BaseException] = []

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)

    threads = [
        threading.Thread(target=run, name="communicators", daemon=True) for _ in range(min(num_at_once, len(left)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
