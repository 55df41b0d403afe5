"""Environments with Gymnasium's interface that need no package of environments; what they do is noted in a file."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

LOG = Path(os.environ.get("GAMES_LOG", os.devnull))


def note(*words: object) -> None:
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Illegal(Exception):
    kind = "policy"


class Count:
    """Say the next number, three times; each is worth a half. `modes` of the row, by phases, says how it misbehaves in
    the first `times` attempts."""

    def __init__(self, goal: int = 3) -> None:
        self._goal, self._said = goal, 0.0
        self._row: dict[str, Any] = {}

    def _misbehaves(self, phase: str) -> None:
        mode = self._row.get("metadata", {}).get("modes", {}).get(phase, "")
        if not mode or self._row["attempt"] >= self._row["metadata"].get("times", 99):
            return
        note(mode, phase, self._row["session_id"], os.getpid())
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang":
            threading.Event().wait(60)
        if mode == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if mode == "raise":
            raise KeyError("level")
        if mode == "odd-name":
            raise FileNotFoundError(os.fsdecode(b"level-\xff"))
        if mode == "network":
            raise ConnectionError("no route")
        if mode == "policy":
            raise Illegal("an illegal move")
        if mode == "nan":
            self._said = float("nan")
        if mode == "slow":
            time.sleep(0.5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        print("an environment may print")
        self._row = options
        note("reset", options["session_id"], options["attempt"], options["is_replay"], threading.get_ident())
        self._misbehaves("setup")
        return f"count from {self._said:g}", {"seed": seed}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        note("step", self._row["session_id"], action, threading.get_ident())
        time.sleep(float(os.environ.get("GAMES_PACE_S", "0")))
        self._misbehaves("step")
        self._said += 1
        right = action.strip() == f"{self._said:g}"
        return f"go on after {self._said:g}", 0.5 * right, self._said >= self._goal, False, {}

    def finalize(self) -> None:
        self._misbehaves("finalize")

    def score(self) -> float:
        self._misbehaves("score")
        return self._said / 2

    def close(self) -> None:
        note("close", self._row.get("session_id"), self._row.get("attempt"))
        self._misbehaves("close")


class Async(Count):
    """Its steps are coroutines; the row says whether one waits for ever, or holds the loop of all sessions; three
    hold it in one turn."""

    holders, have_come = list[str](), asyncio.Event()

    async def step(self, action: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        mode = self._row["metadata"].get("mode", "")
        if self._row["attempt"] == 0 and mode == "waits":
            await asyncio.Event().wait()
        if self._row["attempt"] == 0 and mode == "holds":
            self.holders.append(self._row["session_id"])
            if len(self.holders) == 3:
                asyncio.get_running_loop().call_soon(self.have_come.set)
            await self.have_come.wait()
            time.sleep(20)  # noqa: ASYNC251 -- that it does so is the point
        return super().step(action)


class Pictures(Count):
    """Shows one after the first turn, to a model that reads text."""

    def step(self, action: str) -> Any:
        return [{"role": "user", "content": [{"type": "image_url"}]}], 0.5, False, False, {}


class Weather:
    """With a tool; actions are whole messages."""

    tools = [
        {"type": "function", "function": {
            "name": "weather", "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "which"}}}}}
    ]  # fmt: skip

    def reset(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "What is the weather in Bern?"}]

    def step(self, action: dict[str, Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        calls = action.get("tool_calls") or []
        if action["is_malformed"]:
            return "that call cannot be read", -0.25, False, False, {}
        if calls:
            return [{"role": "tool", "content": "rain", "tool_call_id": calls[0]["id"]}], 0.0, False, False, {}
        return None, float("rain" in (action["content"] or "")), True, False, {}


class Moves:
    n, start = 4, -1


class Board:
    """Shows what Gymnasium's observations may be; actions are numbered. Its `reset` has the interface of old."""

    action_space = Moves()

    def __init__(self) -> None:
        self._shown: list[Any] = [["left", "right"], {"board": np.arange(1001) % 10}, None]

    def reset(self) -> tuple[int, int]:
        return 7, 8

    def step(self, action: int) -> Any:
        note("move", action)
        return self._shown.pop(0), 1.0, not self._shown, {}
