"""How a worker process is started: its specification (a file that only this user can read), command and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..core.config.run import LOCAL_HOSTS
from ..core.errors import LaunchError, raised_as
from ..core.process import past_proxies
from ..transport.address import make_private
from .actor_spec import ActorSpec, GangRendezvous

DEFAULT_PROGRAM = "myxa.launch.program:build_actor"
"""The composition root: `(ActorSpec, RunConfig) -> Actor`."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt of one actor."""

    actor: ActorSpec
    launcher_pid: int
    run_dir: str
    socket_dir: str
    """With the rendezvous record."""
    key: str = ""
    """Key pair under which the process joins and speaks over tcp; the registry knows it. The job's key stays with the
    launchers."""
    program: str = DEFAULT_PROGRAM


def write_spec(spec: ProcessSpec, folder: Path) -> Path:
    """Write it (0600) into the run-time directory; returns the file. Raises OSError or LaunchError."""
    if not folder.is_dir():  # it was removed under the run
        make_private(folder)
    path = folder / f"{spec.actor.name.replace('/', '.')}.{spec.actor.attempt}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(spec))
    return path


def read_spec(path: str) -> ProcessSpec:
    """Read it; LaunchError if there is none or it is of another make."""
    remedy = "workers are started by `myxa up` or `myxa launch`, with the same version of myxa"
    with raised_as(
        LaunchError, f"worker description {path!r} cannot be used", OSError, msgspec.DecodeError, remedy=remedy
    ):
        return msgspec.json.decode(Path(path).read_bytes(), type=ProcessSpec)


SPEC_VARIABLE = "MYXA_WORKER_SPEC"
"""Names the JSON file with a worker's specification."""

WORKER_MODULE = "myxa.launch.worker"

ROOM_VARIABLE, ROOM_BYTES = "MYXA_ROOM", 4096
"""Takes up room where the kernel shows variables, for those that a forked process gets (nodes/fork_server.py)."""

_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
"""Not inherited: they would be those of whatever started the launcher."""


def worker_command(actor: ActorSpec) -> tuple[str, ...]:
    return (actor.python or sys.executable, "-m", WORKER_MODULE)


def child_env(
    base: Mapping[str, str], actor: ActorSpec, *, spec_path: str, run_id: str, meeting: GangRendezvous | None = None
) -> dict[str, str]:
    """Variables of one attempt: the launcher's own, ours, then the role's `env`, which may overrule all but the spec.

    A gang's ranks get torchrun's contract, so that unmodified torch and Megatron code runs. ValueError if a rank has
    no meeting place.
    """
    env = {name: value for name, value in base.items() if name not in _TORCHRUN}
    env["OMP_NUM_THREADS"] = str(actor.threads)
    env["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in actor.visible_devices)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA may count the fastest first; our numbers are nvidia-smi's
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    # What actors start (servers, agents) speaks to them over loopback, whatever proxy the shell names for the world.
    env |= past_proxies(env, *LOCAL_HOSTS)
    if actor.rank is not None:
        if meeting is None:
            raise ValueError(f"{actor.name} is a rank of {actor.rank.gang} and has no meeting place")
        facts = msgspec.structs.asdict(actor.rank)
        env |= {name.upper(): str(fact) for name, fact in facts.items() if name != "gang"}
        env |= {
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": str(actor.attempt),
        }
    env |= actor.env
    env[SPEC_VARIABLE] = spec_path
    return env


def server_env(base: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process from which actors are forked: what Python reads when it begins is as theirs, numeric
    libraries start no threads."""
    env = {name: value for name, value in base.items() if name not in _TORCHRUN}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env[ROOM_VARIABLE] = "." * ROOM_BYTES
    return env
