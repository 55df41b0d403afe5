"""The result of `myxa plan`: its records, and the page and the JSON that are made from them. Pure.

The page has a section each for placement (a grid of nodes and devices), memory, objective, batch, staleness, disk and
processes. Commands and variables of processes come from the functions that the launcher itself uses; values of
variables whose names say that they are secret are left out. Problems come last: errors before warnings, file by file
and line by line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ...core.config import Inspected, RunConfig
from ...core.config.problems import KeyOrigin, Problem
from ...core.errors import MyxaError
from ..actor_spec import ActorSpec, GangRendezvous
from ..composition.memory_parts import takes_turns
from ..composition.weight_channels import choose_channel
from ..memory_part import count_text, size_text
from ..node_place import DEFAULT_PORT
from ..preflight.disk import DiskNeed
from ..preflight.finding import ConfigFinding
from ..worker_spec import SPEC_VARIABLE, child_env, worker_command
from .batch import BatchPlan
from .data_glance import PlannedSource
from .memory_estimate import DeviceLoad, Memory, used_devices
from .staleness_plan import STEP_RATIOS, StalenessPlan

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
HIDDEN = "(not shown)"
CHOSEN = "<chosen at start>"


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    """One process."""

    actor: str
    node: int
    command: tuple[str, ...]
    env: dict[str, str]
    """What is set besides the launcher's own environment."""


def starts_of(config: RunConfig, actors: Sequence[ActorSpec]) -> tuple[PlannedProcess, ...]:
    """Every process that the launcher starts, and the servers that rollout actors start, in start order."""
    found: list[PlannedProcess] = []
    for actor in actors:
        meeting = GangRendezvous(address=CHOSEN, port=0) if actor.rank is not None else None
        env = child_env({}, actor, spec_path=CHOSEN, run_id=CHOSEN, attempt=0, meeting=meeting)
        if "MASTER_PORT" in env:
            env["MASTER_PORT"] = CHOSEN
        found.append(PlannedProcess(actor.name, actor.node, worker_command(actor), shown_env(env)))
        if actor.role == "rollout" and actor.kind == "sglang" and not config.engine.attach:
            found.append(_server(config, actor))
    return tuple(found)


def shown_env(env: dict[str, str]) -> dict[str, str]:
    """Without the values of secrets."""
    return {name: HIDDEN if SECRET.search(name) and name != SPEC_VARIABLE else value for name, value in env.items()}


