"""From outside into a run of this host: which one is meant, and a node in it. Knows run directories and rendezvous
records; must not know what is asked there."""

from __future__ import annotations

import secrets
from pathlib import Path

from ..core.errors import LaunchError
from ..transport.address import Rendezvous
from ..transport.node import Node
from .run_dir import RunDir

RUNS = Path("runs")
"""Where run directories are looked for when none is named."""


def live_run(named: Path | None) -> RunDir:
    """The run directory that is meant: the one named, else the only run of `runs/` that goes on.

    Raises LaunchError when there is none, or more than one to choose from.
    """
    if named is not None:
        return RunDir(named.resolve())
    found = sorted({record.parent.resolve() for record in RUNS.glob("*/rdzv.json")})
    living = [path for path in found if _goes_on(RunDir(path))]
    if len(living) != 1:
        which = f"{len(living)} go on: {', '.join(map(str, living))}" if living else f"none goes on in {RUNS.resolve()}"
        raise LaunchError(f"which run is meant? {which}", remedy="name the run directory that `myxa up` printed")
    return RunDir(living[0])


def _goes_on(place: RunDir) -> bool:
    try:
        return Path(Rendezvous.load(place.rdzv).socket_dir).is_dir()
    except (LaunchError, OSError, ValueError):
        return False


async def attach_to(place: RunDir, prefix: str, timeout_s: float) -> Node:
    """A node of one's own in the run. Raises LaunchError for a run that is over or goes on elsewhere."""
    if not place.rdzv.exists():
        raise LaunchError(
            f"no run is going on in {place.path}",
            remedy="start one with `myxa up` and name the run directory that it prints; this one is over or is none",
        )
    record = Rendezvous.load(place.rdzv)
    if not Path(record.socket_dir).is_dir():
        raise LaunchError(
            f"the run in {place.path} is over, or goes on on another host",
            remedy="its launcher is gone from here; do this on the host on which `myxa up` runs",
        )
    # The node's name is never used twice, so joining can throw nobody out; actor names are checked by the registry.
    return await Node.attach(
        name=f"{prefix}/{secrets.token_hex(6)}",
        rdzv=record,
        node_rank=record.endpoints.node_rank,
        timeout_s=timeout_s,
    )
