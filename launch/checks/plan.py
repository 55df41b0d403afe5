"""`myxa plan`: checks a run and estimates it before it is started, as a page or as JSON.

Starts nothing, needs no GPU and no torch. Problems are collected, never raised: one plan shows all of them, last,
errors behind warnings, file by file and line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...actors.hub import HubDownload, cached, looked_up
from ...core.config import inspect_config
from ...core.config.loading import Finding, in_order
from ...core.errors import ConfigError
from ..actor_spec import ActorSpec
from ..memory_part import GIB, count_text, size_text
from ..supervisor.placement import place, placement_problems
from .all_checks import CHECKS
from .check import CheckedRun, key_of, run_checks
from .memory_estimate import DeviceLoad, memory, ranges, used_devices
from .run_arithmetic import batch_plan, staleness_plan


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """What runs on one node."""

    devices: dict[str, list[str]]
    """"cpu", "GPU 0" ... -> actors."""
    num_processes: int
    threads: int
    interpreters: list[str]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The answer. Parts that could not be worked out are None."""

    files: tuple[str, ...]
    name: str = ""
    problems: tuple[Finding, ...] = ()
    placement: tuple[PlannedNode, ...] = ()
    batch: dict[str, float | None] | None = None
    staleness: dict[str, Any] | None = None
    memory: tuple[DeviceLoad, ...] = ()
    num_parameters: int | None = None
    downloads: tuple[HubDownload, ...] = ()
    """Of the hub."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What keeps the run from starting."""
        return tuple(finding for finding in self.problems if finding.severity == "error")


def make_plan(
    files: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    num_nodes: int = 1,
    device_gib: float = 0.0,
    is_here: bool = True,
) -> PlannedRun:
    """Look at everything. Never raises for what is wrong with the run. `device_gib`: size of a GPU; 0: as NVML says.
    `is_here`: the run will start on this machine; else packages, devices, ports and disk are not looked at."""
    inspected = inspect_config(files, overrides)
    config = inspected.config
    if config is None:
        return PlannedRun(tuple(files), problems=in_order(inspected.problems, files))
    misplaced = [
        Finding(key_of(text), ConfigError(text, remedy="see roles.* and --nnodes"))
        for text in placement_problems(config, num_nodes)
    ]
    actors = () if misplaced else place(config, num_nodes)
    config, downloads, absent = looked_up(config)
    run = CheckedRun(cached(config), actors, is_here=is_here, device_bytes=int(device_gib * GIB) or None)
    to_fetch = [download.key for download in downloads if download.num_bytes and not download.key.startswith(MODEL)]
    explained = {*to_fetch, *(finding.key for finding in absent)}
    findings = [*misplaced, *(finding for finding in _findings(run) if finding.key not in explained)]
    findings += [replace(finding, severity="error" if is_here else "warning") for finding in absent]

    def located(finding: Finding) -> Finding:
        return replace(finding, origin=inspected.origins.of(tuple(finding.key.split(".")))) if finding.key else finding

    return PlannedRun(
        tuple(files), config.run.name, in_order(map(located, findings), files),
        placement=tuple(_node(actors, number) for number in range(num_nodes) if actors), batch=run.once(batch_plan),
        staleness=run.once(staleness_plan),
        memory=tuple(load for part in (run, *run.of_models.values()) for load in part.once(memory)[0]),
        num_parameters=run.model.num_parameters if run.model is not None else None, downloads=downloads,
    )  # fmt: skip


def _findings(run: CheckedRun) -> Iterator[Finding]:
    if run.is_here:
        yield from run_checks(CHECKS, run, "run file", "named files", "node", "estimate")
        return
    for finding in run_checks(CHECKS, run, "named files"):  # what is missing here may be there
        yield replace(finding, severity="warning")
    yield from run_checks(CHECKS, run, "run file", "estimate")


# -- placement ---------------------------------------------------------------------------------------------------------


def _node(actors: Sequence[ActorSpec], number: int) -> PlannedNode:
    mine = [actor for actor in actors if actor.node == number]
    devices: dict[str, list[str]] = {"cpu": []}
    for actor in mine:
        for device in [f"GPU {gpu}" for gpu in used_devices(actor)] or ["cpu"]:
            devices.setdefault(device, []).append(actor.name)
    interpreters = sorted({actor.python or "the launcher's" for actor in mine})
    return PlannedNode(devices, len(mine), sum(actor.threads for actor in mine), interpreters)