def _server(config: RunConfig, actor: ActorSpec) -> PlannedProcess:
    """About as `actors/engines/sglang/launch.py` starts it, which asks the installed SGLang for names first."""
    flags: list[str] = ["--model-path", config.model.path, "--host", "127.0.0.1", "--port", CHOSEN]
    flags += ["--dtype", config.engine.dtype, "--max-running-requests", str(config.engine.max_running)]
    if config.engine.context_length:
        flags += ["--context-length", str(config.engine.context_length)]
    if len(actor.devices) > 1 and "tp_size" not in config.sglang:
        flags += ["--tp-size", str(len(actor.devices))]
    if config.memory.share == "switch":
        flags.append("--enable-memory-saver")
    for name, value in config.sglang.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [flag, *_words(value)]
    command = (config.engine.python or actor.python or sys.executable, "-m", "sglang.launch_server", *flags)
    return PlannedProcess(
        f"{actor.name} server", actor.node, command, {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    )


def _words(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def command_text(start: PlannedProcess) -> str:
    """As a shell would take it."""
    return shlex.join(start.command)


def listening(config: RunConfig, actors: Sequence[ActorSpec], num_nodes: int) -> Iterator[str]:
    """Sockets and ports that will be opened, a sentence each."""
    yield "Unix sockets of actors, in a folder of the launcher (0700) below XDG_RUNTIME_DIR or TMPDIR"
    if config.control.socket:
        yield "control.sock (0600) and view.sock there, for `myxa get`, `set`, `ps` ..."
    if num_nodes > 1:
        yield f"node 0: port {DEFAULT_PORT} (--rdzv) for the other nodes; actors of all nodes: TCP ports (encrypted)"
    if any(actor.rank is not None for actor in actors):
        where = "127.0.0.1" if num_nodes == 1 else "its own address"
        yield f"trainer/0's node: a free port of {where} for torch's meeting (MASTER_PORT)"
    yield from _web_ports(config)
    servers = [actor for actor in actors if actor.role == "rollout" and actor.kind == "sglang"]
    if servers and not config.engine.attach:
        yield f"{len(servers)} free port{'s'[: len(servers) - 1]} of 127.0.0.1, one for each SGLang server"
    if choose_channel(config) == "nccl" and config.algo.kind != "sft":
        yield "trainer: a free port for each engine's weight group"


def _web_ports(config: RunConfig) -> Iterator[str]:
    port = config.monitor.prometheus_port
    if port >= 0:
        yield f"monitor: {f'port {port}' if port else 'a free port'} of 127.0.0.1 for Prometheus"
    if config.control.dashboard_port >= 0:
        shown = f"port {config.control.dashboard_port}" if config.control.dashboard_port else "a free port"
        yield f"launcher: {shown} of 127.0.0.1 for the dashboard"


def written_files(config: RunConfig) -> Iterator[str]:
    """Files of the run directory."""
    yield f"{config.run.dir}/{config.run.name}-<date>-<time>/, and {config.run.dir}/latest pointing at it; in it:"
    yield "config.toml, ledger.sqlite (with ledger.sqlite.lock), metrics.jsonl, events.jsonl, audit.jsonl, logs/"
    yield "origin.json, .launcher.lock, coordinator.journal, rdzv.json while it runs, report.html at the end"
    rest = [
        ("control.json while it runs", config.control.socket),
        (f"samples.jsonl (at most {config.monitor.samples_mb} MiB)", bool(config.monitor.samples_per_step)),
        ("trace.json (and trace.1.json, the part before)", config.monitor.trace),
        ("TensorBoard's files", config.monitor.tensorboard),
        (f"memory.{config.roles.memory.nodes[0]}.jsonl", config.memory.share == "switch"),
        ("weights/", choose_channel(config) == "disk" and config.algo.kind != "sft"),
        (f"checkpoints/ every {config.trainer.checkpoint_every} steps", bool(config.trainer.checkpoint_every)),
        ("export/ at the end", config.trainer.export_at_end),
    ]
    found = [text for text, is_there in rest if is_there]
    if found:
        yield ", ".join(found)


Severity = Literal["error", "warning"]
PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One problem."""

    severity: Severity
    file: str
    """Run file, or the flag; empty: neither."""
    line: int
    """0: none."""
    key: str
    """Dotted path in the run file; empty: about none."""
    message: str
    """With the key and its value."""
    remedy: str = ""
    """Empty: the message says it."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{self.message}" + (f" -- {self.remedy}" if self.remedy else "")


def of_problem(problem: Problem, inspected: Inspected) -> PlanProblem:
    """One that the run file itself has."""
    origin = problem.origin or inspected.origins.of(problem.path)
    text = str(problem).removeprefix(f"{problem.origin}: ") if problem.origin else str(problem)
    cause, _, remedy = text.partition(" -- ")
    return PlanProblem("error", origin.place, origin.line, ".".join(problem.path), cause, remedy)


def of_finding(finding: ConfigFinding, inspected: Inspected) -> PlanProblem:
    """One of the machine, the files, or the arithmetic."""
    origin = inspected.origins.of(tuple(finding.key.split("."))) if finding.key else KeyOrigin("", 0)
    severity: Severity = "warning" if finding.is_warning else "error"
    return PlanProblem(severity, origin.place, origin.line, finding.key, finding.error.message, finding.error.remedy)


def of_error(error: MyxaError) -> PlanProblem:
    """One that kept the run file from being read."""
    match = PLACE.fullmatch(error.message)
    if match is None:
        return PlanProblem("error", "", 0, "", error.message, error.remedy)
    return PlanProblem("error", match["file"], int(match["line"]), "", match["rest"], error.remedy)


def in_order(problems: Iterable[PlanProblem], files: Sequence[str]) -> tuple[PlanProblem, ...]:
    """Errors first; file by file and line by line, flags last; each once."""
    order = {file: number for number, file in enumerate(files)}

    def place(one: PlanProblem) -> tuple[bool, int, int]:
        return (one.severity == "warning", order.get(one.file, len(files)), one.line)

    return tuple(sorted(dict.fromkeys(problems), key=place))


OVER = "OVER"
UNCOUNTED = "not counted: fragments of the allocator, workspaces of libraries, activations of an engine's prefill"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which actor runs where."""

    grid: dict[str, dict[str, list[str]]]
    picture: list[str]
    legend: str
    turns: list[str]
    nodes: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The answer. Parts that could not be worked out are None."""

    files: tuple[str, ...]
    name: str = ""
    problems: tuple[PlanProblem, ...] = ()
    placement: Placement | None = None
    objective: tuple[str, ...] = ()
    """What the run optimises, a line per part."""
    batch: BatchPlan | None = None
    sources: tuple[PlannedSource, ...] = ()
    """Of prompts, where they have names."""
    staleness: StalenessPlan | None = None
    memory: Memory | None = None
    num_parameters: int | None = None
    disk: DiskNeed | None = None
    starts: tuple[PlannedProcess, ...] = ()
    listening: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def errors(self) -> tuple[PlanProblem, ...]:
        """What keeps the run from starting."""
        return tuple(one for one in self.problems if one.severity == "error")


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
        staleness_lines(plan.staleness),
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


def staleness_lines(plan: StalenessPlan | None) -> Iterator[str]:
    """The section about the staleness bound; nothing without a plan."""
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


LETTERS = {"coordinator": "C", "buffer": "B", "monitor": "M", "memory": "Y", "trainer": "T", "rollout": "R"}
CPU = "cpu"


def grid(actors: Sequence[ActorSpec], num_nodes: int) -> dict[str, dict[str, list[str]]]:
    """Node -> device ("cpu", "GPU 0", ...) -> letters with numbers, like "T0"."""
    found: dict[str, dict[str, list[str]]] = {f"node {node}": {CPU: []} for node in range(num_nodes)}
    for actor in actors:
        row = found[f"node {actor.node}"]
        for device in [f"GPU {number}" for number in used_devices(actor)] or [CPU]:
            row.setdefault(device, []).append(mark(actor))
    return found


def mark(actor: ActorSpec) -> str:
    """`trainer/3` -> "T3", `buffer` -> "B"."""
    return LETTERS[actor.role] + (str(actor.index) if "/" in actor.name else "")


def picture(rows: dict[str, dict[str, list[str]]]) -> list[str]:
    """The grid as lines of text."""
    devices = sorted({device for row in rows.values() for device in row}, key=_order)
    cells = {(node, device): _cell(row.get(device)) for node, row in rows.items() for device in devices}
    widths = {device: max(len(device), *(len(cells[node, device]) for node in rows)) for device in devices}
    first = max(len(node) for node in rows)
    lines = [" " * first + "  " + "  ".join(device.ljust(widths[device]) for device in devices)]
    lines += [
        node.ljust(first) + "  " + "  ".join(cells[node, device].ljust(widths[device]) for device in devices)
        for node in rows
    ]
    return [line.rstrip() for line in lines]


def _order(device: str) -> tuple[bool, int]:
    return (device != CPU, int(device.rpartition(" ")[2]) if device != CPU else 0)


def _cell(marks: list[str] | None) -> str:
    return "" if marks is None else " ".join(_shortened(marks)) or "-"


def _shortened(marks: list[str]) -> list[str]:
    """Sixteen engines on a CPU: R0-R15."""
    out: list[str] = []
    for letter in dict.fromkeys(one[0] for one in marks):
        same = [one for one in marks if one[0] == letter]
        out += same if len(same) <= 4 else [f"{same[0]}-{same[-1]}"]
    return out


def legend(actors: Sequence[ActorSpec]) -> str:
    """`C coordinator  B buffer ...`, of the roles there are."""
    return "  ".join(f"{LETTERS[role]} {role}" for role in dict.fromkeys(actor.role for actor in actors))


def turns(config: RunConfig, actors: Sequence[ActorSpec]) -> list[str]:
    """Which role uses shared devices when; empty where roles do not take turns."""
    if not takes_turns(config):
        return []
    drawn = {"trainer": "####====........", "rollout": "....====########"}
    lines = [f"  {mark(actor).ljust(4)} {drawn[actor.role]}" for actor in actors if actor.role in drawn]
    return [
        'in turns (memory.share = "switch"): # has the device, = weights of both, . has left it',
        *lines,
        "       step    generation, and again",
    ]


def processes(actors: Sequence[ActorSpec]) -> list[dict[str, Any]]:
    """Processes of each node: how many, threads, interpreters."""
    found: list[dict[str, Any]] = []
    for node in sorted({actor.node for actor in actors}):
        mine = [actor for actor in actors if actor.node == node]
        found.append(
            {
                "node": node,
                "num_processes": len(mine),
                "threads": sum(actor.threads for actor in mine),
                "interpreters": sorted({actor.python or "the launcher's" for actor in mine}),
            }
        )
    return found
