"""Signals that request a run's end, as people and other programs send them."""

from __future__ import annotations

import asyncio
import os
import signal

from myxa.launch.launcher import TWICE_S, stop_signals


async def forced_by(*signals: tuple[float, signal.Signals]) -> tuple[list[str], int]:
    """Reasons of orderly ends, and the signal that forced the end (0: none); signals are sent after so many seconds."""
    reasons: list[str] = []
    with stop_signals(lambda reason, _: reasons.append(reason)) as forced:
        for pause_s, number in signals:
            await asyncio.sleep(pause_s)
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.05)
        return reasons, forced.result() if forced.done() else 0


async def test_one_signal_that_comes_twice_at_once_is_one_request() -> None:
    """As of `timeout`, which sends it to the process and to its group."""
    assert await forced_by((0, signal.SIGTERM), (0.02, signal.SIGTERM)) == (["SIGTERM"], 0)
    assert await forced_by((0, signal.SIGINT), (0.02, signal.SIGTERM)) == (["Ctrl-C"], 0)


async def test_a_second_request_forces_the_end_and_a_warning_does_not() -> None:
    later_s = TWICE_S + 0.05
    assert await forced_by((0, signal.SIGINT), (later_s, signal.SIGINT)) == (["Ctrl-C"], signal.SIGINT)
    assert await forced_by((0, signal.SIGTERM), (0, signal.SIGTERM), (later_s, signal.SIGTERM)) == (["SIGTERM"], 15)
    warnings = ((later_s, signal.SIGHUP), (0.01, signal.SIGUSR1), (0.01, signal.SIGUSR2))
    assert await forced_by((0, signal.SIGTERM), *warnings) == (["SIGTERM"], 0)
    assert await forced_by((0, signal.SIGUSR1), (later_s, signal.SIGTERM)) == (["SIGUSR1"], signal.SIGTERM)
    assert await forced_by((0, signal.SIGUSR2)) == (["SIGUSR2"], 0)
