"""Waiting for something to come true on this loop, with an end and a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 40.0


async def until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll a condition; fail naming it."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError as error:
        raise AssertionError(f"not within {timeout_s:g} s: {what}") from error
