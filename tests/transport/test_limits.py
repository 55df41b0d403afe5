"""What a hostile or broken peer can cost: nonsense, half-received envelopes, depth, descriptors."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from tests.harness.manual_clock import ManualClock
from tests.transport.session_net import Net, Sink, link_of

from myxa.core.errors import BadRequest
from myxa.transport.codec import Codec, UndecodableError, decode_value
from myxa.transport.descriptors import SPARE
from myxa.transport.session.frames import (
    LIMITS,
    Envelope,
    Kind,
    Malformed,
    encode,
)
from myxa.transport.session.session import MAX_HELLO_BYTES, Hello, read_hello, write_hello
from myxa.transport.wire import Endpoints, Lane
from myxa.transport.zeromq import max_message

# -- nonsense


def test_nonsense_is_counted_and_holds_nobody_up():
    net = Net(ManualClock())
    one, two = net.end(2, 1), net.end(3, 1)
    for number in range(1000):
        two.session.received(b"%d" % number, Lane.CONTROL, memoryview(b"nonsense"))
    sink = Sink()
    one.call(two, sink)
    net.run()
    for _ in range(1000):
        two.session.received(link_of(two, one).sources[0] or b"", Lane.CONTROL, memoryview(b"nonsense"))
    two.serve()
    net.run()
    assert len(sink.outcomes) == 1
    assert two.session.counters == {"malformed": 2000}


# -- bodies


@pytest.mark.parametrize("depth", [1000, 2000, 1_000_000])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_bounded(depth, opening):
    closing = b"]" if opening == b"[" else b"}"
    body = b"[" + opening * depth + b"1" + closing * depth + b"]"
    if depth > 1024:
        with pytest.raises(UndecodableError):
            decode_value(body, [], object)
        return
    try:
        value = decode_value(body, [], object)
    except UndecodableError:
        return
    try:
        Codec(Any).encode(value)  # whoever sends it on gets an answer, not a crash
    except BadRequest:
        pass


@pytest.mark.parametrize(
    "array",
    [
        ["object", [1], 0], ["O", [1], 0], ["V8", [1], 0], ["datetime64", [1], 0], ["float32", [2**63, 0], 0],
        ["float32", [2**62, 2**62, 0], 0], ["float32", [-1], 0], ["float32", [1] * 65, 0], ["float32", [1.5], 0],
        ["float32", [1], 1], ["float32", [1], -1], ["float32", [2], 0], ["", [1], 0], [None, [1], 0], ["float32", "1", 0],
    ],
)  # fmt: skip
def test_arrays_are_only_what_the_table_of_dtypes_says(array):
    kind = npt.NDArray[np.float32]
    with pytest.raises(UndecodableError):
        decode_value(json.dumps([array]).encode(), [memoryview(bytes(4))], kind)


def test_the_number_of_arrays_is_bounded_on_both_sides():
    arrays = [np.zeros(0, np.float32)] * (LIMITS.arrays + 1)
    with pytest.raises(BadRequest, match="arrays"):
        Codec(list[npt.NDArray[np.float32]]).encode(arrays)
    empty = [b""] * (LIMITS.arrays + 1)
    from myxa.transport.session.frames import decode

    found = decode(memoryview(encode(Envelope(kind=Kind.CALL, corr=3, body=b"[1]", frames=tuple(empty)))))
    assert isinstance(found, Malformed) and "arrays" in found.reason and found.corr == 3


def hello(**changes) -> Hello:
    fields = {"name": "a/0", "protocol": "1", "to_node": 1, "to_epoch": 1}
    fields |= {"endpoints": Endpoints()}
    return Hello(**{**fields, **changes})


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, write_hello(hello(name="x" * 200)), write_hello(hello(name="A B\n")),
        write_hello(hello(attempt=0)), write_hello(hello(attempt=1 << 63)),
        write_hello(hello(endpoints=Endpoints(inproc="x" * MAX_HELLO_BYTES))),
        write_hello(hello(endpoints=Endpoints(curve="nonsense"))),
        write_hello(hello(endpoints=Endpoints(curve="\u00e4" * 40))),
        write_hello(hello(endpoints=Endpoints(tcp=("tcp://10.0.0.1:1", "")))),
        write_hello(hello(endpoints=Endpoints(ipc=("/var/run/some.sock", "")))),
    ],
)  # fmt: skip
def test_a_hello_that_is_none_is_a_value_error(body):
    with pytest.raises(ValueError):
        read_hello(body)


def test_a_hello_travels():
    assert read_hello(write_hello(hello(attempt=7))) == hello(attempt=7)
    newer = orjson.dumps({**orjson.loads(write_hello(hello(protocol="2"))), "more": 1})
    assert read_hello(newer) == hello(protocol="2"), "another version is told why it is refused"


def test_every_lane_has_a_largest_message():
    assert LIMITS.control_message < max_message(Lane.CONTROL) <= LIMITS.control_message + (1 << 17)
    assert LIMITS.chunk < max_message(Lane.BULK) <= 4 << 20


# -- descriptors


def run(code: str, limit: int) -> subprocess.CompletedProcess[str]:
    text = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


def test_without_descriptors_there_is_our_error_and_no_abort():
    """libzmq ends the whole process with SIGABRT when it cannot make a descriptor."""
    done = run(
        """
        import asyncio, os
        from myxa.core.errors import LaunchError
        from myxa.transport.node import Node

        async def main():
            taken = []
            try:
                while True:
                    taken.append(os.dup(2))
            except OSError:
                pass
            for spare in range(6):
                os.close(taken.pop())
            try:
                await Node.attach(name="host")
            except LaunchError as error:
                print("told:", error)

        asyncio.run(main())
        """,
        200,
    )
    assert done.returncode == 0, done.stderr
    assert "told: no file descriptors are left for" in done.stdout
    assert "the limit is 200" in done.stdout


def test_our_own_processes_take_all_descriptors_that_the_system_gives():
    code = """
        from myxa.transport.descriptors import raise_limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
        print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
        """
    assert run(code, 300).stdout.split("\n")[0] == "300 (300, 300)"
    assert SPARE < 32
