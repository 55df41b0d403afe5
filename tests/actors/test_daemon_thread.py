"""Work in a daemon thread is answered, whatever it raises."""

from __future__ import annotations

import asyncio

import pytest

from myxa.core.daemon_thread import in_daemon_thread


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration()])
async def test_what_work_raises_is_raised_where_it_is_awaited(error: Exception) -> None:
    def work() -> None:
        raise error

    wanted = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(wanted):
        await asyncio.wait_for(in_daemon_thread(work, "work"), 10)


async def test_what_work_returns_comes_back() -> None:
    assert await in_daemon_thread(lambda: 3, "work") == 3
