"""Signals to the processes of actors, wherever they run: sent by the agents of their nodes. Decides nothing."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import CallError, LaunchError
from .roster import ActorRecord

if TYPE_CHECKING:
    from .run_supervisor import RunSupervisor

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "CONT": signal.SIGCONT}


async def send_signal(supervisor: RunSupervisor, meant: Sequence[ActorRecord], name: str, who: str) -> list[str]:
    """Send the signal (of `SIGNALS`) to the processes of these actors and all that they started; returns who got it.
    `who`: asked for it, and why, for the report if it ends the run. Raises LaunchError if a node could not be asked."""
    sent: list[str] = []
    for node, names in supervisor.crew.by_node([record.name for record in meant]):
        for actor in names:
            supervisor.signalled(actor, SIGNALS[name], who)
        try:
            sent += await supervisor.agent(node).signal_actors(names, int(SIGNALS[name]))
        except CallError as error:
            raise LaunchError(f"node {node} was not asked: {error}; signalled before: {sent}") from error
    return sent
