"""What each actor's process imports anyway, so that a process which has it already can be forked into one.

Knows roles, kinds and names of modules; which modules a role's process has when it serves was read off `sys.modules`.
Must not import any of them, nor know processes. A module that is left out costs its import at each start, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.config import RunConfig
from ..actor_spec import ActorSpec
from ..worker_spec import DEFAULT_PROGRAM


@dataclass(frozen=True, slots=True)
class Kit:
    """Modules that are imported together."""

    modules: tuple[str, ...]
    patience_s: float
    """How long starts wait for a new server's imports, those of its base included. Afterwards they go without, until it
    is ready; that repeats the imports beside it, so it is longer than they take on a slow disk."""
    base: str = ""
    """Kit whose process is forked to make this one's: what it has is there already."""


LIGHT, SERVED, TORCH, MEGATRON = "light", "served", "torch", "megatron"

KITS: Mapping[str, Kit] = {
    LIGHT: Kit(
        (
            *("myxa.launch.worker", "myxa.launch.program", "myxa.launch.composition.monitor_parts"),
            *("myxa.launch.composition.checkpoint_parts", "myxa.launch.composition.knob_limits"),
            *("myxa.actors.buffer.buffer", "myxa.actors.coordinator.coordinator", "myxa.actors.data.mixed"),
            *("myxa.actors.rollout.rollout", "myxa.actors.rewards.rewarder", "myxa.actors.models.hf_folder"),
            *("myxa.actors.workflows.named", "myxa.actors.workflows.named", "numpy.random"),
        ),
        patience_s=10.0,
    ),
    SERVED: Kit(
        ("myxa.actors.engines.engine_pool", "myxa.actors.engines.sglang_launched"), patience_s=20.0, base=LIGHT
    ),
    TORCH: Kit(
        (
            *("myxa.launch.composition.gang_comms", "myxa.launch.composition.gang_start"),
            *("myxa.actors.backends.torch_backend.backend", "myxa.actors.trainer.trainer"),
            *("myxa.actors.engines.embedded.engine", "myxa.actors.weights.channels.reader"),
        ),
        patience_s=30.0,
        base=LIGHT,
    ),
    MEGATRON: Kit(("myxa.actors.backends.megatron.backend",), patience_s=45.0, base=TORCH),
}
"""Roles that need no torch get none and do not wait for it."""


def with_bases(kit: str) -> tuple[str, ...]:
    """The kit, then what it is made of: those that can stand in for it, the fullest first."""
    base = KITS[kit].base
    return (kit, *(with_bases(base) if base else ()))


READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_")
"""How variables begin that numeric libraries read when they are loaded, when it is not known yet for whom."""
SET_PER_ACTOR = "OMP_NUM_THREADS"
"""Of these the one that the launcher itself sets for each actor: the child makes up for it (forked.py)."""


@dataclass(frozen=True, slots=True)
class Preloads:
    """Which actors of a run are forked, and from which kit."""

    is_our_program: bool
    """Somebody's own composition root may need none of what ours needs."""
    has_engines: bool
    warm: tuple[str, ...] = ()
    """Kits that this node needs, and makes before it is asked for them."""

    def kit_of(self, actor: ActorSpec) -> str:
        """Empty: it gets an interpreter of its own. Variables of a role may be for the loader, or read at import."""
        if actor.python or actor.env:
            return ""
        if not self.is_our_program:
            return LIGHT
        if actor.role == "trainer":
            # Importing megatron-core asks CUDA for devices where there are some, which no fork survives.
            return MEGATRON if actor.kind == "megatron" and not actor.devices else TORCH
        if actor.role != "rollout" or not self.has_engines or actor.kind == "recorded":
            return LIGHT
        return SERVED if actor.kind == "sglang" else TORCH


def preloads_of(
    config: RunConfig, program: str, own_actors: Iterable[ActorSpec], env: Mapping[str, str]
) -> Preloads | None:
    """For a node with these actors and this launcher's variables; None: every actor gets an interpreter of its own."""
    is_fixed = any(name.startswith(READ_AT_IMPORT) and name != SET_PER_ACTOR for name in env)
    if not config.run.preload or is_fixed:
        return None
    found = Preloads(is_our_program=program == DEFAULT_PROGRAM, has_engines=config.algo.kind != "sft")
    kits = dict.fromkeys(kit for kit in map(found.kit_of, own_actors) if kit)
    return Preloads(found.is_our_program, found.has_engines, tuple(kits))
