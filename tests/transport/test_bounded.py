"""A peer that does not read costs its sender no more than the credit that it gave, and no time beyond the deadlines."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
import pytest_asyncio
from tests.transport.conftest import World, no_tasks_left
from tests.transport.keepers import KeeperContract

from myxa.core.errors import NotSent
from myxa.core.refs import with_deadline
from myxa.transport.session.credit import UNIT_BYTES, WINDOW_UNITS

pytestmark = [pytest.mark.timeout(60)]

SIZE = 200_000
NUM_BYTES = SIZE * 8
NUM_CASTS = 240
WINDOW_BYTES = WINDOW_UNITS * UNIT_BYTES
SLACK_BYTES = 48 << 20
"""Allocator, interpreter, the tasks themselves."""


@pytest_asyncio.fixture
async def ipc(tmp_path):
    made = World("ipc", tmp_path)
    await made.found()
    yield made
    await made.close()
    await no_tasks_left()


async def test_casts_to_a_stopped_process_are_bounded_and_those_that_were_sent_arrive(ipc):
    near = await ipc.join("near")
    child = await ipc.child("keeper", "keeper")
    await near.wait_for("keeper", timeout_s=20)
    ref = near.ref(KeeperContract, "keeper")
    data = np.ones(SIZE)
    await ref.add(data)  # everything is connected
    await ref.kept()
    before = psutil.Process().memory_info().rss
    peak = 0
    os.kill(child.pid, signal.SIGSTOP)
    try:
        casts = asyncio.gather(*(with_deadline(ref, 1.5).add(data) for _ in range(NUM_CASTS)), return_exceptions=True)
        while not casts.done():
            peak = max(peak, psutil.Process().memory_info().rss)
            await asyncio.sleep(0.02)
        outcomes = await casts
    finally:
        os.kill(child.pid, signal.SIGCONT)
    num_sent = sum(outcome is None for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert refused
    assert all(isinstance(error, NotSent) and "waiting for credit" in str(error) for error in refused)
    assert 0.7 * WINDOW_BYTES < num_sent * NUM_BYTES <= WINDOW_BYTES
    # What is under way may be there twice: copied out of the caller's array, and in ZeroMQ's own queue.
    assert peak - before <= 2 * WINDOW_BYTES + SLACK_BYTES < NUM_CASTS * NUM_BYTES
    for _ in range(500):  # what was sent arrives; those whose time was over meanwhile are not executed
        if await ref.runs() > 1:
            break
        await asyncio.sleep(0.02)
    assert 1 <= await ref.runs() <= 1 + num_sent
    for _ in range(100):
        await ref.add(data)  # the credit comes back
