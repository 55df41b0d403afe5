"""Preload sets: modules that fork servers import once, so that actors are forked with their imports done.

The modules of each role were read off `sys.modules` of a serving process. This file names them and imports none. A
module that is missing here costs its import at each start, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...core.config import RunConfig
from ..actor_spec import ActorSpec
from ..worker_spec import DEFAULT_PROGRAM


@dataclass(frozen=True, slots=True)
class PreloadSet:
    """Modules that one fork server imports."""

    modules: tuple[str, ...]
    base: str = ""
    """Set whose server is forked to make this one's server: its modules are imported already."""


LIGHT, TORCH, MEGATRON = "light", "torch", "megatron"

PRELOAD_SETS: Mapping[str, PreloadSet] = {
    LIGHT: PreloadSet(
        (
            *("myxa.launch.worker", "myxa.launch.program", "myxa.launch.composition.monitor_parts"),
            "myxa.launch.run_lineage.resume_point",
            *("myxa.actors.buffer.buffer", "myxa.actors.coordinator.coordinator", "myxa.actors.data.prompts"),
            *("myxa.actors.rollout.rollout", "myxa.actors.rewards.rewarder", "myxa.actors.models.hf_folder"),
            *("myxa.actors.workflows.named", "numpy.random"),
        ),
    ),
    TORCH: PreloadSet(
        (
            *("myxa.launch.composition.trainer_parts", "myxa.actors.trainer.trainer"),
            "myxa.actors.backends.torch_backend.backend",
            *("myxa.actors.engines.embedded.engine", "myxa.actors.weights.channels.reader"),
        ),
        base=LIGHT,
    ),
    MEGATRON: PreloadSet(("myxa.actors.backends.megatron.backend",), base=TORCH),
}
"""Roles that need no torch have a set without it and do not wait for it."""


READ_AT_IMPORT = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_")
"""Prefixes of variables that numeric libraries read when they are loaded, before the actor is known."""
SET_PER_ACTOR = "OMP_NUM_THREADS"
"""The one of these that the launcher itself sets for each actor. A forked child applies it later (fork_server.py)."""


@dataclass(frozen=True, slots=True)
class Preloads:
    """Which actors of a run are forked, and from which preload set."""

    is_our_program: bool
    """A user's own composition root may need other modules than ours."""
    has_engines: bool
    warm: tuple[str, ...] = ()
    """Sets whose servers this node starts before the first actor needs them."""

    def set_of(self, actor: ActorSpec) -> str:
        """Name of the actor's preload set; empty: it gets its own interpreter, since variables of its role may be
        for the loader, or read at import."""
        if actor.python or actor.env:
            return ""
        if not self.is_our_program:
            return LIGHT
        if actor.role == "trainer":
            # Importing megatron-core asks CUDA for devices where there are some, which no fork survives.
            return MEGATRON if actor.kind == "megatron" and not actor.devices else TORCH
        return TORCH if actor.role == "rollout" and self.has_engines and actor.kind == "embedded" else LIGHT


def preloads_of(
    config: RunConfig, program: str, own_actors: Iterable[ActorSpec], env: Mapping[str, str]
) -> Preloads | None:
    """Preloads of a node with these actors and launcher variables; None: every actor gets its own interpreter."""
    is_fixed = any(name.startswith(READ_AT_IMPORT) and name != SET_PER_ACTOR for name in env)
    if not config.run.preload or is_fixed:
        return None
    found = Preloads(is_our_program=program == DEFAULT_PROGRAM, has_engines=config.algo.kind != "sft")
    sets = dict.fromkeys(name for name in map(found.set_of, own_actors) if name)
    return Preloads(found.is_our_program, found.has_engines, tuple(sets))
