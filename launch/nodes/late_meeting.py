"""Where a node that comes late meets the run: from what a person or a scheduler can name. Reads files, opens nothing.

A run directory is enough where it is shared: it says the address, and the file of the job's key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import ConfigError, LaunchError
from ...transport.address import Rendezvous
from ..node_place import NodePlace, find_late_place
from ..run_dir import RunDir


@dataclass(frozen=True, slots=True)
class LateMeeting:
    """As `launch` takes it."""

    place: NodePlace
    rdzv_file: Path | None
    job_key: Path | None


def find_meeting(where: str, rdzv_file: Path | None, job_key: Path | None, env: Mapping[str, str]) -> LateMeeting:
    """`where`: a run directory, HOST:PORT, the file with it, or empty: `rdzv_file`, else what the scheduler says.
    Raises ConfigError and LaunchError."""
    path = Path(where)
    if where and path.is_dir():
        return _of_run(RunDir(path.resolve()), job_key)
    if where and path.is_file():
        return LateMeeting(NodePlace(-1, 0, None), path, job_key)
    if "/" in where.removeprefix("tcp://"):
        raise ConfigError(
            f"--join: there is no {where}", remedy="name the directory of a run that goes on, or HOST:PORT"
        )
    if not where and rdzv_file is not None:
        return LateMeeting(NodePlace(-1, 0, None), rdzv_file, job_key)
    return LateMeeting(find_late_place(where, env), None, job_key)


def _of_run(run_dir: RunDir, job_key: Path | None) -> LateMeeting:
    if not run_dir.rdzv.exists():
        raise LaunchError(f"no run is going on in {run_dir.path}", remedy="name the directory of one that does")
    record = Rendezvous.load(run_dir.rdzv)
    if not any(record.endpoints.tcp):
        raise LaunchError(
            f"the run in {run_dir.path} was started for one machine: nobody else can reach it",
            remedy="start it with `myxa launch --nnodes 1:MAX --rdzv HOST:PORT` where others may come",
        )
    key = Path(record.key_file) if record.key_file else None
    return LateMeeting(find_late_place(record.endpoints.tcp[0], {}), None, job_key or key)
