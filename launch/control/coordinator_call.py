"""Asking the coordinator on an operator's behalf, who must be told when it is just being started anew.

A coordinator that died is back within seconds: a request waits that long for it. One that dies over a request may have
carried it out; that is said, never guessed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ...actors.contracts.roles import CoordinatorContract
from ...core.actor import with_deadline
from ...core.errors import LaunchError, NoSuchActor, NotSent, PeerDied
from .verb import Room

NAME = "coordinator"
WAIT_S = 5.0


@asynccontextmanager
async def coordinator_call(room: Room, seconds: float) -> AsyncGenerator[CoordinatorContract]:
    """A reference with that deadline, to be used inside the block. Raises NotSent while it is away, PeerDied when it
    ends meanwhile."""
    try:
        await room.node.wait_for(NAME, timeout_s=WAIT_S)
    except LaunchError as error:
        raise _away(room) from error
    try:
        yield with_deadline(room.node.ref(CoordinatorContract, NAME), seconds)
    except PeerDied as error:
        raise PeerDied(
            "the coordinator ended over this request and is being restarted; it may or may not have been carried out",
            remedy="`myxa history` and `myxa get` tell; then ask again",
        ) from error
    except (NoSuchActor, NotSent) as error:
        raise _away(room) from error


def _away(room: Room) -> NotSent:
    record = next((record for record in room.supervisor.roster() if record.name == NAME), None)
    state = f"{record.state}, attempt {record.attempt}" if record is not None else "not there"
    return NotSent(f"the coordinator is restarting ({state}): nothing was asked of it", remedy="ask again in a moment")
