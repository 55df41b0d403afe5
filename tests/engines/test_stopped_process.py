"""Who of a family of processes was stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import psutil
import pytest

from myxa.actors.engines.sglang import launch
from myxa.actors.engines.sglang.launch import until_stopped


@pytest.mark.asyncio
async def test_one_that_a_server_has_started_is_found_and_whoever_goes_on_soon_is_not(monkeypatch):
    monkeypatch.setattr(launch, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(launch, "NUM_STOPPED", 25)
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & wait"]) as first:  # noqa: ASYNC220
        process = psutil.Process(first.pid)
        try:
            async with asyncio.timeout(30):
                while not process.children():
                    await asyncio.sleep(0.01)
                (child,) = process.children()
                watch = asyncio.ensure_future(until_stopped(first.pid))
                os.kill(first.pid, signal.SIGSTOP)
                while process.status() != psutil.STATUS_STOPPED:
                    await asyncio.sleep(0.01)
                os.kill(first.pid, signal.SIGCONT)
                await asyncio.sleep(0.05)
                assert not watch.done()
                os.kill(child.pid, signal.SIGSTOP)
                assert await watch == child.pid
        finally:
            for one in (*process.children(), process):
                one.kill()
