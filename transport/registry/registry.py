"""The registry: the one well-known actor. Issues epochs, knows who is where, tells everybody who came and went.

Hosted by the launcher of node 0. The data plane does not need it: nodes call each other directly and go on from their
mirrors if it is away; only joining and learning of exits wait for it. With a journal it may die and come back: it then
knows whom it knew, and nobody is said to be gone before he had time to report again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from ...core.actor import Actor
from ...core.errors import LaunchError
from ...core.handlers import call, stream
from ...core.ids import PeerKey, check_name
from ...core.scope import current_caller
from ...core.supervision import describe_status
from ..session.guard import Guard
from ..wire import Endpoints
from .directory import ActorRecord, DirectoryUpdate, NodeRecord
from .journal import Entry, Known, Over, RegistryJournal
from .rights import RegistryRights
from .state import RegistryState

REGISTRY = "registry"
REJOIN_S = 20.0
"""How long a restarted registry waits for a process that its last incarnation knew. On its host they notice within
about a second, on others within ten."""

_log = logging.getLogger("myxa.transport")


class RegistryContract(Actor):
    """What nodes and launchers ask of the registry."""

    @call(deadline=10, reentrant=True)
    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        """A process joins; the record holds its number and epoch. An older incarnation of that name is thereby over."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def rejoin(self, record: NodeRecord) -> str:
        """A process that an earlier incarnation of the registry admitted goes on with its epoch. Empty, or why it may
        not: then it is over, and whatever it still does has no effect."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def announce(self, node: str, epoch: int, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> int:
        """All actors of a node; `reasons`: why some that were there are not. Returns the directory's version."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True, safe=True)
    async def leave(self, node: str, epoch: int, reason: str) -> None:
        """A process goes in good order; only itself may say so."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        """A launcher saw the process end (negative status: by a signal). It knows the epoch or the process id; 0: not.

        Everybody is told; calls pending to it fail at once. False if that incarnation was gone or replaced already.
        Give one of the two: with neither, a report that comes late would hit the next incarnation.
        """
        raise NotImplementedError

    @call(deadline=10, reentrant=True)
    async def expect(self, node: str, public_key: str, role: str = "node") -> None:
        """A process of that name will join over tcp with that key and with no other; only launchers may announce it.

        `role`: see `guard.Role`. A later announcement of the same name replaces this one.
        """
        raise NotImplementedError

    @call(deadline=30, reentrant=True, safe=True)
    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        """The node that hosts actor `name`, waiting for it to come up to `wait_s`."""
        raise NotImplementedError

    @call(deadline=10, reentrant=True, safe=True)
    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        """Living incarnations whose node name starts with `prefix`."""
        raise NotImplementedError

    @stream(window=64, safe=True)
    def updates(self, after: int, history: int = 0) -> AsyncIterator[DirectoryUpdate]:
        """Everything that happened after version `after` (-1: a snapshot first), then what happens, for ever.

        `history`: of which incarnation of the registry that version is; for another one a snapshot comes first.
        """
        raise NotImplementedError


class RegistryActor(RegistryContract):
    """See the module's head."""

    def __init__(self, guard: Guard | None = None, journal: RegistryJournal | None = None) -> None:
        self.state = RegistryState()
        self.num_refused = 0
        """Processes that wanted to go on and were over."""
        self._journal = journal
        if journal is not None:
            self.state.restore(journal.entries)
        self._rights = RegistryRights(self.state, guard)
        self._sleepers: dict[asyncio.Event, None] = {}  # in order: a simulated run repeats itself

    async def register(self, node: str, endpoints: Endpoints, pid: int) -> NodeRecord:
        role = self._rights.to_register(check_name(node), endpoints, current_caller())
        record = self.state.grant(node, endpoints, pid, role)
        if self._journal is not None:
            self._journal.append(Known(record=record))
            await self._journal.settle()
        self.state.enter(record)
        self._wake()
        return record

    async def rejoin(self, record: NodeRecord) -> str:
        self._rights.to_rejoin(record, current_caller())
        refusal = self.state.rejoin(record)
        if refusal:
            self.num_refused += 1
            _log.warning("refused: %s", refusal)
        else:
            self._remember(record.name)
        self._wake()
        return refusal

    async def announce(self, node: str, epoch: int, actors: tuple[ActorRecord, ...], reasons: dict[str, str]) -> int:
        self._rights.to_speak_for(node, current_caller())
        self.state.announce(node, epoch, actors, reasons)
        self._remember(node)
        self._wake()
        return self.state.version

    async def leave(self, node: str, epoch: int, reason: str) -> None:
        self._rights.to_speak_for(node, current_caller())
        self._depart(node, epoch, reason)

    async def expect(self, node: str, public_key: str, role: str = "node") -> None:
        self._rights.to_expect(check_name(node), public_key, role, current_caller())

    async def process_exited(self, node: str, epoch: int, status: int, pid: int = 0) -> bool:
        self._rights.to_keep("report the end of another process", current_caller())
        return self._depart(node, epoch, f"its process ended with {describe_status(status)}", pid)

    def unreachable(self, key: PeerKey, why: str) -> None:
        """This process lost the connection to that incarnation for good."""
        for record in self.state.nodes(""):
            if record.key == key:
                self._depart(record.name, record.epoch, why)

    async def resolve(self, name: str, wait_s: float) -> NodeRecord | None:
        give_up_at = self.ctx.clock.monotonic() + wait_s
        while (record := self.state.find(name)) is None:
            left = give_up_at - self.ctx.clock.monotonic()
            if left <= 0 or not await self._sleep(left):
                break
        return self.state.find(name) if record is None else record

    async def list_nodes(self, prefix: str = "") -> tuple[NodeRecord, ...]:
        return self.state.nodes(prefix)

    async def updates(self, after: int, history: int = 0) -> AsyncIterator[DirectoryUpdate]:
        version = after
        while True:
            for update in self.state.since(version, history):
                yield update
                version, history = update.version, update.history
            if version == self.state.version:
                await self._sleep(None)

    async def on_start(self) -> None:
        """Give those whom the last incarnation knew their time."""
        if self.state.presumed:
            self.ctx.spawn(self._wait_for_presumed(), name="wait for those who were there")

    async def on_stop(self, why: str) -> None:
        """Nothing is granted any more."""
        if self._journal is not None:
            self._journal.close()

    async def _wait_for_presumed(self) -> None:
        await asyncio.sleep(REJOIN_S)
        for name in sorted(self.state.presumed):
            record = self.state.node(name)
            if record is not None:
                self._depart(name, record.epoch, f"it did not report within {REJOIN_S:g} s of the registry's restart")

    def _depart(self, node: str, epoch: int, reason: str, pid: int = 0) -> bool:
        record = self.state.node(node)
        if record is None or not self.state.depart(node, epoch, reason, pid):
            return False
        self._write(Over(node=node, epoch=record.epoch, reason=reason))
        self._wake()
        return True

    def _remember(self, node: str) -> None:
        record = self.state.node(node)
        if record is not None:
            self._write(Known(record=record))

    def _write(self, entry: Entry) -> None:
        """News: a journal that cannot be written stops grants, but nobody is kept from hearing who has gone."""
        if self._journal is None:
            return
        try:
            self._journal.append(entry)
        except LaunchError as error:
            _log.error("%s", error)

    async def _sleep(self, timeout_s: float | None) -> bool:
        """Until something changes; False after `timeout_s`. A subscriber's wait ends with its stream."""
        changed = asyncio.Event()
        self._sleepers[changed] = None
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return False
        finally:
            del self._sleepers[changed]
        return True

    def _wake(self) -> None:
        for changed in self._sleepers:
            changed.set()
