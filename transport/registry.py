"""The registry: the one well-known actor. Issues epochs, knows who is where, tells everybody who came and went.

Hosted by the launcher of node 0. The data plane does not need it: nodes call each other directly and go on from their
mirrors if it is away; only joining and learning of exits wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from ..core.actor import Actor
from ..core.handlers import call, stream
from ..core.ids import PeerKey, check_name
from .directory import ActorRecord, DirectoryUpdate, NodeRecord
from .registry_state import RegistryState, exit_reason
from .wire import Endpoints

REGISTRY = "registry"


class RegistryContract(Actor):
    """What nodes and launchers ask of the registry."""

    @call(deadline=10, reentrant=True)
    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        """A process joins; the record holds its number and epoch. An older incarnation of that name is thereby over."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def announce(self, node: str, epoch: int, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> int:
        """All actors of a node; `reasons`: why some that were there are not. Returns the directory's version."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def leave(self, node: str, epoch: int, reason: str) -> None:
        """A process goes in good order."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        """A launcher saw the process end (negative status: by a signal). It knows the epoch or the process id; 0: not.

        Everybody is told; calls pending to it fail at once. False if that incarnation was gone or replaced already.
        Give one of the two: with neither, a report that comes late would hit the next incarnation.
        """
        raise NotImplementedError

    @call(deadline=30, reentrant=True)
    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        """The node that hosts actor `name`, waiting for it to come up to `wait_s`."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        """Living incarnations whose node name starts with `prefix`."""
        raise NotImplementedError

    @stream(window=64)
    def updates(self, after: int) -> AsyncIterator[DirectoryUpdate]:
        """Everything that happened after version `after` (-1: a snapshot first), then what happens, for ever."""
        raise NotImplementedError


class RegistryActor(RegistryContract):
    """See the module's head."""

    def __init__(self) -> None:
        self.state = RegistryState()
        self._sleepers: set[asyncio.Event] = set()

    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        record = self.state.register(check_name(node), endpoints, pid)
        self._wake()
        return record

    async def announce(self, node: str, epoch: int, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> int:
        self.state.announce(node, epoch, actors, reasons)
        self._wake()
        return self.state.version

    async def leave(self, node: str, epoch: int, reason: str) -> None:
        if self.state.depart(node, epoch, reason):
            self._wake()

    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        was_current = self.state.depart(node, epoch, exit_reason(status), pid)
        if was_current:
            self._wake()
        return was_current

    def unreachable(self, key: PeerKey, why: str) -> None:
        """This process lost the connection to that incarnation for good."""
        for record in self.state.nodes(""):
            if record.key == key and self.state.depart(record.name, record.epoch, why):
                self._wake()

    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        give_up_at = self.ctx.clock.monotonic() + wait_s
        while (record := self.state.find(name)) is None:
            left = give_up_at - self.ctx.clock.monotonic()
            if left <= 0 or not await self._sleep(left):
                break
        return self.state.find(name) if record is None else record

    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        return self.state.nodes(prefix)

    async def updates(self, after: int) -> AsyncIterator[DirectoryUpdate]:
        version = after
        while True:
            for update in self.state.since(version):
                yield update
                version = update.version
            if version == self.state.version:
                await self._sleep(None)

    async def _sleep(self, timeout_s: float | None) -> bool:
        """Until something changes; False after `timeout_s`. A subscriber's wait ends with its stream."""
        changed = asyncio.Event()
        self._sleepers.add(changed)
        try:
            await asyncio.wait_for(changed.wait(), timeout_s)
        except TimeoutError:
            return False
        finally:
            self._sleepers.discard(changed)
        return True

    def _wake(self) -> None:
        for changed in self._sleepers:
            changed.set()
