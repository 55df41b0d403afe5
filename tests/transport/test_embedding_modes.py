"""Two ways to live in another program, each in a real one: nothing of the host is changed, nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.transport.cast_of_actors import Echo, EchoContract

from myxa.core.actor import MailboxPolicy
from myxa.core.errors import ConfigError, LaunchError
from myxa.transport.node import InprocNetwork, Node
from myxa.transport.sync_node import NodeThread

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]

HEAD = """
import asyncio, sys, threading, time
from tests.transport.cast_of_actors import Echo, EchoContract
from tests.transport.host_state import assert_untouched, host_state
from myxa.core.errors import MyxaError
from myxa.transport.node import Node
from myxa.transport.sync_node import NodeThread

def calls(node, name="echo"):
    ref = node.ref(EchoContract, name)
    for _ in range(20):
        node.call(ref.ping)
    try:
        node.call(ref.fail, "engine")
    except MyxaError as error:
        assert "made of glass" in str(error)
    else:
        raise AssertionError("no error came")
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
    node = await Node.attach(name="guest", turn_budget_s=0.002)
    other = await Node.attach(name="other", rdzv=node.rendezvous)
    await node.start(Echo(), "echo")
    ref = other.ref(EchoContract, "echo")
    await asyncio.gather(*(ref.ping() for _ in range(200)))
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


THREAD = """
def guest(**options):
    with NodeThread(name="host", **options) as host:
        host.start(Echo(), "echo")
        with NodeThread(name="other", rdzv=host.rendezvous, **options) as other:
            calls(other)
            assert host.failure is None and other.peers("echo") == ("echo",)
"""


def test_a_thread_changes_nothing():
    fine(
        THREAD
        + """
before = host_state()
guest(loop_factory=asyncio.SelectorEventLoop)
assert_untouched(before)
guest()
assert_untouched(before, may_add=2)  # libuv keeps a pipe for as long as the process lives
again = host_state()
guest()
assert_untouched(again)
print("fine")
"""
    )


def test_a_thread_beside_the_hosts_own_running_loop():
    fine(
        THREAD
        + """
async def main():
    before = host_state()
    await asyncio.to_thread(guest, loop_factory=asyncio.SelectorEventLoop)
    with NodeThread(name="host", loop_factory=asyncio.SelectorEventLoop) as host:
        host.start(Echo(), "echo")
        ref = host.ref(EchoContract, "echo")
        assert isinstance(await asyncio.wrap_future(host.submit(ref.ping)), int)
        try:
            await ref.ping()
        except MyxaError as error:
            assert "belongs to the loop of host" in str(error)
        else:
            raise AssertionError("a reference crossed to another loop")
    before["threads"] = sorted([*before["threads"], "asyncio_0"])  # of asyncio.to_thread, the host's own
    before["kernel threads"] = sorted([*before["kernel threads"], before["kernel threads"][0]])
    assert_untouched(before)

asyncio.run(main())
print("fine")
"""
    )


# -- hosts that forget


FORGETFUL = """
import logging
logging.basicConfig(level=logging.WARNING)
stopped = []
class Careful(Echo):
    async def on_stop(self, why):
        print("stopped:", why, flush=True)

node = NodeThread(name="host", run_dir=sys.argv[1] if len(sys.argv) > 1 else None)
node.start(Careful(), "echo")
node.call(node.ref(EchoContract, "echo").ping)
"""


def test_a_program_that_ends_without_closing_its_thread():
    with tempfile.TemporaryDirectory(prefix="f-") as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", HEAD + FORGETFUL + "sys.exit(0)", folder],
            capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == "stopped: shutdown\n"
        assert "the program ended without closing it" in done.stderr
        assert list(Path(folder).iterdir()) == [], "the sockets' directory is left"


def test_an_error_in_the_host_is_its_own_and_the_thread_waits_for_the_hosts_other_threads():
    done = run(
        FORGETFUL
        + """
def work():
    time.sleep(0.3)
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print(node.call(node.ref(EchoContract, "echo").sleep, 0.1) is not None, flush=True)
threading.Thread(target=work).start()
raise ValueError("mine")
""",
        expects=1,
    )
    assert "ValueError: mine" in done.stderr
    assert done.stdout == "True\nstopped: shutdown\n"


# -- forks


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

