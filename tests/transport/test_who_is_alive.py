"""Real processes that block, stand still and go on: what those who wait for them are told, and what not."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.harness.waiting import until
from tests.transport.cast_of_actors import Blocker, Echo, Watcher

from myxa.core.refs import with_deadline

pytestmark = [pytest.mark.timeout(120)]

BLOCK_S = 14.5
"""Longer than it takes to be called hung."""


@pytest.fixture
def kind():
    return "ipc"


def told(watcher, name):
    return [event.kind for event in watcher.told if event.name == name]


async def test_who_hangs_is_named_and_who_said_so_before_is_left_alone(world):
    """Four processes at once: one blocks its loop without a word, one declares it, one declares it and holds the
    interpreter lock, one is stopped. None of them dies, and every call is answered in the end."""
    near = await world.join("near")
    watcher = Watcher()
    await near.start(watcher, "watcher")
    blockers = ["silent", "busy", "locked"]
    for name in blockers:
        await world.child(name, "blocker")
    stopped = await world.child("stopped")
    await near.wait_for(*blockers, "stopped", timeout_s=30)
    ref = {name: with_deadline(near.ref(Blocker, name), 60) for name in blockers}
    calls = [
        asyncio.ensure_future(ref["silent"].block("sleeping", BLOCK_S, 0.0)),
        asyncio.ensure_future(ref["busy"].block("sleeping", BLOCK_S, 60.0)),
        asyncio.ensure_future(ref["locked"].block("holding the lock", BLOCK_S, 60.0)),
        asyncio.ensure_future(with_deadline(near.ref(Echo, "stopped"), 60).sleep(1.0)),
    ]
    await asyncio.sleep(0.3)
    stopped.send_signal(signal.SIGSTOP)
    await until(lambda: told(watcher, "silent")[-1] == told(watcher, "stopped")[-1] == "hung")
    hung = next(event for event in watcher.told if event.name == "stopped" and event.kind == "hung")
    assert "gave no sign of life for 1" in hung.reason
    await until(calls[0].done)
    assert not calls[3].done(), "it hangs, which is not dead"
    stopped.send_signal(signal.SIGCONT)
    pids = await asyncio.gather(*calls[:3])
    await calls[3]
    assert pids == [child.pid for child in world.children[:3]]
    await until(lambda: told(watcher, "stopped")[-1] == told(watcher, "silent")[-1] == "recovered")
    assert told(watcher, "stopped") == told(watcher, "silent") == ["up", "suspect", "hung", "recovered"]
    assert told(watcher, "busy") == told(watcher, "locked") == ["up"]
    assert await near.ref(Echo, "stopped").epoch() == 1, "the same incarnation"
