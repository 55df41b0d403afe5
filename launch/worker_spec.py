"""What a worker process is told, in a file that only this user can read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ..core.errors import LaunchError
from ..transport.address import make_private
from .actor_spec import ActorSpec

DEFAULT_PROGRAM = "myxa.launch.program:build_actor"
"""The composition root: `(ActorSpec, RunConfig) -> Actor`."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attempt of one actor."""

    actor: ActorSpec
    attempt: int
    launcher_pid: int
    config_path: str
    run_dir: str
    socket_dir: str
    rdzv_path: str
    """File that says how to reach the registry."""
    key: str = ""
    """Key pair under which the process joins and speaks over tcp; the registry knows it. The job's key stays with the
    launchers."""
    program: str = DEFAULT_PROGRAM


def write_spec(spec: WorkerSpec, folder: Path) -> Path:
    """Write it (0600) into the run-time directory; returns the file. Raises OSError or LaunchError."""
    if not folder.is_dir():  # it was removed under the run
        make_private(folder)
    path = folder / f"{spec.actor.name.replace('/', '.')}.{spec.attempt}.json"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(spec))
    return path


def read_spec(path: str) -> WorkerSpec:
    """Read it; LaunchError if there is none or it is of another make."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=WorkerSpec)
    except (OSError, msgspec.DecodeError) as error:
        raise LaunchError(
            f"worker description {path!r} cannot be used: {error}",
            remedy="workers are started by `myxa up` or `myxa launch`, with the same version of myxa",
        ) from error
