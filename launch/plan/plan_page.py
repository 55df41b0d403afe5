"""A plan as text, and as JSON types. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..memory_part import count_text, size_text
from ..preflight.disk import DiskNeed
from .batch import BatchPlan
from .data_glance import PlannedSource
from .memory_estimate import DeviceLoad, Memory
from .run_plan import Placement, PlannedRun
from .staleness_plan import STEP_RATIOS, StalenessPlan
from .starts import PlannedProcess, command_text

OVER = "OVER"
UNCOUNTED = "not counted: fragments of the allocator, workspaces of libraries, activations of an engine's prefill"


def plan_json(plan: PlannedRun) -> dict[str, Any]:
    """Everything, with the sums."""
    value: dict[str, Any] = msgspec.to_builtins(plan)
    value["ok"] = not plan.errors
    if plan.memory is not None:
        for load, shown in zip(plan.memory.loads, value["memory"]["loads"], strict=True):
            shown |= {"num_bytes": load.num_bytes, "fits": load.fits}
        if plan.memory.engine is not None:
            engine = plan.memory.engine
            value["memory"]["engine"] |= {"cache_tokens": engine.cache_tokens, "full_sequences": engine.full_sequences}
    if plan.disk is not None:
        value["disk"]["needed_bytes"] = plan.disk.needed_bytes
    return value


def plan_text(plan: PlannedRun, *, shows_commands: bool = True) -> str:
    """The page; problems last, where the eye is."""
    parts = [
        _placement(plan.placement),
        _memory(plan.memory, plan.num_parameters),
        _objective(plan.objective),
        _batch(plan.batch),
        _sources(plan.sources),
        _staleness(plan.staleness),
        _disk(plan.disk),
        _starts(plan) if shows_commands else iter(()),
        _problems(plan),
    ]
    pages = ["\n".join(lines) for part in parts if (lines := list(part))]
    return "\n\n".join(pages)


def _heading(text: str) -> str:
    return f"== {text}"


def _placement(placement: Placement | None) -> Iterator[str]:
    if placement is None:
        return
    yield _heading("placement")
    yield from placement.picture
    yield placement.legend
    yield from placement.turns
    for node in placement.nodes:
        python = ", ".join(node["interpreters"])
        yield f"node {node['node']}: {node['num_processes']} processes, {node['threads']} threads, python: {python}"


def _memory(memory: Memory | None, num_parameters: int | None) -> Iterator[str]:
    if memory is None or not memory.loads:
        return
    model = f" of a model of {count_text(num_parameters)} parameters" if num_parameters else ""
    yield _heading(f"memory{model} (the fullest rank)")
    for load in memory.loads:
        yield from _load(load)
    engine = memory.engine
    if engine is not None:
        yield (
            f"the cache holds {engine.cache_tokens:,} tokens = {engine.full_sequences} sequences of "
            f"{engine.context_length:,}; engine.max_running = {engine.max_running}"
        )
    yield UNCOUNTED


def _load(load: DeviceLoad) -> Iterator[str]:
    known = load.capacity_bytes
    size = f" of {size_text(known)}" if known is not None else " (size of the device: --device-gib)"
    over = "" if load.fits else f"  {OVER}"
    yield f"{load.devices}, {load.phase}: {size_text(load.num_bytes)}{size}{over}"
    for part in load.parts:
        name = f"{part.owner} {part.name}".strip()
        yield f"  {name:<26} {size_text(part.num_bytes):>10}  {part.how}"


def _objective(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield _heading("what this run optimises")
        yield from lines


def _batch(batch: BatchPlan | None) -> Iterator[str]:
    if batch is None:
        return
    yield _heading("batch")
    yield (
        f"{batch.num_prompts} prompts x {batch.samples_per_prompt} samples = {batch.num_samples} samples a step, "
        f"{batch.updates_per_step} update{'s' if batch.updates_per_step > 1 else ''} of {batch.samples_per_update}"
    )
    if batch.tokens_per_step is not None:
        yield f"at most {batch.tokens_per_step:,} generated tokens a step (prompts not counted)"
    if batch.micro_batches_per_replica is not None:
        yield (
            f"{batch.num_replicas} replica{'s' if batch.num_replicas > 1 else ''}, each at most "
            f"{batch.micro_batches_per_replica} micro-batches an update"
        )
    if batch.num_steps:
        yield f"{batch.num_steps} steps = {batch.num_updates} updates, {batch.num_steps * batch.num_prompts:,} prompts"
    else:
        yield "no end by steps (run.num_steps = 0)"
    if batch.num_rows is not None:
        passes = f", at least {batch.passes:.2f} passes" if batch.passes is not None else ""
        yield f"{batch.num_rows:,} rows of data{passes}"


def _sources(sources: Sequence[PlannedSource]) -> Iterator[str]:
    if not sources:
        return
    yield _heading("sources of prompts")
    width = max(len(source.name) for source in sources)
    for source in sources:
        rows = "rows not counted" if source.num_rows is None else f"{source.num_rows:,} rows"
        passes = "" if source.passes is None else f", {source.passes:.2f} passes"
        bound = f" of at most {source.max_passes}" if source.max_passes and passes else ""
        yield f"  {source.name:<{width}} {source.share:>7.2%} of the prompts, {rows}{passes}{bound}"


def _staleness(plan: StalenessPlan | None) -> Iterator[str]:
    if plan is None:
        return
    yield _heading("staleness")
    window = f", window W = {plan.window}" if plan.window else ""
    yield f"max_staleness = {plan.max_staleness}, policy {plan.policy}: N = {plan.num_slots} slots{window}"
    yield "  slot: a group holds one from its dispatch until its step was trained: at most N are under way or waiting"
    if plan.window:
        bound = f"(N + W - 2) // {plan.batch_size} = {(plan.num_slots + plan.window - 2) // plan.batch_size}"
        yield "  window: a batch is made of whatever is ready among the W oldest, so none waits for one slow group"
        yield f"  no token is older than {bound} versions when it is trained on"
    fills = "fill the slots" if plan.fills_slots else f"leave {plan.num_slots - plan.concurrency} slots empty"
    yield f"rollout actors: {plan.num_engines}, which take {plan.concurrency} groups at a time and {fills}"
    if plan.waiting:
        yield "simulated: share of the time that the trainer waits (mean lag), if a step takes so many generations"
        yield "  " + "lengths, p99 / median".ljust(24) + "".join(f"{ratio:>14g}" for ratio in STEP_RATIOS)
    for row in plan.waiting:
        cells = (f"{one.waiting_share:.0%} ({one.mean_lag:.1f})" for one in row.steps)
        yield f"  {row.skew:<24g}" + "".join(cell.rjust(14) for cell in cells)


def _disk(disk: DiskNeed | None) -> Iterator[str]:
    if disk is None:
        return
    yield _heading("disk")
    free = f", {size_text(disk.free_bytes)} free" if disk.free_bytes is not None else ""
    yield f"{disk.folder}: {size_text(disk.needed_bytes)} needed{free}"
    for part in disk.parts:
        yield f"  {part.name:<26} {size_text(part.num_bytes):>10}  {part.how}"


def _starts(plan: PlannedRun) -> Iterator[str]:
    if not plan.starts:
        return
    yield _heading("what is started")
    for start in plan.starts:
        yield f"{start.actor} (node {start.node}): {command_text(start)}"
        yield f"  {_variables(start)}"
    yield from (f"listens: {text}" for text in plan.listening)
    yield from (f"writes: {text}" for text in plan.written)


def _variables(start: PlannedProcess) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in start.env.items())


def _problems(plan: PlannedRun) -> Iterator[str]:
    warnings = [one for one in plan.problems if one.severity == "warning"]
    if warnings:
        yield _heading(_counted(len(warnings), "warning"))
        yield from (f"  {one}" for one in warnings)
    if plan.errors:
        yield _heading(_counted(len(plan.errors), "error"))
        yield from (f"  {one}" for one in plan.errors)
    elif not warnings:
        yield "no problems"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def styled_lines(text: str) -> Sequence[tuple[str, str]]:
    """Each line with rich's style for it."""
    out: list[tuple[str, str]] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("== "):
            section = "red" if line.endswith(("error", "errors")) else "yellow" if "warning" in line else ""
            out.append((line, f"bold {section}".strip()))
        else:
            out.append((line, "bold red" if line.endswith(OVER) else section))
    return out
