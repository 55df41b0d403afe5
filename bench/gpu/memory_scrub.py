"""What copying into fresh memory costs right after another process gave its own back, and a while later.

A stage of memory_rates.py. The driver clears memory that was freed before it belongs to anybody else, beside whatever
runs by then; a switch begins to copy in just that moment. By the copy engines, which clear as well, and by the kernel
that arenas use for what is waited for. With `--device cpu` the host's VMM stands in, which clears
pages when they are touched.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import torch
from memory_device import open_driver
from memory_figures import GIB, MIB
from memory_raw import synchronise
from memory_stages import Stage, answer, await_go, leave

from myxa.memory.arenas.driver import VmmDriver

WAITS_S = (0.0, 1.0)
WAYS = ("engines", "kernel")
ROUNDS = 3
HOLD_S = 60.0
"""For the holder to start and to map; a bare machine imports torch for ten of them."""


class Range:
    """Addresses with memory behind all of them."""

    def __init__(self, driver: VmmDriver, num_bytes: int, chunk: int) -> None:
        self._driver, self._chunk = driver, chunk
        self.num_bytes = num_bytes // chunk * chunk
        self._base = driver.reserve(self.num_bytes)
        self._handles: list[int] = []

    @property
    def addresses(self) -> list[int]:
        return [self._base + start for start in range(0, self.num_bytes, self._chunk)]

    def come(self, source: int | None = None, *, by: str = "") -> None:
        """Map all; with `source` copy from there, each chunk as soon as it is there, and wait for the copies."""
        ticket = 0
        for index, address in enumerate(self.addresses):
            self._handles.append(self._driver.create(self._chunk))
            self._driver.map(address, self._chunk, self._handles[-1])
            if source is not None:
                ticket = self._driver.copy_in(
                    address, source + index * self._chunk, self._chunk, is_awaited=by == "kernel"
                )
        if ticket:
            self._driver.wait(ticket)

    def go(self) -> None:
        for address in self.addresses:
            self._driver.unmap(address, self._chunk)
        while self._handles:
            self._driver.release(self._handles.pop(), self._chunk)


def hold(options: argparse.Namespace) -> None:
    """The other process: has memory until it is told to give it back, again and again."""
    with closing(open_driver(options.device, capacity_bytes=2 * options.held_bytes)) as driver:
        held = Range(driver, options.held_bytes, options.chunk_bytes)
        for _ in range(ROUNDS * len(WAITS_S) * len(WAYS)):
            held.come()
            await_go()
            held.go()
            answer("gone")
    leave()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the first mapping to the last byte, alone and after each wait."""
    log = Path(options.log)
    with closing(open_driver(options.device, capacity_bytes=2 * options.num_bytes)) as driver:
        source = torch.ones(options.num_bytes, dtype=torch.uint8, pin_memory=options.device == "cuda")
        mine = Range(driver, options.num_bytes, options.chunk_bytes)

        def arrive(way: str) -> float:
            started = time.perf_counter()
            mine.come(source.data_ptr(), by=way)
            took_s = time.perf_counter() - started
            mine.go()
            return took_s

        arrive(WAYS[0])
        alone = {way: [arrive(way) for _ in range(ROUNDS)] for way in WAYS}
        after: dict[str, dict[str, list[float]]] = {str(wait_s): {way: [] for way in WAYS} for wait_s in WAITS_S}
        arguments = ["--hold", "--device", options.device, "--held-bytes", str(options.held_bytes)]
        arguments += ["--chunk-bytes", str(options.chunk_bytes)]
        holder = Stage("holder", __file__, arguments, log=log)
        try:
            for _, wait_s, way in product(range(ROUNDS), WAITS_S, WAYS):
                holder.expect("ready", HOLD_S)
                holder.go()
                holder.expect("gone", HOLD_S)
                time.sleep(wait_s)
                after[str(wait_s)][way].append(arrive(way))
        finally:
            holder.stop()
        synchronise(options.device)
    return {"num_bytes": mine.num_bytes, "held_bytes": options.held_bytes, "alone": alone, "after": after}


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("--device", default="cuda")
    args.add_argument("--hold", action="store_true", help="be the other process")
    args.add_argument("--held-bytes", type=int, default=100 * GIB)
    args.add_argument("--num-bytes", type=int, default=12 * GIB)
    args.add_argument("--chunk-bytes", type=int, default=64 * MIB)
    args.add_argument("--log", default="/dev/null", help="of the other process")
    options = args.parse_args()
    if options.hold:
        hold(options)
    else:
        leave(**measure(options))


if __name__ == "__main__":
    main()
