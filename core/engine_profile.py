"""What an engine that profiles itself tells about it: a server's profiler is its own, and so is its disk, perhaps.

An engine in the actor's own process needs none of this: a profile of the process has it too.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .messages import Record


class EngineTrace(Record, frozen=True, kw_only=True):
    """What became of the profile of one server."""

    engine: str
    """The server: its address, or the actor whose engine it is."""
    place: str = ""
    """The folder of the traces on the server's host, or how to find it."""
    files: tuple[str, ...] = ()
    """Names in that folder, one for each rank; a pattern where the folder cannot be looked into from here."""
    refused: str = ""
    """Why there is none: place, cause, remedy."""


@runtime_checkable
class ProfilesItself(Protocol):
    """An engine whose servers record what they do, when they are asked to."""

    async def profile(self, duration_s: float) -> tuple[EngineTrace, ...]:
        """Record for so long, or for as long as is sound if that is shorter, then write. Raises EngineError when the
        only server refuses or does not answer; of several, those are told in their place."""
        ...
