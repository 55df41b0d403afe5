"""`myxa plan`: checks a run and estimates it before it is started.

Starts nothing, needs no GPU and no torch. Problems are collected, never raised: one plan shows all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...actors.models.model_config import ModelConfig
from ...core.config import Inspected, RunConfig, inspect_config
from ...core.errors import ConfigError, MyxaError
from ...memory.host import available_bytes
from ..actor_spec import ActorSpec
from ..memory_part import GIB
from ..preflight.disk import disk_of
from ..preflight.finding import ConfigFinding, key_of, looked
from ..preflight.machine import free_at, look_at_gpus
from ..preflight.preflight import CHECKS, FIT_CHECKS, NAMED_CHECKS, find_problems, readable_model
from ..supervisor.placement import place, placement_problems
from .batch import batch_of
from .config_warnings import odd_counts, sampling_findings
from .data_glance import batch_findings, glance_at_held_out, glance_at_sources, source_findings
from .memory_estimate import Capacities, memory_of
from .objective_text import objective_lines
from .plan_page import (
    Placement,
    PlannedRun,
    grid,
    in_order,
    legend,
    listening,
    of_error,
    of_finding,
    of_problem,
    picture,
    processes,
    starts_of,
    turns,
    written_files,
)
from .staleness_plan import staleness_findings, staleness_of


@dataclass(frozen=True, slots=True)
class RunPlanOptions:
    """What is planned."""

    files: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    num_nodes: int = 1
    device_gib: float = 0.0
    """Size of a GPU; 0: as NVML says, if it does."""
    is_this_machine: bool = True
    """Whether the run will be started here; else packages, devices, ports and disk are not looked at, and files that
    are not here are no errors."""


def make_plan(options: RunPlanOptions) -> PlannedRun:
    """Look at everything. Never raises for what is wrong with the run."""
    try:
        inspected = inspect_config(options.files, options.overrides)
    except MyxaError as error:
        return PlannedRun(options.files, problems=(of_error(error),))
    problems = [of_problem(problem, inspected) for problem in inspected.problems]
    config = inspected.config
    if config is None:
        return PlannedRun(options.files, problems=in_order(problems, options.files))
    if inspected.problems:
        found = [finding for finding in _of_files(config, options) if not _touches(finding.key, inspected)]
        problems += [of_finding(finding, inspected) for finding in found]
        return PlannedRun(options.files, config.run.name, in_order(problems, options.files))
    plan, findings = _planned(config, options)
    problems += [of_finding(finding, inspected) for finding in findings]
    return PlannedRun(options.files, config.run.name, in_order(problems, options.files), **plan)


def _touches(key: str, inspected: Inspected) -> bool:
    """Whether a finding is about the default that replaces a mistaken value."""
    path = tuple(key.split("."))
    return any(path[:length] in inspected.bad for length in range(1, len(path) + 1))


def _of_files(config: RunConfig, options: RunPlanOptions) -> Iterator[ConfigFinding]:
    """Findings beside mistakes of the run file: only of the files that it names."""
    actors = place(config, options.num_nodes) if not placement_problems(config, options.num_nodes) else ()
    yield from find_problems(config, actors, NAMED_CHECKS)


def _elsewhere(config: RunConfig, actors: Sequence[ActorSpec]) -> Iterator[ConfigFinding]:
    """For a run on another machine: what is missing here may be there, so it is a warning."""
    for finding in find_problems(config, actors, NAMED_CHECKS):
        yield replace(finding, is_warning=True)
    yield from find_problems(config, actors, FIT_CHECKS)


def _planned(config: RunConfig, options: RunPlanOptions) -> tuple[dict[str, Any], list[ConfigFinding]]:
    findings = [
        ConfigFinding(key_of(text), ConfigError(text, remedy="see roles.* and --nnodes"))
        for text in placement_problems(config, options.num_nodes)
    ]
    actors = () if findings else place(config, options.num_nodes)
    shown: dict[str, Any] = {}
    if actors:
        findings += find_problems(config, actors, CHECKS) if options.is_this_machine else _elsewhere(config, actors)
        shown |= _placed(config, actors, options.num_nodes)
    model = readable_model(config)
    num_ranks = sum(actor.role == "trainer" for actor in actors)
    num_rollouts = sum(actor.role == "rollout" for actor in actors)
    train, shown["sources"] = glance_at_sources(config)
    held_out = glance_at_held_out(config)
    findings += (*train.findings, *(finding for one in held_out.values() for finding in one.findings))
    findings += batch_findings(config, train)
    findings += source_findings(config, shown["sources"])
    shown["objective"] = objective_lines(config)
    shown["batch"] = batch = batch_of(config, model, max(1, num_ranks), train.num_rows, train.num_draws)
    findings += odd_counts(config, batch, {name: one.num_rows for name, one in held_out.items()})
    findings += sampling_findings(config)
    if actors and config.algo.kind != "sft":
        shown["staleness"] = staleness = staleness_of(config, num_rollouts)
        findings += staleness_findings(config, staleness)
    if model is not None:
        shown["num_parameters"] = model.num_parameters
        shown |= _sized(config, model, actors, options, findings)
    return shown, findings


def _placed(config: RunConfig, actors: Sequence[ActorSpec], num_nodes: int) -> dict[str, Any]:
    rows = grid(actors, num_nodes)
    return {
        "placement": Placement(rows, picture(rows), legend(actors), turns(config, actors), processes(actors)),
        "starts": starts_of(config, actors),
        "listening": tuple(listening(config, actors, num_nodes)),
        "written": tuple(written_files(config)),
    }


def _sized(
    config: RunConfig,
    model: ModelConfig,
    actors: Sequence[ActorSpec],
    options: RunPlanOptions,
    findings: list[ConfigFinding],
) -> dict[str, Any]:
    """Memory and disk; what is wrong with them goes into `findings`."""
    here = options.is_this_machine
    disk = disk_of(config, model, free_at(config.run.dir) if here else None)
    if not actors or any(finding.key.startswith("megatron.") and not finding.is_warning for finding in findings):
        return {"disk": disk}
    num_ranks = sum(actor.role == "trainer" for actor in actors)
    if config.roles.trainer.kind == "megatron":
        wrong = list(looked("megatron", _check_gang, config, num_ranks))
        findings += wrong
        if wrong:
            return {"disk": disk}
    memory, wrong = memory_of(config, model, actors, _capacities(config, options))
    findings += wrong
    return {"disk": disk, "memory": memory}


def _check_gang(config: RunConfig, num_ranks: int) -> None:
    from ...actors.backends.megatron.layout import ParallelLayout

    ParallelLayout.of(config.megatron).dp(num_ranks)


def _capacities(config: RunConfig, options: RunPlanOptions) -> Capacities:
    gpu = int(options.device_gib * GIB) or None
    if gpu is None and options.is_this_machine and config.roles.trainer.device_ids + config.roles.rollout.device_ids:
        sizes = [one.num_bytes for one in look_at_gpus().found if one.num_bytes]
        gpu = min(sizes) if sizes else None
    return Capacities(gpu, available_bytes() if options.is_this_machine else None)
