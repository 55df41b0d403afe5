"""Repeating a call until it is answered, for callees that may be restarting: only where repetition is safe."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .clock import Clock
from .errors import BadRequest, CallError, DiskRefused, NoSuchMethod, NotExecuted, NotSent, OutcomeUnknown
from .timeouts import TIMEOUTS

T = TypeVar("T")


_FINAL = (BadRequest, NoSuchMethod)
"""Refusals that no repetition can change."""


async def until_answered(
    send: Callable[[], Awaitable[T]],
    *,
    who: str,
    clock: Clock,
    log: logging.Logger,
    give_up_s: float = TIMEOUTS.wire.give_up_s,
    waits_for_disk: bool = True,
) -> T:
    """The answer of `send()`, repeated while the callee is away, or waits for its disk (unless `waits_for_disk` is
    False). Raises the handler's own error, and CallError naming `who` after `give_up_s` seconds without an answer."""
    started = clock.monotonic()
    reported = ""
    while True:
        try:
            return await send()
        except DiskRefused as err:
            if not waits_for_disk:
                raise
            if reported != (reported := err.message):
                log.warning("%s: %s; asking again", who, err)
            started = clock.monotonic()  # it answers
            await asyncio.sleep(TIMEOUTS.wire.disk_again_s)
        except (NotSent, NotExecuted, OutcomeUnknown) as err:
            waited = clock.monotonic() - started
            if isinstance(err, _FINAL):
                raise
            if waited >= give_up_s:
                raise CallError(
                    f"{who} did not answer for {waited:.0f} s; last: {err}",
                    remedy=f"see the log of {who}; it is dead, stuck or unreachable",
                ) from err
            log.warning("%s: %s; asking again", who, err)
            await asyncio.sleep(TIMEOUTS.wire.ask_again_s)