def refused(act):
    try:
        act()
    except MyxaError as error:
        assert "inherited by a fork" in str(error) and "spawn" in error.remedy, error
    else:
        raise AssertionError("an inherited node did something")
"""


def test_a_forked_child_cannot_use_an_attached_node_and_the_parent_can():
    fine(
        FORK
        + """
async def main():
    node = await Node.attach(name="host")
    other = await Node.attach(name="other", rdzv=node.rendezvous)
    await node.start(Echo(), "echo")
    ref = other.ref(EchoContract, "echo")
    await ref.ping()

    def child():
        refused(lambda: node.ref(EchoContract, "echo"))
        refused(lambda: node.peers("echo"))
        refused(lambda: ref.ping().send(None))
        refused(lambda: setattr(node, "name", node.name + "x"))
        try:
            node.close().__await__().send(None)  # allowed, and does nothing
        except (StopIteration, AttributeError):
            pass
        for _ in node.close().__await__():
            raise AssertionError("closing an inherited node waits for something")

    for _ in range(3):
        in_child(child)
    await ref.ping()
    await other.close()
    await node.close()
    in_child(lambda: None)

asyncio.run(main())
print("fine")
"""
    )


def test_a_forked_child_cannot_use_a_facade_and_may_have_a_node_of_its_own():
    fine(
        FORK
        + """
hooks, register = [], os.register_at_fork
os.register_at_fork = lambda **kinds: hooks.append(list(kinds)) or register(**kinds)
host = NodeThread(name="host", loop_factory=asyncio.SelectorEventLoop)
host.start(Echo(), "echo")
rdzv = host.rendezvous
ref = host.ref(EchoContract, "echo")

def child():
    refused(lambda: host.call(ref.ping))
    refused(lambda: host.submit)
    host.close()
    with NodeThread(name="child", rdzv=rdzv, loop_factory=asyncio.SelectorEventLoop) as own:
        assert own.call(own.ref(EchoContract, "echo").ping) != os.getpid()

in_child(child)
calls(host)
host.close()
with NodeThread(name="host"):
    pass
assert hooks == [["after_in_child"]], hooks
print("fine")
"""
    )


# -- what all of them share


def test_the_switch_interval_is_set_in_processes_of_our_own_only():
    floors = ("core", "transport", "memory", "algos", "actors", "launch")
    users = {str(file.relative_to(ROOT)) for floor in floors for file in (ROOT / floor).rglob("*.py")
             if "setswitchinterval(" in file.read_text()}  # fmt: skip
    assert users == {"launch/worker.py"}


def test_the_facades_take_the_same_options_as_attach():
    import inspect

    from myxa.transport.sync_node import AttachOptions

    wanted = {p.name for p in inspect.signature(Node.attach).parameters.values()}
    assert set(AttachOptions.__annotations__) == wanted - {"network"}


def test_a_thread_cannot_join_the_network_of_another_loop():
    options: Any = {"network": InprocNetwork()}
    with pytest.raises(LaunchError, match="in-process network"):
        NodeThread(name="host", **options)


async def test_a_turn_needs_time():
    for nothing in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="no message is taken in"):
            await Node.attach(name="host", turn_budget_s=nothing)


async def test_a_burst_leaves_room_for_the_hosts_own_work():
    """A thousand casts arrive in a few batches; between two turns of a small budget the host's work runs."""

    class Slow(Echo):
        mailbox = MailboxPolicy(size=4096)

        async def note(self, text: str) -> None:
            self.log.append(text)

    node = await Node.attach(name="host", turn_budget_s=0.0002)
    other = await Node.attach(name="other", rdzv=node.rendezvous)
    echo = Slow()
    await node.start(echo, "echo")
    ref = other.ref(EchoContract, "echo")
    await ref.ping()
    turns: list[int] = []

    async def host_work() -> None:
        while True:
            turns.append(len(echo.log))
            await asyncio.sleep(0)

    work = asyncio.get_running_loop().create_task(host_work())
    async with asyncio.timeout(30):
        await asyncio.gather(*(ref.note(str(n)) for n in range(1000)))
        while len(echo.log) < 1000:
            await asyncio.sleep(0)
    work.cancel()
    assert echo.log == [str(n) for n in range(1000)]
    assert max(b - a for a, b in itertools.pairwise(turns)) < 500, "a whole burst was taken in one turn"
    await other.close()
    await node.close()
