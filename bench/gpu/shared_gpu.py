"""A composition root for benchmarks: all rollout actors use the same GPUs, those of CUDA_VISIBLE_DEVICES in the role's
`env`. Run files deal GPUs out, so that no two actors have the same one; `roles.rollout.devices` stays "cpu" there.

myxa up run.toml --program shared_gpu:build_actor
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from myxa.core.actor import Actor
from myxa.core.config import RunConfig
from myxa.launch import program
from myxa.launch.actor_spec import ActorSpec


def build_actor(spec: ActorSpec, config: RunConfig, run_dir: Path) -> Actor:
    """See the module's head."""
    named = spec.env.get("CUDA_VISIBLE_DEVICES", "") if spec.role == "rollout" else ""
    gpus = tuple(int(number) for number in named.split(",") if number)
    if gpus:
        spec = msgspec.structs.replace(spec, devices=gpus, visible_devices=gpus)
    return program.build_actor(spec, config, run_dir)
