"""One server's place in a pool (`engine_pool.py`): its state, and a client that is built anew each time it comes back.

    JOINING    answers, but has not been given a version since it (re)joined: gets weights, no requests
    SERVING    has the pool's version: gets requests and weights
    FENCED     failed, or lost its weights: gets nothing; it is asked from time to time whether it is well again

Knows which state may follow which; must not know why a server is moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import msgspec

from ...core.errors import EngineError
from ...core.protocols import Engine, EngineInfo, ProfilesItself, TellsProgress


class Member(Engine, TellsProgress, ProfilesItself, Protocol):
    """A client of one server."""

    def cut(self) -> None:
        """End all streams at once; their readers get an EngineError."""
        ...


class MemberState(Enum):
    """See the module's head."""

    JOINING = "joining"
    SERVING = "serving"
    FENCED = "fenced"


_ALLOWED: Mapping[MemberState, frozenset[MemberState]] = {
    MemberState.JOINING: frozenset({MemberState.SERVING, MemberState.FENCED}),
    MemberState.SERVING: frozenset({MemberState.SERVING, MemberState.FENCED}),
    MemberState.FENCED: frozenset({MemberState.JOINING}),
}


class PoolServer:
    """See the module's head."""

    def __init__(self, name: str, make: Callable[[], Member]) -> None:
        """`make` builds a client that was not started yet."""
        self.name = name
        self.make = make
        self.client: Member | None = None
        self.state = MemberState.FENCED
        self.reason = "was not started"
        self.info: EngineInfo | None = None
        """What it said when it joined, with the version that it was given last."""
        self.num_running = 0
        self.is_fenced = asyncio.Event()
        self.is_fenced.set()

    def move(self, to: MemberState) -> None:
        """Raises ValueError for a step that does not exist."""
        if to not in _ALLOWED[self.state]:
            raise ValueError(f"{self.name} cannot go from {self.state.value} to {to.value}")
        self.state = to

    def require(self) -> Member:
        """Its client. Raises EngineError while it is fenced."""
        if self.client is None:
            raise EngineError(f"{self.name} is fenced: {self.reason}", remedy="it comes back with the next version")
        return self.client

    def joined(self, client: Member, info: EngineInfo) -> None:
        """It answers, through this client."""
        self.client, self.info = client, info
        self.is_fenced.clear()
        self.move(MemberState.JOINING)

    def adopted(self, version: int) -> None:
        """It serves that version."""
        self.move(MemberState.SERVING)
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, version=version)

    def fenced(self, why: str) -> None:
        """Nothing more for it."""
        self.move(MemberState.FENCED)
        self.client, self.reason = None, why
        self.is_fenced.set()
