"""An embedded engine in a process of its own, driven by lines of JSON; it can be held, or slowed, where bytes move.

python engine_process.py NAME MODEL_FOLDER
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.weights.fingerprint import greedy

from myxa.actors.engines.embedded.engine import EmbeddedEngine, EmbeddedOptions
from myxa.actors.weights.beacon import Beacon
from myxa.core.errors import MyxaError
from myxa.core.messages import WeightManifest

HELD_S = 60.0


class HeldBeacon(Beacon):
    """Stops where it is told to, until it may go on."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self.hold_at = ""
        self.pause_s = 0.0
        self.may_go = threading.Event()
        self._tell = tell

    def step(self, position: str, *, is_counted: bool = True) -> None:
        super().step(position, is_counted=is_counted)
        time.sleep(self.pause_s)
        self.wait(position)

    def wait(self, at: str) -> None:
        if self.hold_at and self.hold_at in at:
            self.hold_at = ""
            self._tell({"held": at})
            self.may_go.wait(HELD_S)


async def main() -> None:
    name, folder = sys.argv[1:]
    lock = threading.Lock()

    def tell(reply: dict[str, Any]) -> None:
        with lock:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()

    engine = EmbeddedEngine(Path(folder), EmbeddedOptions(name=name, num_threads=1))
    beacon = engine._beacon = HeldBeacon(tell)
    await engine.start()

    async def do(method: str, argument: Any) -> Any:
        if method == "prepare":
            await engine.prepare_weights(msgspec.convert(argument, WeightManifest))
        elif method == "commit":
            await asyncio.to_thread(beacon.wait, "commit")
            await engine.commit_weights(int(argument))
        elif method == "progress":
            return beacon.progress()
        elif method == "hold":
            beacon.may_go.clear()
            beacon.hold_at = str(argument)
        elif method == "slow":
            beacon.pause_s = float(argument)
        elif method == "go":
            beacon.may_go.set()
        elif method == "answer":
            return await greedy(engine, str(argument))
        return None

    async def answer(number: int, method: str, argument: Any) -> None:
        try:
            tell({"number": number, "reply": await do(method, argument)})
        except MyxaError as err:
            tell({"number": number, "error": err.message})

    tell({"number": 0, "reply": None})
    running: set[asyncio.Task[None]] = set()
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        order = msgspec.json.decode(line)
        task = asyncio.ensure_future(answer(order["number"], order["method"], order["argument"]))
        running.add(task)
        task.add_done_callback(running.discard)


asyncio.run(main())
