"""A loop that is held up is told of with its line, unless that was declared."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.harness.waiting import WAIT_S

from myxa.launch import worker
from myxa.launch.worker import LoopWatch


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "TICK_S", 0.05)


async def held_up(busy_s: float) -> list[str]:
    lines: list[str] = []
    watch = LoopWatch(0.3, lines.append, lambda: busy_s)
    watch.start()
    await asyncio.sleep(0.1)
    until_s = time.monotonic() + (1.0 if busy_s else WAIT_S)
    while not lines and time.monotonic() < until_s:
        time.sleep(0.02)  # noqa: ASYNC251 - that is the point
    await asyncio.sleep(0)
    watch.stop()
    return lines


async def test_the_line_is_named_once() -> None:
    (line,) = await held_up(0.0)
    assert line.startswith(f"{__file__}:")


async def test_declared_time_is_left_alone() -> None:
    assert await held_up(60.0) == []
