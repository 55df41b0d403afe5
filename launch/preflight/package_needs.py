"""Which packages the actors of a run need in their interpreters. Looks at names of data files, at nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...actors.backends.megatron.verbatim import check_tables
from ...actors.data.data_files import needs_pyarrow
from ...actors.sinks.names import SHIPPED
from ...core.config import RunConfig
from ...core.config.data import parse_sources
from ...core.errors import ConfigError, MyxaError
from ..actor_spec import ActorSpec
from .finding import ConfigFinding, looked
from .interpreters import Answer, Installed


class Need(NamedTuple):
    """A module that an actor cannot do without."""

    module: str
    what: str
    """Follows the module's name in the message, and says who needs it."""
    remedy: str = "install it there"


def package_findings(
    config: RunConfig, actors: Sequence[ActorSpec], answers: Mapping[str, Answer]
) -> Iterator[ConfigFinding]:
    """What is missing where, one finding per role and module; interpreters that cannot be used at all."""
    told: set[str] = set()
    for actor in actors:
        answer = answers.get(actor.role)
        if actor.role in told or answer is None:
            continue
        told.add(actor.role)
        key = f"roles.{actor.role}.python"
        if isinstance(answer, MyxaError):
            yield ConfigFinding(key, answer)
        else:
            yield from _missing(config, actor, answer, key)


def _missing(config: RunConfig, actor: ActorSpec, installed: Installed, key: str) -> Iterator[ConfigFinding]:
    place = f"{key}: {installed.python or sys.executable}"
    for need in needs(config, actor):
        if need.module not in installed.folders:
            yield ConfigFinding(
                key, ConfigError(f'{place} has no module "{need.module}", {need.what}', remedy=need.remedy)
            )
    core = installed.folders.get("megatron.core")
    if actor.role == "trainer" and actor.kind == "megatron" and core:
        settings = config.megatron
        tables = {"model": settings.model, "ddp": settings.ddp, "optimizer": settings.optimizer}
        yield from looked("megatron", check_tables, tables, Path(core))


def needs(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    """The modules that this actor needs beside myxa's own dependencies."""
    if actor.role in _OF_ROLE:
        yield from _OF_ROLE[actor.role](config, actor)
    shares = config.memory.share == "switch" and bool(config.roles.trainer.device_ids)
    if shares and actor.role in ("trainer", "rollout", "memory"):
        yield Need("pynvml", 'which memory.share = "switch" needs on GPUs', "install nvidia-ml-py there (extra gpu)")


def _of_trainer(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    yield Need("torch", "which every trainer needs")
    if actor.kind == "megatron":
        what = 'which roles.trainer.kind = "megatron" needs'
        yield Need("megatron.core", what, "install megatron-core there")
    if config.memory.share == "switch" and config.memory.backend == "torch_memory_saver":
        what = 'which memory.backend = "torch_memory_saver" needs'
        yield Need("torch_memory_saver", what, "install torch-memory-saver there (extra gpu)")


def _of_rollout(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    if config.algo.kind == "sft":
        return
    if actor.kind == "embedded":
        yield Need("torch", "which every rollout needs")
    named = (*config.reward.named_functions(), *config.eval.named_functions())
    if key := next((key for key, fn in named if fn == "math"), ""):
        yield Need("math_verify", f'which {key} = "math" needs', "install math-verify there (extra math)")


def _of_buffer(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    sources = (source for _, value in config.data_files() for source in parse_sources(value))
    if any(needs_pyarrow(source.path) for source in sources):
        yield Need("pyarrow", "which parquet, Arrow and .zst files need", "install pyarrow there (extra parquet)")


def _of_monitor(config: RunConfig, actor: ActorSpec) -> Iterator[Need]:
    for name in config.monitor.sinks:
        if name in SHIPPED:
            remedy = f"install it there (extra {name}), or take it out of monitor.sinks"
            yield Need(name, f'which monitor.sinks = ["{name}"] needs', remedy)


_OF_ROLE = {"trainer": _of_trainer, "rollout": _of_rollout, "buffer": _of_buffer, "monitor": _of_monitor}
