"""What the launcher will start: commands and environment of every actor, ports, sockets, files. Pure.

Commands and variables come from the functions that the launcher itself uses. Values of variables whose names say that
they are secret are left out.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.config import RunConfig
from ..actor_spec import ActorSpec, GangMeeting
from ..child_env import SPEC_VARIABLE, child_env, worker_command
from ..composition.weight_channels import choose_channel
from ..node_place import DEFAULT_PORT

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
        meeting = GangMeeting(address=CHOSEN, port=0) if actor.rank is not None else None
        env = child_env({}, actor, spec_path=CHOSEN, run_id=CHOSEN, attempt=0, meeting=meeting)
        if "MASTER_PORT" in env:
            env["MASTER_PORT"] = CHOSEN
        found.append(PlannedProcess(actor.name, actor.node, worker_command(actor), shown_env(env)))
        if actor.role == "rollout" and actor.kind == "sglang" and not config.engine.attach:
            found.append(_server(config, actor))
    return tuple(found)


def shown_env(env: dict[str, str]) -> dict[str, str]:
    """Without what must not be shown."""
    return {name: HIDDEN if SECRET.search(name) and name != SPEC_VARIABLE else value for name, value in env.items()}


def _server(config: RunConfig, actor: ActorSpec) -> PlannedProcess:
    """About as `actors/engines/sglang_launched.py` starts it, which asks the installed SGLang for names first."""
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
    if config.control.tcp:
        yield f"launcher: {config.control.tcp} for commands from other hosts (encrypted)"


def files(config: RunConfig) -> Iterator[str]:
    """What will lie in the run directory."""
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
