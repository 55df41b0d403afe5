"""Composition roots that slow one part of a real run down; `--program slowed_parts:slow_trainer`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from myxa.core.actor import Actor
from myxa.core.config import RunConfig
from myxa.launch.actor_spec import ActorSpec
from myxa.launch.program import build_actor

STEP_S = 0.6
SYNC_S = 0.8


def slow_trainer(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    """Every training step takes longer."""
    actor: Any = build_actor(spec, config, run_dir)
    if spec.role == "trainer":
        backend = actor._backend
        train = backend.train

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(STEP_S)
            return train(*args, **kwargs)

        backend.train = slowly
    return actor


def slow_weights(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    """Every weight version takes long to reach the engine."""
    actor: Any = build_actor(spec, config, run_dir)
    if spec.role == "rollout":
        engine = actor._engine
        prepare = engine.prepare_weights

        async def slowly(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(SYNC_S)
            return await prepare(*args, **kwargs)

        engine.prepare_weights = slowly
    return actor
