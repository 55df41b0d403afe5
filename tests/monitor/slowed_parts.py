"""A composition root whose parts are slow while a file in the job's folder says so; `--program slowed_parts:slowed`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from myxa.core.actor import Actor
from myxa.core.config import RunConfig
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.program import build_actor

SLOW_FILE = "slow.txt"
STEP_S = 0.6
SYNC_S = 0.8

REWARD = """
import time
from pathlib import Path

def reward(completion):
    if Path(__file__).with_name("slow.txt").read_text() == "reward":
        time.sleep(0.4)
    return float(len(set(completion.text)))
"""


def slowed(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    """While the file says "training", every step takes longer; while it says "weights", every adoption does."""
    actor: Any = build_actor(spec, config, run_dir)
    slow = run_dir.parents[1] / SLOW_FILE
    if spec.role == "trainer":
        train = actor.backend.train

        def slow_train(*args: Any, **kwargs: Any) -> Any:
            time.sleep(STEP_S * (slow.read_text() == "training"))
            return train(*args, **kwargs)

        actor.backend.train = slow_train
    if spec.role == "rollout":
        prepare = actor.engine.prepare_weights

        async def slow_prepare(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(SYNC_S * (slow.read_text() == "weights"))
            return await prepare(*args, **kwargs)

        actor.engine.prepare_weights = slow_prepare
    return actor
