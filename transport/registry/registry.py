"""The registry: the one well-known actor. Issues epochs, keeps the directory, reports arrivals and exits.

Hosted by the launcher of node 0. The data plane does not need it: nodes call each other directly and use their mirrors
while it is away; only joining and reports of exits wait for it. With a journal it may die and come back: it then has
its members again, and reports none of them as gone before that member had time to report.

`RegistryRights` says who may tell the registry what; no member speaks in another's name. The caller is known by its
connection. A caller over ipc or in the process is trusted as far as the operating system trusts it: to the processes of
one user on one host everything is allowed, as to launchers. Sans-IO.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from ...core.actor import Actor
from ...core.errors import LaunchError, NotPermitted, StaleEpoch
from ...core.handlers import call, current_caller, stream
from ...core.ids import PeerKey, check_name
from ...core.supervision import describe_status
from ..session.guard import ANYBODY, ROLES, Badge, Guard, is_provisional
from ..wire import Endpoints, is_public_key
from .directory import ActorRecord, DirectoryUpdate, NodeRecord
from .journal import Entry, Known, Over, RegistryJournal
from .state import REGISTRY_NODE_ID, RegistryState

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
        """A journal that cannot be written stops grants, but nobody is kept from hearing who has gone."""
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


class RegistryRights:
    """Each method raises NotPermitted; StaleEpoch for a caller that is over."""

    def __init__(self, state: RegistryState, guard: Guard | None) -> None:
        self._state = state
        self._guard = guard
        self.num_refused = 0

    def to_register(self, name: str, endpoints: Endpoints, caller: PeerKey | None) -> str:
        """May that caller join as `name`, listening there? Returns the role that it has then."""
        if self._guard is None:
            return ANYBODY.role
        badge = self._guard.stranger(caller) if caller is not None and is_provisional(caller) else None
        if badge is None:
            raise self._refusal("only a process that has not joined yet may register")
        expected = self._guard.expected(endpoints.curve)
        badge = expected if expected is not None and badge == ANYBODY else badge
        if badge.name not in ("", name) or badge.key not in ("", endpoints.curve):
            raise self._refusal(f"the key that was announced for {badge.name} was used to join as {name}")
        living = self._state.node(name)
        if living is not None and living.node_id == REGISTRY_NODE_ID:
            raise self._refusal(f"{name} is the process of the registry itself")
        self._check_key(name, endpoints)
        self._guard.joined(endpoints.curve)
        return badge.role

    def _check_key(self, name: str, endpoints: Endpoints) -> None:
        key = endpoints.curve
        if not key:
            if any(endpoints.tcp):
                raise self._refusal(f"{name} listens on tcp and has no key")
            return
        owner = next((n.name for n in self._state.nodes("") if n.endpoints.curve == key), name)
        if not is_public_key(key) or owner != name:
            raise self._refusal(f"{name} gives a key that is {'no key' if owner == name else f'that of {owner}'}")

    def to_speak_for(self, name: str, caller: PeerKey | None) -> None:
        """About `name` itself."""
        record = self._record(caller)
        if record is not None and record.role != "keeper" and record.name != name:
            raise self._refusal(f"{record.name} spoke for {name}")

    def to_rejoin(self, record: NodeRecord, caller: PeerKey | None) -> None:
        """Say again what the registry knew of it; nobody gets another key or role that way."""
        self.to_speak_for(record.name, caller)
        known = self._record(caller)
        if known is not None and (known.key, known.role, known.endpoints.curve) != (
            record.key, record.role, record.endpoints.curve,
        ):  # fmt: skip
            raise self._refusal(f"{known.name} came back with another number, key or role")

    def to_keep(self, what: str, caller: PeerKey | None) -> None:
        """What only launchers may do."""
        record = self._record(caller)
        if record is not None and record.role != "keeper":
            raise self._refusal(f"{record.name} may not {what}")

    def to_expect(self, name: str, public_key: str, role: str, caller: PeerKey | None) -> None:
        """Announce a key; notes it."""
        self.to_keep("announce keys", caller)
        found = ROLES.get(role)
        if found is None or not is_public_key(public_key):
            raise self._refusal(f"there is no role {role!r}" if found is None else "that is no public key")
        if self._guard is not None:
            self._guard.expect(Badge(name, found, public_key))

    def _record(self, caller: PeerKey | None) -> NodeRecord | None:
        """Of a member; None: within the process. Somebody who has not joined may say nothing but `register`."""
        if self._guard is None or caller is None:
            return None
        for record in self._state.nodes(""):
            if record.key == caller:
                return record
        self.num_refused += 1
        raise StaleEpoch(f"{caller} is not registered (any more)")

    def _refusal(self, why: str) -> NotPermitted:
        self.num_refused += 1
        return NotPermitted(why, remedy="a process speaks under its own name and key; launchers hold the job's key")
