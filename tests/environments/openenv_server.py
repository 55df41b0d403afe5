"""A server of OpenEnv: say the next number, three times. `python openenv_server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_app  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.interfaces import Environment  # pyright: ignore[reportMissingImports]
from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]


class Say(Action):
    number: int


class Heard(Observation):
    text: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._said = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Heard:
        self._said = 0
        return Heard(text=f"count from 0, seed {seed}", done=False, reward=0.0)

    def step(self, action: Say, timeout_s: float | None = None, **more: Any) -> Heard:
        self._said += 1
        right = action.number == self._said
        return Heard(text=f"go on after {self._said}", done=self._said == 3, reward=0.5 * right)

    @property
    def state(self) -> State:
        return State(episode_id="", step_count=self._said)


if __name__ == "__main__":
    uvicorn.run(
        create_app(Counting, Say, Heard, env_name="counting", max_concurrent_envs=16),
        port=int(sys.argv[1]),
        log_level="warning",
    )
