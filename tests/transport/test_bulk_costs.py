"""What keeps bulk from being felt: memory that is not asked for anew, and a thread that gives way."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from myxa.transport.node import Node
from myxa.transport.session.frames import Assembly, EnvelopeChunk

FAULTS = """
import resource, sys
import numpy as np
from myxa.transport.node import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def burst():
    pieces = [np.empty(1 << 20, np.uint8) for _ in range(16)]
    for piece in pieces:
        piece.fill(1)
burst()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    burst()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], env=environment, text=True, capture_output=True, timeout=60, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of the C library of Linux")
def test_freed_memory_is_used_again():
    assert page_faults("kept") < page_faults("given back") / 4


def test_a_large_envelope_is_put_together_in_memory_that_may_be_written_and_outlives_the_next():
    def whole(fill: int) -> memoryview:
        made = None
        for index in range(5):
            piece = memoryview(bytes([fill + index]) * (1 << 20))
            made = assembly.add(EnvelopeChunk(index=index, offset=index << 20, total=5 << 20, data=piece))
            assert assembly.num_bytes == (0 if index == 4 else index + 1 << 20)
            assert (made is None) == (index < 4)
        assert isinstance(made, memoryview)
        return made

    assembly = Assembly()
    first, second = whole(1), whole(11)
    second[0] = 99
    assert [first[i << 20] for i in range(5)] == [1, 2, 3, 4, 5]
    assert [second[(i << 20) + 1] for i in range(5)] == [11, 12, 13, 14, 15]


def priorities() -> dict[str, int]:
    """Of the threads that ZeroMQ made."""
    found: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        if name.startswith("ZMQbg/"):
            found[name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads cannot be seen")
async def test_only_the_thread_of_bulk_gives_way():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own + 5 > 19:
        pytest.skip("it is as low as can be")
    node = await Node.attach(name="one")
    try:
        async with asyncio.timeout(60):  # it has to run once to give way, which takes long where others run
            while priorities().get("ZMQbg/IO/1") != own + 5:
                await asyncio.sleep(0.01)
        assert {name: nice for name, nice in priorities().items() if nice != own} == {"ZMQbg/IO/1": own + 5}
    finally:
        await node.close()
