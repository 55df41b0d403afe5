"""Where a typed call spends its Python: functions entered and bytecodes run of our code for one call, stage by stage.

    python bench/call_stages.py [--depth 64] [--calls 1280]

Caller and callee are two nodes of one process, on one loop, over the Unix socket that two processes would use. Counts
depend on Python's version and not on the machine; what else runs there moves them by a few percent (heartbeats, and
deadlines of calls that take longer than a tick). Not in them: C (JSON, struct, the event loop, the kernel), about half
of a call's time. Prints markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import msgspec
import uvloop
from meter import PAYLOAD  # pyright: ignore[reportMissingImports]
from typed_call import Echo, EchoContract, Report  # pyright: ignore[reportMissingImports]

import myxa
from myxa.transport.node import Node

HOME = str(Path(myxa.__file__).resolve().parent) + "/"
STAGES = {
    "caller: arguments, order, route": ("core/refs.py", "transport/registry/"),
    "caller: number, credit, pending call, its end": ("transport/session/calls.py", "transport/session/pending.py"),
    "both: types to bytes and back": ("transport/codec.py",),
    "both: header": ("transport/session/links.py",),
    "both: sockets, on its way out and taken in": (
        "transport/socket_transport.py",
        "transport/outbox.py",
        "transport/zeromq.py",
    ),
    "both: whose it is, what it is": ("transport/session/session.py", "transport/session/frames.py"),
    "callee: arrival, answer": ("transport/session/serving.py", "transport/node.py"),
    "callee: mailbox, handler's turn": (
        "transport/actor_runner.py",
        "core/",
    ),
}
"""Files, or folders, by the stage that is spent in them; the first that fits."""


class Tally:
    """Counts by stage, while it traces."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.bytecodes: Counter[str] = Counter()
        self._stages: dict[str, str] = {}

    def trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        path = frame.f_code.co_filename
        stage = self._stages.get(path)
        if stage is None:
            stage = self._stages[path] = stage_of(path)
        if event == "opcode":
            self.bytecodes[stage] += 1
        elif event == "call" and stage:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.functions[stage] += 1
        return self.trace if stage else None


def stage_of(path: str) -> str:
    """Empty: not ours, or nothing that a call needs."""
    inside = str(Path(path).resolve()).removeprefix(HOME)
    return next((stage for stage, places in STAGES.items() if inside.startswith(places)), "")


async def count(depth: int, num_calls: int) -> Tally:
    near = await Node.attach(name="near")
    far = await Node.attach(name="far", rdzv=near.rendezvous)
    await near.start(Echo(), "echo")
    await far.wait_for("echo", timeout_s=10)
    ref, report = far.ref(EchoContract, "echo"), msgspec.convert(PAYLOAD, Report)

    async def flood() -> None:
        left = num_calls // depth

        async def caller() -> None:
            for _ in range(left):
                await ref.echo(report)

        await asyncio.gather(*(caller() for _ in range(depth)))

    await flood()
    tally = Tally()
    sys.settrace(tally.trace)
    await flood()
    sys.settrace(None)
    await far.close()
    await near.close()
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=64, help="calls in flight")
    parser.add_argument("--calls", type=int, default=1280)
    args = parser.parse_args()
    num_calls = args.calls // args.depth * args.depth
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        tally = runner.run(count(args.depth, num_calls))
    print(f"| a call, {args.depth} in flight | functions | bytecodes |")
    print("|---|---|---|")
    for stage in STAGES:
        print(f"| {stage} | {tally.functions[stage] / num_calls:.1f} | {tally.bytecodes[stage] / num_calls:.0f} |")
    print(f"| all | {tally.functions.total() / num_calls:.1f} | {tally.bytecodes.total() / num_calls:.0f} |")


if __name__ == "__main__":
    main()
