"""One side gives the other up, the other has noticed nothing: what broke was one direction. Both must find together."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.faults.depot import Depot, DepotContract

from myxa.core.refs import with_deadline
from myxa.transport.node import Node

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


async def test_calls_go_on_in_both_directions_after_one_side_was_given_up(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "myxa")
    host = await Node.attach(name="launcher/0")
    near = await Node.attach(name="near", rdzv=host.rendezvous)
    far = await Node.attach(name="far", rdzv=host.rendezvous)
    try:
        await near.start(Depot(tmp_path / "near"), "near-depot")
        await far.start(Depot(tmp_path / "far"), "far-depot")
        await asyncio.gather(near.wait_for("far-depot", timeout_s=5), far.wait_for("near-depot", timeout_s=5))
        there = with_deadline(near.ref(DepotContract, "far-depot"), 3.0)
        back = with_deadline(far.ref(DepotContract, "near-depot"), 3.0)
        await there.whoami()
        await back.whoami()
        for first, second in ((there, back), (back, there)):
            near._session.unreachable(far._key, "the test says so")
            await first.whoami()
            await second.whoami()
    finally:
        for node in (far, near, host):
            await node.close(grace_s=0.2)
