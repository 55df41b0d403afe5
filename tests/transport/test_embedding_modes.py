"""A node in another program: nothing of the host is changed, nothing is left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]

HEAD = """
import asyncio, sys, threading, time
from tests.transport.cast_of_actors import Echo
from tests.transport.host_state import assert_untouched, host_state
from myxa.core.errors import MyxaError
from myxa.transport.node import Node
"""


def run(
    program: str, *, expects: int = 0, options: tuple[str, ...] = ("-X", "dev")
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", HEAD + program],
        capture_output=True, text=True, check=False, timeout=80, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == expects, done.stderr
    return done


def fine(program: str) -> None:
    done = run(program)
    assert done.stdout == "fine\n"
    problems = [line for line in done.stderr.splitlines() if "Executing <" not in line]  # slow machine, debug mode
    assert problems == []


ATTACH = """
async def guest():
    node = await Node.attach(name="guest")
    other = await Node.attach(name="other", rdzv=node.rendezvous)
    await node.start(Echo(), "echo")
    ref = other.ref(Echo, "echo")
    for _ in range(20):
        await asyncio.gather(*(ref.ping() for _ in range(10)))
    await other.close()
    await node.close()

async def main():
    loop = asyncio.get_running_loop()
    before = host_state(), loop.get_exception_handler(), loop.get_task_factory(), asyncio.all_tasks()
    async with asyncio.timeout(40):
        await guest()
    assert_untouched(before[0])
    assert before[1:] == (loop.get_exception_handler(), loop.get_task_factory(), asyncio.all_tasks())
"""


@pytest.mark.parametrize(
    "loop", ["asyncio.run(main(), debug=True)", "import uvloop\nwith asyncio.Runner(loop_factory=uvloop.new_event_loop) as r: r.run(main())"],
    ids=["asyncio", "uvloop"],
)  # fmt: skip
def test_attach_changes_nothing(loop: str):
    fine(f"{ATTACH}{loop}\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules\nprint('fine')")


FORK = """
import os, warnings
def in_child(what):
    # 3.12 warns of forks in a process with threads, which ZeroMQ always has
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    try:
        what()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


def test_a_forked_child_may_have_a_node_of_its_own():
    fine(
        FORK
        + """
rdzv = None

async def host():
    global rdzv
    node = await Node.attach(name="host")
    await node.start(Echo(), "echo")
    rdzv = node.rendezvous
    ready.set()
    while not over.is_set():
        await asyncio.sleep(0.01)
    await node.close()

async def child():
    node = await Node.attach(name="child", rdzv=rdzv)
    assert await node.ref(Echo, "echo").ping() != os.getpid()
    await node.close()

ready, over = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: asyncio.run(host()))
thread.start()
assert ready.wait(20)
in_child(lambda: asyncio.run(child()))
over.set()
thread.join()
print("fine")
"""
    )