# -- page and JSON -----------------------------------------------------------------------------------------------------

OVER = "OVER"
UNCOUNTED = "not counted: fragments of the allocator, workspaces of libraries, activations of an engine's prefill"


def plan_json(plan: PlannedRun) -> dict[str, Any]:
    """Everything, with the sums."""
    value: dict[str, Any] = msgspec.to_builtins(replace(plan, problems=()), str_keys=True)
    value["problems"] = [
        {"severity": finding.severity, "file": finding.origin.place, "line": finding.origin.line, "key": finding.key,
         "message": finding.error.message, "remedy": finding.error.remedy} for finding in plan.problems
    ]  # fmt: skip
    return value | {"ok": not plan.errors}


def plan_text(plan: PlannedRun) -> str:
    """The page; problems last, where the eye is."""
    sections = [
        ("placement", _placement(plan)),
        ("hub", _downloads(plan)),
        ("memory (the fullest rank)", _memory(plan.memory, plan.num_parameters)),
        ("batch", _figures(plan.batch)),
        ("staleness", _staleness(plan.staleness)),
    ]
    for severity in ("warning", "error"):
        lines = [f"  {finding}" for finding in plan.problems if finding.severity == severity]
        sections.append((f"{len(lines)} {severity}{'s' if len(lines) != 1 else ''}", iter(lines)))
    pages = ["\n".join([f"== {title}", *lines]) for title, part in sections if (lines := list(part))]
    return "\n\n".join(pages if plan.problems else [*pages, "no problems"])


def _placement(plan: PlannedRun) -> Iterator[str]:
    for number, node in enumerate(plan.placement):
        counts = f"{node.num_processes} processes, {node.threads} threads, python: {', '.join(node.interpreters)}"
        yield f"node {number}: {counts}"
        yield from (f"  {device:<7} {_short(actors)}" for device, actors in node.devices.items() if actors)


def _short(actors: Sequence[str]) -> str:
    """buffer, rollout/0, rollout/1, rollout/2 -> "buffer rollout/0-2"."""
    by_role: dict[str, list[int]] = {}
    for actor in actors:
        role, _, number = actor.rpartition("/") if "/" in actor else (actor, "", "")
        by_role.setdefault(role, []).extend([int(number)] if number else ())
    return " ".join(f"{role}/{ranges(numbers)}" if numbers else role for role, numbers in by_role.items())


MODEL = "model"
"""Begins the keys of models whose folders are looked at without their weights."""


def _downloads(plan: PlannedRun) -> Iterator[str]:
    for file in plan.downloads:
        needs = f"{size_text(file.num_bytes)} to fetch into" if file.num_bytes else "in"
        yield f"{file.key}: {file.name}: {needs} {file.folder}, {size_text(file.free_bytes)} free"


def _memory(loads: Sequence[DeviceLoad], num_parameters: int | None) -> Iterator[str]:
    if not loads:
        return
    yield f"a model of {count_text(num_parameters or 0)} parameters"
    for load in loads:
        unknown = " (size of the device: --device-gib)" if "GPU" in load.devices else ""
        size = unknown if load.capacity_bytes is None else f" of {size_text(load.capacity_bytes)}"
        yield f"{load.devices}, {load.phase}: {size_text(load.num_bytes)}{size}{'' if load.fits else f'  {OVER}'}"
        for part in load.parts:
            yield f"  {f'{part.owner} {part.name}'.strip():<26} {size_text(part.num_bytes):>10}  {part.how}"
    yield UNCOUNTED


def _staleness(plan: dict[str, Any] | None) -> Iterator[str]:
    if plan is None:
        return
    eta, num_slots, batch, at_once = (plan[key] for key in ("max_staleness", "num_slots", "batch_size", "concurrency"))
    yield f"max_staleness = {eta}, policy {plan['policy']}: ({eta} + 1) * {batch} = {num_slots} slots"
    yield "  a group holds a slot from its dispatch until its step was trained"
    yield f"  no token is more than {eta} versions old when it is trained on"
    fills = f"leave {num_slots - at_once} slots empty" if num_slots > at_once else "fill the slots"
    yield f"rollout actors: {plan['num_engines']}, which take {at_once} groups at a time and {fills}"


def _figures(figures: dict[str, float | None] | None) -> Iterator[str]:
    """A line for each that is known."""
    for name, value in (figures or {}).items():
        if value is not None:
            yield f"{name.replace('_', ' '):<28} {value:{',.4g' if isinstance(value, float) else ','}}"
