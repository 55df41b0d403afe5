"""From outside into a run of this host: a node of one's own in it. Knows run directories and rendezvous records; must
not know what is asked there."""

from __future__ import annotations

import secrets
from pathlib import Path

from ..core.errors import LaunchError
from ..transport.address import Rendezvous
from ..transport.node import Node
from .run_dir import RunDir


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
