"""Descriptors and memory that run out, where the fault matrix does not reach: at the caller, and while a call begins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.depot import DepotContract, pair

from myxa.core.errors import RemoteError
from myxa.transport.session.serving import Serving

pytestmark = [pytest.mark.timeout(60)]

HERE = Path(__file__).parent


def run(code: str, *args: str) -> list[str]:
    """Lines that a process of its own prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=45,
        env={**os.environ, "HERE": str(HERE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


CALLER = """
import asyncio, os, resource, sys
sys.path.insert(0, os.environ["HERE"])
from pathlib import Path
from tests.faults.depot import Depot, DepotContract, eat_descriptors
from myxa.core.refs import with_deadline
from myxa.core.errors import MyxaError
from myxa.transport.node import Node

async def main(folder):
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
    host = await Node.attach(name="launcher/0")
    known = await Node.attach(name="known", rdzv=host.rendezvous)
    fresh = await Node.attach(name="fresh", rdzv=host.rendezvous)
    near = await Node.attach(name="near", rdzv=host.rendezvous)
    await known.start(Depot(folder / "known"), "known-depot")
    await fresh.start(Depot(folder / "fresh"), "fresh-depot")
    await near.wait_for("known-depot", "fresh-depot", timeout_s=20)
    friend = with_deadline(near.ref(DepotContract, "known-depot"), 5)
    stranger = with_deadline(near.ref(DepotContract, "fresh-depot"), 1.0)
    await friend.whoami()
    eaten = eat_descriptors()
    await friend.whoami()
    try:
        await stranger.whoami()
    except MyxaError as error:
        print(type(error).__name__)
    await friend.whoami()
    for descriptor in eaten:
        os.close(descriptor)
    await with_deadline(stranger, 10).whoami()
    print("found")
    for node in (near, fresh, known, host):
        await node.close(grace_s=0.2)

asyncio.run(asyncio.wait_for(main(Path(sys.argv[1])), 40))
"""


def test_a_caller_without_descriptors_keeps_its_friends_and_finds_others_later(tmp_path):
    assert run(CALLER, str(tmp_path)) == ["NotSent", "found"]


async def test_a_request_that_there_is_no_memory_for_is_answered(tmp_path, monkeypatch):
    """At once, and not by silence until the deadline."""

    def begin(self, arrival):
        raise MemoryError

    async with pair(tmp_path) as (near, _):
        with monkeypatch.context() as patch:
            patch.setattr(Serving, "begin", begin)
            with pytest.raises(RemoteError, match="MemoryError"):
                await near.ref(DepotContract, "depot").whoami()
        await near.ref(DepotContract, "depot").whoami()
